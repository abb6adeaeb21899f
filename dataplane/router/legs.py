"""The two calls a request makes to agents, and the hand-off between them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from steelyard.v1 import agent_pb2, router_pb2, types_pb2

from dataplane.core.cluster import Instance
from dataplane.router.agents import AgentChannels
from servicekit.clock import Clock
from servicekit.deadline import Deadline
from servicekit.errors import SteelyardError
from servicekit.status import RemoteError, from_rpc_error
from servicekit.tracing import outgoing_metadata

# A hand-off is given up this long before its lease ends: the pull takes time of its own, and
# an engine that is asked too late answers with wrong tokens.
HANDOFF_MARGIN_SECONDS = 2.0
_RELEASE_TIMEOUT_SECONDS = 5.0
_RELEASE_TRIES = 2
_NOT_RETRYABLE = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
_FATE_UNKNOWN = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    }
)


class LegError(Exception):
    """A leg failed; the scheduler decides what becomes of the request.

    `retryable` is False where another instance would answer the same; `fate_unknown` is True where
    the agent may have done, or still do, what it was asked to.
    """

    def __init__(self, remote: RemoteError) -> None:
        super().__init__(f"{remote.code.name} {remote.message}".strip())
        self.remote = remote
        self.retryable = remote.code not in _NOT_RETRYABLE
        self.fate_unknown = remote.code in _FATE_UNKNOWN


@dataclass(slots=True)
class HeldHandoff:
    """A prefilled prompt that nobody has pulled yet."""

    handoff: types_pb2.Handoff
    prefill: Instance
    expires_at: float
    cached_prompt_tokens: int
    engine_seconds: float
    tokens_ahead: int


@dataclass(frozen=True, slots=True)
class Payload:
    """What a request sends to engines, beside where."""

    request_id: str
    prompt_token_ids: Sequence[int]
    message: router_pb2.GenerateRequest


class Legs:
    """Makes the calls of one router; owns no state but the releases under way."""

    def __init__(
        self, agents: AgentChannels, *, clock: Clock, router_id: str, coalesce_seconds: float
    ) -> None:
        self._agents = agents
        self._clock = clock
        self._router_id = router_id
        self._coalesce_seconds = coalesce_seconds
        self._releases: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("dataplane.router.legs")

    async def prefill(self, payload: Payload, at: Instance, deadline: Deadline) -> HeldHandoff:
        """Prefill a prompt and return its hand-off; `abandon` what is not awaited to its end.

        Raises:
            LegError: The agent or its engine failed or refused.
        """
        sent_at = self._clock.monotonic()
        request = agent_pb2.ExchangeRequest()
        prefill = request.legs.add().prefill
        prefill.request_id = payload.request_id
        prefill.router_id = self._router_id
        prefill.prompt_token_ids.extend(payload.prompt_token_ids)
        prefill.sampling.CopyFrom(payload.message.sampling)
        prefill.expected_epoch = at.epoch
        with self._agents.calling(at.address):
            agent = self._agents.link(at.address)
            await agent.ready(deadline.timeout())
            try:
                response = await agent.Prefill(
                    request, timeout=deadline.timeout(), metadata=outgoing_metadata()
                )
            except grpc.aio.AioRpcError as error:
                raise LegError(from_rpc_error(error)) from error
            except asyncio.CancelledError:
                raise _unless_we_are_cancelled() from None
        # The lease runs from the end of the prefill; counting from when it was sent errs on the
        # safe side without comparing two machines' clocks.
        engine_seconds = response.engine_time.ToNanoseconds() / 1e9
        return HeldHandoff(
            handoff=response.handoff,
            prefill=at,
            expires_at=sent_at
            + engine_seconds
            + at.handoff_lease_seconds
            - min(HANDOFF_MARGIN_SECONDS, at.handoff_lease_seconds / 2),
            cached_prompt_tokens=response.cached_prompt_tokens,
            engine_seconds=engine_seconds,
            tokens_ahead=response.tokens_ahead,
        )

    async def decode(
        self,
        payload: Payload,
        at: Instance,
        held: HeldHandoff | None,
        deadline: Deadline,
        hangup: asyncio.Future[None],
    ) -> AsyncGenerator[agent_pb2.DecodeResponse]:
        """Generate; closing the iterator ends the engine's work, and so does `hangup`.

        Raises:
            LegError: The agent or its engine failed or refused, or `hangup` was set.
        """
        request = self._decode_request(payload, at, held)
        with self._agents.calling(at.address):
            agent = self._agents.link(at.address)
            await agent.ready(deadline.timeout(), hangup)
            call = agent.Decode(request, timeout=deadline.timeout(), metadata=outgoing_metadata())

            def cut(_: object) -> None:
                call.cancel()

            hangup.add_done_callback(cut)
            try:
                read: Callable[[], Awaitable[Any]] = call.read
                while (response := await read()) is not grpc.aio.EOF:
                    if response.finish_reason != types_pb2.FINISH_REASON_ABORT:
                        yield response
                        continue
                    if response.token_ids:
                        response.ClearField("finish_reason")
                        yield response
                    raise LegError(_ended("the engine aborted the request"))
            except grpc.aio.AioRpcError as error:
                raise LegError(from_rpc_error(error)) from error
            except asyncio.CancelledError:
                raise _unless_we_are_cancelled() from None
            finally:
                hangup.remove_done_callback(cut)
                call.cancel()

    def _decode_request(
        self, payload: Payload, at: Instance, held: HeldHandoff | None
    ) -> agent_pb2.ExchangeRequest:
        request = agent_pb2.ExchangeRequest()
        decode = request.legs.add().decode
        decode.request_id = payload.request_id
        decode.router_id = self._router_id
        decode.prompt_token_ids.extend(payload.prompt_token_ids)
        decode.max_tokens = payload.message.max_tokens
        decode.sampling.CopyFrom(payload.message.sampling)
        decode.expected_epoch = at.epoch
        decode.want_text = payload.message.want_text
        decode.coalesce.FromNanoseconds(round(self._coalesce_seconds * 1e9))
        if held is not None:
            decode.handoff.CopyFrom(held.handoff)
            left = max(0.0, held.expires_at - self._clock.monotonic())
            decode.handoff_valid_for.FromNanoseconds(round(left * 1e9))
        return request

    def abandon(
        self,
        prefill: asyncio.Task[HeldHandoff],
        payload: Payload,
        at: Instance,
        via: Sequence[Instance],
    ) -> None:
        """Give a prefill up, in the background.

        The agent is asked to abort it and the call is left to say how that went: should the prompt
        have been done already, its KV is held, and only the answer tells how to free it.
        """
        self._in_background(self._abandon(prefill, payload, at, via))

    def abort(self, request_id: str, at: Instance) -> None:
        """Have an agent forget a request whose fate is unknown, in the background."""
        self._in_background(self._abort(request_id, at))

    def release(
        self, held: HeldHandoff, prompt_token_ids: Sequence[int], via: Sequence[Instance]
    ) -> None:
        """Free a hand-off that nobody will pull, in the background.

        An engine frees held KV on the word of a decode engine, so the decode agents in `via` are
        asked in turn, the prefill agent last. Where all fail, the lease's end frees it.
        """
        self._in_background(self._release(held, prompt_token_ids, via))

    async def settle(self) -> None:
        """Wait for the releases under way."""
        if self._releases:
            await asyncio.wait(set(self._releases), timeout=_RELEASE_TIMEOUT_SECONDS)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _abandon(
        self,
        prefill: asyncio.Task[HeldHandoff],
        payload: Payload,
        at: Instance,
        via: Sequence[Instance],
    ) -> None:
        if not prefill.done():
            await self._abort(payload.request_id, at)
            await asyncio.wait([prefill], timeout=_RELEASE_TIMEOUT_SECONDS)
        prefill.cancel()
        with contextlib.suppress(asyncio.CancelledError, SteelyardError):
            try:
                held = await prefill
            except LegError as error:
                # Its time may have run out just as the prompt was done, after the abort.
                if error.fate_unknown:
                    await self._abort(payload.request_id, at)
                return
            await self._release(held, payload.prompt_token_ids, via)

    async def _abort(self, request_id: str, at: Instance) -> None:
        request = agent_pb2.AbortRequest(request_id=request_id)
        # An agent that does not answer has no engine that works on it, or soon will not have.
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._agents.stub(at.address).Abort(request, timeout=_RELEASE_TIMEOUT_SECONDS)

    async def _release(
        self, held: HeldHandoff, prompt_token_ids: Sequence[int], via: Sequence[Instance]
    ) -> None:
        via = [*via[:_RELEASE_TRIES], held.prefill]
        request = agent_pb2.ReleaseRequest(handoff=held.handoff, prompt_token_ids=prompt_token_ids)
        error = "no agent could free it"
        for at in via:
            try:
                answer = await self._agents.stub(at.address).Release(
                    request, timeout=_RELEASE_TIMEOUT_SECONDS
                )
            except grpc.aio.AioRpcError as failure:
                error = failure.details() or failure.code().name
                continue
            if answer.released:
                return
        self._log.info(
            "handoff_not_released",
            handoff_id=held.handoff.handoff_id,
            instance_id=held.prefill.instance_id,
            error=error,
        )


def _unless_we_are_cancelled() -> BaseException:
    """Return what a CancelledError out of a call means.

    grpc.aio raises it for our own cancellation, for a call that was cancelled (a closed channel)
    and for a peer that ends a stream with CANCELLED; only the first one is the caller's.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        return asyncio.CancelledError()
    return LegError(_ended("the call was cancelled on its way or by the agent"))


def _ended(message: str) -> RemoteError:
    code = grpc.StatusCode.CANCELLED
    return RemoteError(
        code=code,
        reason=code.name,
        message=message,
        violations=(),
        metadata={},
        retry_after_seconds=None,
    )
