"""One stream to one agent that carries all prefills and decodes, in place of a call for each."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc
from steelyard.v1 import agent_pb2, agent_pb2_grpc

from servicekit.outbox import MAX_BATCH_BYTES, Outbox
from servicekit.status import DETAILS_KEY
from servicekit.tasks import end_tasks
from servicekit.tracing import REQUEST_ID_KEY, TRACEPARENT_KEY

Metadata = Sequence[tuple[str, str]]

_READ_AT_ONCE = 16
"""So many answers are read before the agent is told; it stops at four times that."""
_LEEWAY_SECONDS = 0.1
"""A leg may take that much longer than its caller has: whose time is up is told so by whoever gave
it the time, and ends its legs; this is for callers that cannot."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_EXCHANGE = "/steelyard.v1.AgentService/Exchange"
_PREFILL, _DECODE = "prefill", "decode"


class Leg:
    """One leg, to be read as the call of a stream is."""

    __slots__ = ("_arrived", "_end", "_link", "_number", "_timer", "_unsaid", "_waiter")

    def __init__(self, link: "Link", number: int) -> None:
        self._link = link
        self._number = number
        self._arrived: deque[Any] = deque()
        self._end: tuple[grpc.StatusCode, str, bytes] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unsaid = 0

    def __repr__(self) -> str:
        """Show what waits to be read."""
        return f"<Leg {self._number}, {len(self._arrived)} unread, ended {self._end}>"

    async def read(self) -> Any:
        """Return the next answer, or grpc.aio.EOF after the last.

        Raises:
            AioRpcError: The leg has failed, its time is up, or it was cancelled.
        """
        while not self._arrived:
            if self._end is not None:
                return self._result()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        response = self._arrived.popleft()
        self._unsaid += 1
        if self._unsaid >= _READ_AT_ONCE and self._end is None:
            self._link.say(agent_pb2.LegRequest(leg=self._number, read=self._unsaid))
            self._unsaid = 0
        return response

    def cancel(self) -> None:
        """End it, at the agent as well; one that has ended is left alone."""
        self._break_off(grpc.StatusCode.CANCELLED, "cancelled by the router")

    def limit(self, seconds: float) -> None:
        """Break it off unless it ends in time."""
        self._timer = asyncio.get_running_loop().call_later(
            seconds, self._break_off, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
        )

    def arrive(self, response: Any, *, last: bool) -> None:
        """Take an answer in; for the link only."""
        self._arrived.append(response)
        if last:
            self.end(grpc.StatusCode.OK, "", b"")
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, code: grpc.StatusCode, message: str, details: bytes) -> None:
        """Note how it ended, unless it has; for the link only."""
        if self._end is not None:
            return
        self._end = (code, message, details)
        self._link.forget(self._number)
        if self._timer is not None:
            self._timer.cancel()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _break_off(self, code: grpc.StatusCode, message: str) -> None:
        if self._end is None:
            self._link.say(agent_pb2.LegRequest(leg=self._number, cancel=agent_pb2.LegCancel()))
            self._arrived.clear()
            self.end(code, message, b"")

    def _result(self) -> Any:
        assert self._end is not None
        code, message, details = self._end
        if code is grpc.StatusCode.OK:
            return grpc.aio.EOF
        raise _failed(code, message, details)


