"""One request on its way: takes the scheduler's actions, makes the calls, accounts for each exit."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
from steelyard.v1 import agent_pb2, types_pb2

from dataplane.core.cluster import Instance
from dataplane.core.errors import RejectReason
from dataplane.core.estimate import Estimate, estimate
from dataplane.core.events import (
    Failed,
    Finished,
    Leg,
    PrefillDone,
    Reject,
    StartDecode,
    StartPrefill,
    TokensStreamed,
)
from dataplane.core.request import Request
from dataplane.router.driver import PoolDriver, Ticket
from dataplane.router.errors import RequestCancelled, rejection
from dataplane.router.inflight import InflightBoard
from dataplane.router.legs import HeldHandoff, LegError, Legs, Payload
from servicekit.clock import Clock
from servicekit.deadline import Deadline
from servicekit.errors import (
    DeadlineExceeded,
    FieldViolation,
    InvalidArgument,
    SteelyardError,
    Unimplemented,
)

# Reasons that speak of the hand-off, not of the engine that refused it.
_HANDOFF_AT_FAULT = "HANDOFF_"


@dataclass(slots=True)
class Record:
    """What happened to a request, for journal, outcome and metrics.

    Times are by the monotonic clock; the time of day stands beside the first, since the two may
    run at different rates.
    """

    arrived_at: float
    arrived_unix: float
    prefill: Instance | None = None
    decode: Instance | None = None
    attempts: int = 0
    prefill_done_at: float = 0.0
    prefill_engine_seconds: float = 0.0
    prefill_tokens_ahead: int | None = None
    decode_sent_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    longest_gap_seconds: float = 0.0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    finish_reason: int = types_pb2.FINISH_REASON_UNSPECIFIED
    predicted: Estimate | None = None
    causes: list[str] = field(default_factory=list)

    @property
    def ttft_seconds(self) -> float | None:
        """From arrival to the first token; None where there was none."""
        return self.first_token_at - self.arrived_at if self.completion_tokens else None

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time per token after the first; None below two tokens."""
        if self.completion_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.completion_tokens - 1)


