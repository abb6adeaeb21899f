"""Prefills and decodes of one router on one stream; each leg runs the handler that its call would."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from steelyard.v1 import agent_pb2

from servicekit.outbox import Outbox
from servicekit.status import DETAILS_KEY
from servicekit.tasks import end_tasks
from servicekit.tracing import REQUEST_ID_KEY, TRACEPARENT_KEY

Handler = Callable[[Any, Any], Awaitable[Any]]

MAX_UNREAD = 64
"""Answers that a leg has on their way at most; beyond, its engine waits for the reader."""
REST_SECONDS = 0.002
"""After a message, tokens wait that long for others to travel with; first tokens and ends do not."""


class LegContext:
    """What a handler sees of its leg: of gRPC's ServicerContext all that handlers use."""

    def __init__(self, begin: agent_pb2.LegRequest, outbox: Outbox[agent_pb2.LegResponse]) -> None:
        self._leg = begin.leg
        self._begin = begin
        self._outbox = outbox
        self._loop = asyncio.get_running_loop()
        timeout = begin.timeout.ToNanoseconds() / 1e9 if begin.HasField("timeout") else None
        self._ends_at = None if timeout is None else self._loop.time() + timeout
        self._unread = 0
        self._room = asyncio.Event()
        self._code: grpc.StatusCode | None = None
        self.task: asyncio.Task[None]
        self.timer: asyncio.TimerHandle | None = None
        self.ended = False

    def time_remaining(self) -> float | None:
        """Return the seconds left; None where the caller set no deadline."""
        return None if self._ends_at is None else self._ends_at - self._loop.time()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what a call has as metadata."""
        begin = self._begin
        return ((TRACEPARENT_KEY, begin.traceparent), (REQUEST_ID_KEY, begin.request_id))

    def code(self) -> grpc.StatusCode | None:
        """Return the code that the handler has set; None while it has not."""
        return self._code

    async def write(self, response: agent_pb2.DecodeResponse) -> None:
        """Send tokens; waits while too many are unread, and until they are on their way."""
        while self._unread >= MAX_UNREAD:
            self._room.clear()
            await self._room.wait()
        self._unread += 1
        answer = agent_pb2.LegResponse(leg=self._leg, decode=response)
        if response.finish_reason:
            self.ended = True
            self._outbox.put(answer)
            return
        await self._outbox.sent(answer, urgent=response.HasField("first_token_time"))

    def read(self, count: int) -> None:
        """Note that the caller has read so many answers."""
        self._unread = max(0, self._unread - count)
        self._room.set()

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        """End the leg with a status.

        Raises:
            AbortError: always.
        """
        self._code = code
        self.end(code, details, dict(trailing_metadata).get(DETAILS_KEY, b""))
        raise grpc.aio.AbortError

    async def abort_with_status(self, status: grpc.Status) -> None:
        """End the leg with a rich status.

        Raises:
            AbortError: always.
        """
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def answer(self, response: agent_pb2.PrefillResponse) -> None:
        """End a prefill with what it came to."""
        self.ended = True
        self._outbox.put(agent_pb2.LegResponse(leg=self._leg, prefill=response))

    def end(self, code: grpc.StatusCode, message: str = "", details: str | bytes = b"") -> None:
        """Say how the leg ended, unless that is said."""
        if self.ended:
            return
        self.ended = True
        end = agent_pb2.LegEnd(code=code.value[0], message=message)
        end.details = details if isinstance(details, bytes) else details.encode()
        self._outbox.put(agent_pb2.LegResponse(leg=self._leg, end=end))


class Exchange:
    """One stream's legs, from their first to their last.

    Args:
        prefill: Serves a prefill, as the unary call.
        decode: Serves a decode, as the streaming call.
        stopping: Set when the server stops: no leg begins any more, the stream ends with the last.
    """

    def __init__(self, prefill: Handler, decode: Handler, stopping: asyncio.Event) -> None:
        self._prefill = prefill
        self._decode = decode
        self._stopping = stopping
        self._legs: dict[int, LegContext] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        """Show how much runs."""
        return f"<Exchange of {len(self._legs)} legs>"

    async def run(self, requests: AsyncIterator[agent_pb2.ExchangeRequest], context: Any) -> None:
        """Serve until the caller or the server ends the stream; then nothing of it runs."""

        async def send(legs: Sequence[agent_pb2.LegResponse]) -> None:
            await context.write(agent_pb2.ExchangeResponse(legs=legs))

        outbox = Outbox(send, agent_pb2.LegResponse.ByteSize, rest_seconds=REST_SECONDS)
        await context.write(agent_pb2.ExchangeResponse())
        loop = asyncio.get_running_loop()
        ways_to_end = [
            loop.create_task(self._read(requests, outbox)),
            loop.create_task(outbox.run()),
            loop.create_task(self._drained(outbox)),
        ]
        try:
            done, _ = await asyncio.wait(ways_to_end, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            running = list(self._legs.values())
            await end_tasks([*ways_to_end, *(leg.task for leg in running)])

    async def _read(
        self,
        requests: AsyncIterator[agent_pb2.ExchangeRequest],
        outbox: Outbox[agent_pb2.LegResponse],
    ) -> None:
        async for request in requests:
            for leg in request.legs:
                news = leg.WhichOneof("news")
                known = self._legs.get(leg.leg)
                if news in {"prefill", "decode"}:
                    self._begin(leg, LegContext(leg, outbox), is_new=known is None)
                elif known is None:
                    continue
                elif news == "read":
                    known.read(leg.read)
                elif news == "cancel":
                    known.task.cancel()

    def _begin(self, leg: agent_pb2.LegRequest, context: LegContext, *, is_new: bool) -> None:
        if self._stopping.is_set():
            context.end(grpc.StatusCode.UNAVAILABLE, "the agent is stopping")
            return
        if not is_new:
            context.end(grpc.StatusCode.INVALID_ARGUMENT, f"leg: {leg.leg} is running")
            return
        serve = self._serve_prefill if leg.HasField("prefill") else self._serve_decode
        loop = asyncio.get_running_loop()
        context.task = loop.create_task(serve(leg, context))
        seconds = context.time_remaining()
        if seconds is not None:
            context.timer = loop.call_later(seconds, context.task.cancel)
        self._legs[leg.leg] = context
        self._empty.clear()
        context.task.add_done_callback(lambda task: self._ended(leg.leg, context, task))

    async def _serve_prefill(self, leg: agent_pb2.LegRequest, context: LegContext) -> None:
        context.answer(await self._prefill(leg.prefill, context))

    async def _serve_decode(self, leg: agent_pb2.LegRequest, context: LegContext) -> None:
        await self._decode(leg.decode, context)

    def _ended(self, number: int, context: LegContext, task: "asyncio.Task[None]") -> None:
        del self._legs[number]
        if not self._legs:
            self._empty.set()
        if context.timer is not None:
            context.timer.cancel()
        if task.cancelled():
            left_seconds = context.time_remaining()
            late = left_seconds is not None and left_seconds <= 0
            codes = grpc.StatusCode
            context.end(codes.DEADLINE_EXCEEDED if late else codes.CANCELLED)
        elif (error := task.exception()) is None:
            context.end(grpc.StatusCode.OK)
        elif not isinstance(error, grpc.aio.AbortError):
            context.end(grpc.StatusCode.UNKNOWN, repr(error))

    async def _drained(self, outbox: Outbox[agent_pb2.LegResponse]) -> None:
        """Return once the server stops, nothing runs and all is sent."""
        await self._stopping.wait()
        await self._empty.wait()
        await outbox.idle()