class Link:
    """All legs on one agent; has the methods of the agent's stub that legs need.

    Its stream begins with it and is not begun again: a link that has `ended` is replaced. Messages
    too large to share a stream, and all of them where the agent knows no Exchange, go as calls.

    What begins a leg is an ExchangeRequest of that leg alone, which its caller fills in where it
    stands: copying a long prompt from message to message costs more than sending it.
    """

    def __init__(self, channel: grpc.aio.Channel, stub: agent_pb2_grpc.AgentServiceStub) -> None:
        self._stub = stub
        self._legs: dict[int, Leg] = {}
        self._number = 0
        # Requests are given to it encoded: a batch is their encodings one after the other, since a
        # message's encoding followed by another's reads as the two merged.
        self._stream: Any = channel.stream_stream(
            _EXCHANGE, response_deserializer=agent_pb2.ExchangeResponse.FromString
        )()
        self._outbox = Outbox[bytes](self._send, len)
        self._failure = (grpc.StatusCode.UNAVAILABLE, "the agent has ended the stream", b"")
        self.ended = False
        self._calls_only = False
        loop = asyncio.get_running_loop()
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._tasks = [loop.create_task(self._read()), loop.create_task(self._outbox.run())]
        for task in self._tasks:
            task.add_done_callback(self._broke)

    def __repr__(self) -> str:
        """Show how much runs."""
        return f"<Link of {len(self._legs)} legs{', ended' if self.ended else ''}>"

    @property
    def usable(self) -> bool:
        """Whether legs may begin on it."""
        return self._calls_only or not self.ended

    async def ready(self, seconds: float | None, *others: asyncio.Future[None]) -> None:
        """Wait until it is known what the agent can do; no longer than that, or than others take."""
        if not self._greeted.done():
            either = (self._greeted, *others)
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    async def Prefill(  # noqa: N802
        self,
        request: agent_pb2.ExchangeRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109  as the stub has it
        metadata: Metadata,
    ) -> agent_pb2.PrefillResponse:
        """Prefill what the leg in `request` says; see the proto.

        Raises:
            AioRpcError: The agent or its engine failed or refused.
        """
        leg = self._begin(request, timeout, metadata)
        if leg is None:
            prefill = request.legs[0].prefill
            return await self._stub.Prefill(prefill, timeout=timeout, metadata=metadata)
        try:
            response = await leg.read()
        finally:
            leg.cancel()
        if isinstance(response, agent_pb2.PrefillResponse):
            return response
        raise _failed(grpc.StatusCode.INTERNAL, "the prefill ended without an answer")

    def Decode(  # noqa: N802
        self, request: agent_pb2.ExchangeRequest, *, timeout: float | None, metadata: Metadata
    ) -> Any:
        """Generate what the leg in `request` says; what is returned has `read` and `cancel`."""
        leg = self._begin(request, timeout, metadata)
        if leg is None:
            decode = request.legs[0].decode
            return self._stub.Decode(decode, timeout=timeout, metadata=metadata)
        return leg

    def say(self, news: agent_pb2.LegRequest) -> None:
        """Tell the agent something; for legs only."""
        if not self.ended:
            self._outbox.put(agent_pb2.ExchangeRequest(legs=[news]).SerializeToString())

    def forget(self, number: int) -> None:
        """Drop a leg that has ended; for legs only."""
        self._legs.pop(number, None)

    async def close(self) -> None:
        """End the stream and all legs."""
        self._stream.cancel()
        await end_tasks(self._tasks)

    def _begin(
        self, request: agent_pb2.ExchangeRequest, timeout: float | None, metadata: Metadata
    ) -> Leg | None:
        """Begin a leg; None where it has to go as a call."""
        if self._calls_only:
            return None
        (begin,) = request.legs
        self._number += 1
        begin.leg = self._number
        for key, value in metadata:
            if key == TRACEPARENT_KEY:
                begin.traceparent = value
            elif key == REQUEST_ID_KEY:
                begin.request_id = value
        if timeout is not None:
            seconds = max(0.0, timeout) + _LEEWAY_SECONDS
            begin.timeout.FromNanoseconds(round(seconds * 1e9))
        encoded = request.SerializeToString()
        if len(encoded) > MAX_BATCH_BYTES:
            return None
        leg = Leg(self, self._number)
        if self.ended:
            leg.end(*self._failure)
            return leg
        self._legs[self._number] = leg
        if timeout is not None:
            leg.limit(seconds)
        self._outbox.put(encoded)
        return leg

    async def _send(self, requests: Sequence[bytes]) -> None:
        await self._stream.write(b"".join(requests))

    async def _read(self) -> None:
        read, legs = self._stream.read, self._legs
        while (message := await read()) is not grpc.aio.EOF:
            if not self._greeted.done():
                self._greeted.set_result(None)
            for answer in message.legs:
                leg = legs.get(answer.leg)
                if leg is None:
                    continue
                news = answer.WhichOneof("news")
                if news == _DECODE:
                    response = answer.decode
                    leg.arrive(response, last=bool(response.finish_reason))
                elif news == _PREFILL:
                    leg.arrive(answer.prefill, last=True)
                else:
                    end = answer.end
                    code = _CODES.get(end.code, grpc.StatusCode.UNKNOWN)
                    leg.end(code, end.message, end.details)

    def _broke(self, task: "asyncio.Task[None]") -> None:
        """End with one of the tasks: a stream that is not both read and written is of no use."""
        error = None if task.cancelled() else task.exception()
        if self.ended:
            return
        self.ended = True
        if isinstance(error, grpc.aio.AioRpcError):
            self._failure = (error.code(), error.details() or "", b"")
            self._calls_only = error.code() is grpc.StatusCode.UNIMPLEMENTED
        self._stream.cancel()
        for other in self._tasks:
            other.cancel()
        for leg in list(self._legs.values()):
            leg.end(*self._failure)
        if not self._greeted.done():
            self._greeted.set_result(None)


def _failed(code: grpc.StatusCode, message: str, details: bytes = b"") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata()
    if details:
        trailing.add(DETAILS_KEY, details)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=message)
