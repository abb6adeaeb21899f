"""An async client of Steelyard's routers: generate, stream, route, explain, cancel.

It stands on the generated stubs alone. A request is tried again, on the next router, only while no
token of it has come: what was begun is never begun twice.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2, status_pb2

from steelyard.v1 import router_pb2, router_pb2_grpc, types_pb2

Prompt = str | Sequence[int]
"""Text, or token ids."""

_RETRYABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})


class RouterError(Exception):
    """Raised when a router refuses a request or cannot serve it.

    The caller corrects `field` where it is set, waits `retry_after_seconds` where that is, and
    looks at `code` and `reason` otherwise.
    """

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(f"{error.code().name}: {error.details()}")
        self.code: grpc.StatusCode = error.code()
        self.message: str = error.details() or ""
        self.reason, self.field = self.code.name, ""
        self.retry_after_seconds: float | None = None
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin" and isinstance(value, bytes):
                self._read(status_pb2.Status.FromString(value))

    def _read(self, status: status_pb2.Status) -> None:
        info, bad, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        for detail in status.details:
            if detail.Unpack(info):
                self.reason = info.reason
            elif detail.Unpack(bad) and bad.field_violations:
                self.field = bad.field_violations[0].field
            elif detail.Unpack(retry):
                self.retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9


@dataclass(slots=True)
class Generation:
    """All of one answer; `usage` as its decode engine counted."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str = ""
    usage: types_pb2.Usage = field(default_factory=types_pb2.Usage)
    receipt: router_pb2.Receipt = field(default_factory=router_pb2.Receipt)


def request(prompt: Prompt, *, max_tokens: int = 64, **fields: Any) -> router_pb2.GenerateRequest:
    """Make a request; `fields` are those of GenerateRequest and of SamplingParams, by their names."""
    names = set(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    given = {name: fields.pop(name) for name in names & fields.keys()}
    message = router_pb2.GenerateRequest(
        max_tokens=max_tokens, sampling=types_pb2.SamplingParams(**given), **fields
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message


class Client:
    """`async with Client("router-0:7400", "router-1:7400") as client:`; any of the routers will do.

    Args:
        addresses: host:port of each router.
        tries: Attempts before the first token, over the routers in turn.
        timeout_seconds: Deadline of a whole request; None for none.
    """

    def __init__(
        self, *addresses: str, tries: int = 3, timeout_seconds: float | None = None
    ) -> None:
        if not addresses or tries < 1:
            raise ValueError("a client needs an address and a try")
        self._channels = [grpc.aio.insecure_channel(address) for address in addresses]
        self._stubs = [router_pb2_grpc.RouterServiceStub(channel) for channel in self._channels]
        self._tries = tries
        self._timeout_seconds = timeout_seconds
        self._turn = 0

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all channels; what is under way is cancelled."""
        for channel in self._channels:
            await channel.close()

    async def stream(
        self, prompt: Prompt, *, max_tokens: int = 64, **fields: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Generate; yields messages as they come. Leaving the loop ends the request everywhere.

        Raises:
            RouterError: It is refused, or broke off.
        """
        message = request(prompt, max_tokens=max_tokens, want_text=True, **fields)
        for attempt in range(1, self._tries + 1):
            begun = False
            call = self._stub().Generate(message, timeout=self._timeout_seconds)
            try:
                async for response in call:
                    begun = begun or bool(response.token_ids)
                    yield response
                return
            except grpc.aio.AioRpcError as error:
                await self._give_up_or_wait(RouterError(error), attempt, begun=begun)
            finally:
                call.cancel()

    async def generate(self, prompt: Prompt, *, max_tokens: int = 64, **fields: Any) -> Generation:
        """Generate and return all of it.

        Raises:
            RouterError: It is refused, or broke off.
        """
        answer = Generation()
        async for response in self.stream(prompt, max_tokens=max_tokens, **fields):
            answer.request_id = answer.request_id or response.request_id
            answer.text += response.text
            answer.token_ids += response.token_ids
            if response.HasField("receipt"):
                answer.receipt = response.receipt
            if response.finish_reason:
                name = types_pb2.FinishReason.Name(response.finish_reason)
                answer.finish_reason = name.removeprefix("FINISH_REASON_").lower()
                answer.stop_reason, answer.usage = response.stop_reason, response.usage
        return answer

    async def route(
        self, prompt: Prompt, *, reserve_seconds: float = 0.0, max_tokens: int = 64, **fields: Any
    ) -> router_pb2.RouteResponse:
        """Decide without generating; `reserve_seconds` holds the placement.

        Raises:
            RouterError: No instance can take it.
        """
        ask = router_pb2.RouteRequest(request=request(prompt, max_tokens=max_tokens, **fields))
        ask.reserve.FromNanoseconds(round(reserve_seconds * 1e9))
        return await self._unary(lambda stub: stub.Route(ask, timeout=self._timeout_seconds))

    async def explain(
        self, subject: str | router_pb2.GenerateRequest
    ) -> router_pb2.ExplainResponse:
        """Return every candidate's price, of a past request by its id, or of `request(…)`.

        Raises:
            RouterError: No router knows the id.
        """
        if isinstance(subject, str):
            ask = router_pb2.ExplainRequest(request_id=subject)
        else:
            ask = router_pb2.ExplainRequest(request=subject)
        return await self._unary(lambda stub: stub.Explain(ask, timeout=self._timeout_seconds))

    async def cancel(self, request_id: str) -> bool:
        """End a request or a reservation; False where no router has it."""
        ask = router_pb2.CancelRequest(request_id=request_id)
        answers = [await stub.Cancel(ask) for stub in self._stubs]
        return any(answer.found for answer in answers)

    async def _unary(self, call: Callable[[Any], Any]) -> Any:
        for attempt in range(1, self._tries + 1):
            try:
                return await call(self._stub())
            except grpc.aio.AioRpcError as error:
                await self._give_up_or_wait(RouterError(error), attempt, begun=False)
        raise AssertionError("the last try neither returned nor raised")

    async def _give_up_or_wait(self, error: RouterError, attempt: int, *, begun: bool) -> None:
        if begun or attempt == self._tries or error.code not in _RETRYABLE:
            raise error
        if attempt >= len(self._stubs) and error.retry_after_seconds:
            # All have been asked: only now does waiting help.
            await asyncio.sleep(error.retry_after_seconds)

    def _stub(self) -> Any:
        self._turn += 1
        return self._stubs[self._turn % len(self._stubs)]
