"""HTTP/1.1 to one server on this host: kept connections, llhttp's parser, no more than engines need.

An agent makes two calls a request and reads a stream for each token; a general client spends most of
an agent's time on what a server next door never sends (docs/decisions/engine-http.md).
"""

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

_CONNECT_SECONDS = 5.0
_IDLE_SECONDS = 2.0
"""Shorter than servers keep idle connections (uvicorn 5 s), so that none is used as it is closed."""
_REUSE_SECONDS = 0.05
"""How long an answer that is given back may take to end, for its connection to be used again."""
_MOST_UNREAD_BYTES = 256 * 1024


class Answer(asyncio.Protocol):
    """One connection, and the answer that it reads at present."""

    def __init__(self, client: "HttpClient") -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lost: OSError | None = None
        self.idle_since = 0.0
        self.status: int
        self._unread_bytes: int
        self._reset()

    def __repr__(self) -> str:
        """Show how far it is."""
        return f"<Answer {self.status}, {self._unread_bytes} bytes unread, ended={self._ended}>"

    @property
    def usable(self) -> bool:
        """Whether another request may be sent on the connection."""
        return self._lost is None and self._ended and self._keep_alive

    def ask(self, request: bytes) -> None:
        """Send a request; `head` waits for its answer."""
        self._reset()
        self._ended = False
        assert self._transport is not None
        self._transport.write(request)

    async def head(self) -> int:
        """Wait for the status.

        Raises:
            OSError: The connection broke.
        """
        while not self.status:
            if self._lost is not None:
                raise self._lost
            await self._wait()
        return self.status

    async def read_some(self) -> bytes:
        """Return what has come of the body, at least a byte; none at its end.

        Raises:
            OSError: The connection broke, or what came is no HTTP.
        """
        while not self._body:
            if self._ended:
                return b""
            if self._lost is not None:
                raise self._lost
            await self._wait()
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        if self._unread_bytes > _MOST_UNREAD_BYTES and self._transport is not None:
            self._transport.resume_reading()
        self._unread_bytes = 0
        return data

    async def read_all(self) -> bytes:
        """Return the whole body.

        Raises:
            OSError: The connection broke, or what came is no HTTP.
        """
        parts = []
        while data := await self.read_some():
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        """Give the connection back: at once, or soon, should the answer end that soon."""
        if self._ended:
            self._give_back()
        elif self._timer is None:
            self._timer = self._loop.call_later(_REUSE_SECONDS, self.close)

    def close(self) -> None:
        """Hang up, whatever is under way; whoever reads is told."""
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        # uvloop's transports do what asyncio's do and derive from none of them.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever reads."""
        self._transport = None
        if self.status and self._until_close and exc is None:
            self._ended = True
        self._lost = exc if isinstance(exc, OSError) else ConnectionError("the server hung up")
        self._client.left(self)
        self._stop_timer()
        self._wake()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self._ended:
            self.close()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost = ConnectionError(f"the answer is no HTTP: {error}")
            self.close()
        self._wake()

    # What llhttp calls; it goes on to a next message by itself, which nobody has asked for.

    def on_message_begin(self) -> None:
        """Note whether this is the answer."""
        self._excess = self._ended

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note whether the body says by itself where it ends."""
        del value
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        """Take the status."""
        if not self._excess:
            self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Keep a piece; where nobody reads, the server waits."""
        if self._excess:
            return
        self._body.append(body)
        before, self._unread_bytes = self._unread_bytes, self._unread_bytes + len(body)
        if before <= _MOST_UNREAD_BYTES < self._unread_bytes and self._transport is not None:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """Note the end; an answer that was given back gives its connection back."""
        self._keep_alive = self._parser.should_keep_alive() and not self._excess
        self._ended = True
        if self._timer is not None:
            self._give_back()

    def _reset(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self.status = 0
        self._body: deque[bytes] = deque()
        self._unread_bytes = 0
        self._ended = True
        self._excess = False
        self._keep_alive = True
        self._until_close = True

    def _give_back(self) -> None:
        self._stop_timer()
        if self.usable and not self._unread_bytes:
            self.idle_since = self._loop.time()
            self._client.take_back(self)
        else:
            self.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class HttpClient:
    """Asks one server; as many connections as there are requests at a time.

    Args:
        base_url: http or https, with a path in front of all others where the server has one.
    """

    def __init__(self, base_url: str) -> None:
        url = urlsplit(base_url)
        self._base_url = base_url
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host = url.hostname or ""
        self._port = url.port or (443 if self._tls else 80)
        self._path = url.path.rstrip("/")
        self._netloc = url.netloc.rpartition("@")[2]
        self._idle: list[Answer] = []
        self._open: set[Answer] = set()

    def __repr__(self) -> str:
        """Show where the server is."""
        return f"<HttpClient to {self._base_url}, {len(self._open)} connections>"

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()
    ) -> Answer:
        """Send a request and return its answer once the status is there.

        Raises:
            OSError: The server cannot be reached, or hung up.
        """
        lines = [f"{method} {self._path}{path} HTTP/1.1", f"host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if method != "GET":
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        answer = self._kept() or await self._connect()
        try:
            answer.ask("\r\n".join([*lines, "\r\n"]).encode("ascii") + body)
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    async def close(self) -> None:
        """Hang up everywhere."""
        for answer in list(self._open):
            answer.close()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    def take_back(self, answer: Answer) -> None:
        """Keep a connection for the next request; for answers only."""
        self._idle.append(answer)

    def left(self, answer: Answer) -> None:
        """Forget a connection that is closed; for answers only."""
        self._open.discard(answer)
        with contextlib.suppress(ValueError):
            self._idle.remove(answer)

    def _kept(self) -> Answer | None:
        oldest = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while self._idle:
            answer = self._idle.pop()
            if answer.usable and answer.idle_since >= oldest:
                return answer
            answer.close()
        return None

    async def _connect(self) -> Answer:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, answer = await loop.create_connection(
                lambda: Answer(self), self._host, self._port, ssl=self._tls
            )
        self._open.add(answer)
        return answer
