"""The two calls a request makes to agents, and the hand-off between them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import grpc
import structlog
from steelyard.v1 import agent_pb2, router_pb2, types_pb2

from dataplane.core.cluster import Instance
from dataplane.router.agents import AgentChannels
from servicekit.clock import Clock
from servicekit.deadline import Deadline
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


class LegError(Exception):
    """A leg failed; the scheduler decides what becomes of the request.

    `retryable` is False where another instance would answer the same.
    """

    def __init__(self, remote: RemoteError) -> None:
        super().__init__(f"{remote.code.name} {remote.message}".strip())
        self.remote = remote
        self.retryable = remote.code not in _NOT_RETRYABLE


@dataclass(slots=True)
class HeldHandoff:
    """A prefilled prompt that nobody has pulled yet."""

    handoff: types_pb2.Handoff
    prefill: Instance
    expires_at: float
    cached_prompt_tokens: int
    engine_seconds: float


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
        """Prefill a prompt and return its hand-off.

        Raises:
            LegError: The agent or its engine failed or refused.
        """
        sent_at = self._clock.monotonic()
        call = self._agents.stub(at.address).Prefill(
            agent_pb2.PrefillRequest(
                request_id=payload.request_id,
                router_id=self._router_id,
                prompt_token_ids=payload.prompt_token_ids,
                sampling=payload.message.sampling,
                expected_epoch=at.epoch,
            ),
            timeout=deadline.timeout(),
            metadata=outgoing_metadata(),
        )
        try:
            response = await call
        except grpc.aio.AioRpcError as error:
            raise LegError(from_rpc_error(error)) from error
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
        )

    async def decode(
        self, payload: Payload, at: Instance, held: HeldHandoff | None, deadline: Deadline
    ) -> AsyncGenerator[agent_pb2.DecodeResponse]:
        """Generate; closing the iterator ends the engine's work.

        Raises:
            LegError: The agent or its engine failed or refused.
        """
        request = agent_pb2.DecodeRequest(
            request_id=payload.request_id,
            router_id=self._router_id,
            prompt_token_ids=payload.prompt_token_ids,
            max_tokens=payload.message.max_tokens,
            sampling=payload.message.sampling,
            expected_epoch=at.epoch,
            want_text=payload.message.want_text,
        )
        request.coalesce.FromNanoseconds(round(self._coalesce_seconds * 1e9))
        if held is not None:
            request.handoff.CopyFrom(held.handoff)
            left = max(0.0, held.expires_at - self._clock.monotonic())
            request.handoff_valid_for.FromNanoseconds(round(left * 1e9))
        call = self._agents.stub(at.address).Decode(
            request, timeout=deadline.timeout(), metadata=outgoing_metadata()
        )
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                yield response  # type: ignore[misc]
        except grpc.aio.AioRpcError as error:
            raise LegError(from_rpc_error(error)) from error
        finally:
            call.cancel()

    def release(
        self, held: HeldHandoff, prompt_token_ids: Sequence[int], via: Sequence[Instance]
    ) -> None:
        """Free a hand-off that nobody will pull, in the background.

        An engine frees held KV on the word of a decode engine, so the decode agents in `via` are
        asked in turn, the prefill agent last. Where all fail, the lease's end frees it.
        """
        task = asyncio.get_running_loop().create_task(
            self._release(held, prompt_token_ids, [*via[:_RELEASE_TRIES], held.prefill])
        )
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def settle(self) -> None:
        """Wait for the releases under way."""
        if self._releases:
            await asyncio.wait(set(self._releases), timeout=_RELEASE_TIMEOUT_SECONDS)

    async def _release(
        self, held: HeldHandoff, prompt_token_ids: Sequence[int], via: Sequence[Instance]
    ) -> None:
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
