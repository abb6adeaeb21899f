"""How emulated engines hand KV to each other: one line of JSON a message over loopback TCP.

What travels is not KV but the state of the text that the blocks hold (`core.emulation.tokens`):
enough for a decode engine to say the right tokens if it got the right blocks, and wrong ones if it
did not. As with NIXL, the prefill engine answers whoever asks; it does not know what is stale.
"""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

PULL = "pull"
FREE = "free"
RENEW = "renew"


class Ask(msgspec.Struct, frozen=True):
    """From a decode engine: read, free or keep the blocks of a request."""

    op: str
    engine_id: str
    request_id: str


class Content(msgspec.Struct, frozen=True):
    """What the blocks of a request hold now: the state of some text."""

    request_id: str
    state: int


_DECODE_ASK = msgspec.json.Decoder(Ask)
_DECODE_CONTENT = msgspec.json.Decoder(Content)
_ENCODER = msgspec.json.Encoder()

Answer = Callable[[Ask], Content | None]
"""What an engine says to a message; None says nothing."""


class SideChannel:
    """The prefill engine's end: answers every connection until closed."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def start(self, host: str) -> None:
        """Listen on a free port of `host`."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop answering; open connections break, as when the process dies."""
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                content = self._answer(_DECODE_ASK.decode(line))
                if content is not None:
                    writer.write(_ENCODER.encode(content) + b"\n")
        except (OSError, msgspec.DecodeError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


class Peer:
    """The decode engine's end of one connection; opened at first use, again after a failure."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._pending: dict[str, asyncio.Future[int]] = {}
        self._opening = asyncio.Lock()

    async def pull(self, engine_id: str, request_id: str) -> int:
        """Return the state of the text that the request's blocks hold.

        Raises:
            OSError: nobody is there.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        try:
            await self._send(Ask(PULL, engine_id, request_id))
            return await future
        finally:
            self._pending.pop(request_id, None)

    async def tell(self, op: str, engine_id: str, request_id: str) -> None:
        """Send `free` or `renew`; a dead peer has nothing left to free."""
        with contextlib.suppress(OSError):
            await self._send(Ask(op, engine_id, request_id))

    async def close(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self._listening is not None:
            await self._listening

    async def _send(self, ask: Ask) -> None:
        async with self._opening:
            if self._writer is None or self._writer.is_closing():
                reader, self._writer = await asyncio.open_connection(self._host, self._port)
                self._listening = asyncio.create_task(self._listen(reader, self._writer))
        self._writer.write(_ENCODER.encode(ask) + b"\n")

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand answers out; when the connection ends, fail who still waits."""
        try:
            while line := await reader.readline():
                content = _DECODE_CONTENT.decode(line)
                future = self._pending.pop(content.request_id, None)
                if future is not None and not future.done():
                    future.set_result(content.state)
        except (OSError, msgspec.DecodeError):
            pass
        writer.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionResetError("the prefill engine went away"))