class Session:
    """Runs one request from its submission to its end.

    `stream` must be closed by whoever iterates it; whatever way it ends, nothing of the request is
    left in ledger, leases or engines.
    """

    def __init__(
        self,
        payload: Payload,
        *,
        driver: PoolDriver,
        legs: Legs,
        board: InflightBoard,
        clock: Clock,
        deadline: Deadline,
        record: Record,
    ) -> None:
        self.record = record
        self._payload = payload
        self._driver = driver
        self._legs = legs
        self._board = board
        self._clock = clock
        self._deadline = deadline
        self._ticket: Ticket | None = None
        self._held: HeldHandoff | None = None
        self._leases: list[Instance] = []
        self._refusal: SteelyardError | None = None
        self._hangup: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def request_id(self) -> str:
        """The request's id in the cluster."""
        return self._payload.request_id

    def cancel(self) -> None:
        """End the request from outside; whoever iterates `stream` gets RequestCancelled."""
        if not self._hangup.done():
            self._hangup.set_result(None)
        if self._ticket is not None:
            self._ticket.end(_cancelled())

    async def stream(
        self, request: Request, policy: str
    ) -> AsyncGenerator[agent_pb2.DecodeResponse]:
        """Submit the request and yield what its decode engine sends.

        Raises:
            SteelyardError: The request cannot be served, or not to its end.
        """
        ticket = self._ticket = self._driver.submit(request, policy)
        try:
            async with aclosing(self._follow(ticket)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._end(ticket)

    async def _follow(self, ticket: Ticket) -> AsyncGenerator[agent_pb2.DecodeResponse]:
        while True:
            if self._hangup.done():
                raise _cancelled()
            action = await ticket.next()
            if self.record.completion_tokens and not isinstance(action, Reject):
                # Whatever a scheduler says: what the client has seen is not generated twice.
                raise self._refuse(RejectReason.STREAM_BROKEN)
            match action:
                case StartPrefill(_, instance_id):
                    await self._prefill(ticket, instance_id)
                case StartDecode(_, instance_id):
                    async with aclosing(self._decode(ticket, instance_id)) as responses:
                        async for response in responses:
                            yield response
                    if self.record.finish_reason:
                        self._driver.observe(ticket, Finished(self.request_id))
                        return
                case Reject(_, reason):
                    raise self._refuse(reason)

    async def _prefill(self, ticket: Ticket, instance_id: str) -> None:
        self._drop_handoff()
        self.record.attempts += 1
        at = self._locate(instance_id)
        if at is None:
            self._fail(ticket, Leg.PREFILL, f"{instance_id} has left")
            return
        self.record.prefill = at
        self._predict(ticket, at)
        self._lease(at)
        try:
            held = await self._prefilled(at)
        except LegError as error:
            self._unlease(at)
            if error.fate_unknown:
                self._legs.abort(self.request_id, at)
            self._fail(ticket, Leg.PREFILL, f"{at.instance_id}: {error}", error)
            return
        self._unlease(at)
        self._held = held
        self.record.prefill_done_at = self._clock.monotonic()
        self.record.prefill_engine_seconds = held.engine_seconds
        self.record.prefill_tokens_ahead = held.tokens_ahead
        self.record.cached_prompt_tokens = held.cached_prompt_tokens
        self._driver.observe(
            ticket,
            PrefillDone(
                self.request_id,
                held.expires_at,
                held.cached_prompt_tokens,
                held.engine_seconds,
            ),
        )

    async def _prefilled(self, at: Instance) -> HeldHandoff:
        """Prefill there; a prefill that we are not there for at its end is abandoned."""
        call = self._legs.prefill(self._payload, at, self._deadline)
        task = asyncio.get_running_loop().create_task(call)
        either: tuple[asyncio.Future[Any], ...] = (task, self._hangup)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._hangup.done():
                raise _cancelled()
        except (asyncio.CancelledError, RequestCancelled):
            via = self._driver.pool.decoders(at.pairing_key)
            self._legs.abandon(task, self._payload, at, via)
            raise
        return task.result()

    async def _decode(
        self, ticket: Ticket, instance_id: str
    ) -> AsyncGenerator[agent_pb2.DecodeResponse]:
        held = self._held
        at = self._locate(instance_id)
        problem = self._why_not(at, held)
        if at is None or problem:
            self._fail(ticket, Leg.DECODE, problem)
            return
        self.record.decode = at
        self._predict(ticket, None)
        self.record.decode_sent_at = self._clock.monotonic()
        self._lease(at)
        try:
            calls = self._legs.decode(self._payload, at, held, self._deadline, self._hangup)
            async with aclosing(calls) as responses:
                async for response in responses:
                    # What has sent something has pulled: the hand-off is not ours any more.
                    self._held = None
                    self._account(ticket, response)
                    yield response
        except LegError as error:
            self._unlease(at)
            if self._hangup.done():
                raise _cancelled() from None
            self._fail(ticket, Leg.DECODE, f"{at.instance_id}: {error}", error)
            return
        self._unlease(at)
        if not self.record.finish_reason:
            self._fail(ticket, Leg.DECODE, f"{at.instance_id}: the stream ended early")

    def _account(self, ticket: Ticket, response: agent_pb2.DecodeResponse) -> None:
        count = len(response.token_ids)
        record = self.record
        if count:
            now = self._clock.monotonic()
            if record.completion_tokens:
                gap = now - record.last_token_at
                record.longest_gap_seconds = max(record.longest_gap_seconds, gap)
            else:
                record.first_token_at = now
            record.last_token_at = now
            record.completion_tokens += count
            self._driver.observe(ticket, TokensStreamed(self.request_id, count))
        if response.finish_reason:
            record.finish_reason = response.finish_reason

    def _why_not(self, at: Instance | None, held: HeldHandoff | None) -> str:
        """Return why a decode leg must not be sent; empty where it may."""
        if at is None:
            return "the decode instance has left"
        if held is None:
            return ""
        if self._clock.monotonic() >= held.expires_at:
            return "HANDOFF_EXPIRED: its lease ran out before it was dispatched"
        source = self._locate(held.prefill.instance_id)
        if source is not None and source.epoch != held.handoff.prefill_epoch:
            return "HANDOFF_FOREIGN_EPOCH: the prefill engine has restarted"
        if held.handoff.pairing_key != at.pairing_key:
            return "PAIR_MISMATCH: the engines differ in model, dtype, block size or connector"
        return ""

    def _predict(self, ticket: Ticket, prefill: Instance | None) -> None:
        """Note what the first placement promises, the time waited so far included."""
        if self.record.predicted is not None:
            return
        pool = self._driver.pool
        expected = estimate(pool, ticket.request, prefill, pool.decode_of(self.request_id))
        waited_seconds = self._clock.monotonic() - self.record.arrived_at
        self.record.predicted = Estimate(
            waited_seconds + expected.ttft_seconds, expected.tpot_seconds
        )

    def _locate(self, instance_id: str) -> Instance | None:
        return self._driver.pool.instance(instance_id)

    def _fail(self, ticket: Ticket, leg: Leg, cause: str, error: LegError | None = None) -> None:
        self._drop_handoff()
        self.record.causes.append(cause)
        if error is not None and not error.retryable:
            self._refusal = _refusal_of(error)
        retryable = error is None or error.retryable
        at_fault = not cause.startswith(_HANDOFF_AT_FAULT)
        if error is not None:
            at_fault = not error.remote.reason.startswith(_HANDOFF_AT_FAULT)
        self._driver.observe(ticket, Failed(self.request_id, leg, retryable, at_fault))

    def _refuse(self, reason: RejectReason) -> SteelyardError:
        if self._refusal is not None:
            return self._refusal
        return rejection(reason, self.record.causes[-1] if self.record.causes else "")

    def _drop_handoff(self) -> None:
        if self._held is not None:
            via = self._driver.pool.decoders(self._held.handoff.pairing_key)
            chosen = self.record.decode
            via.sort(key=lambda at: chosen is None or at.instance_id != chosen.instance_id)
            self._legs.release(self._held, self._payload.prompt_token_ids, via)
            self._held = None

    def _lease(self, at: Instance) -> None:
        self._leases.append(at)
        self._board.hold(self.request_id, at.instance_id, at.epoch)
        self._board.note(
            self.request_id,
            {"phase": "decode" if at is self.record.decode else "prefill", "at": at.instance_id},
        )

    def _unlease(self, at: Instance) -> None:
        self._leases.remove(at)
        self._board.drop(self.request_id, at.instance_id, at.epoch)

    def _end(self, ticket: Ticket) -> None:
        self._driver.close(ticket)
        self._drop_handoff()
        for at in list(self._leases):
            self._unlease(at)
        self._board.note(self.request_id, {"phase": "ended"})


def _cancelled() -> RequestCancelled:
    return RequestCancelled("the request was cancelled")


def _refusal_of(error: LegError) -> SteelyardError:
    """Return what an engine's refusal means to the client: its own words, where it has some."""
    remote = error.remote
    if remote.code is grpc.StatusCode.UNIMPLEMENTED:
        return Unimplemented(remote.message, reason=remote.reason)
    if remote.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(remote.message, reason=remote.reason)
    violations = [FieldViolation(v.field, v.description) for v in remote.violations]
    return InvalidArgument(remote.message, reason=remote.reason, violations=violations)
