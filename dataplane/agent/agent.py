"""What an agent does around its engine: guards, books, aborts. No gRPC and no HTTP in here."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from dataplane.agent.accounting import Accounting, Charge, ChargePhase, RouterCounts, StepMeter
from dataplane.agent.engine import (
    Chunk,
    DecodeJob,
    Engine,
    EngineDescription,
    EngineMeasure,
    PrefillJob,
    PrefillResult,
    Role,
    TokenStream,
)
from dataplane.agent.errors import (
    DuplicateRequest,
    EpochChanged,
    HandoffRefused,
    RequestAborted,
    WrongRole,
)
from dataplane.agent.validation import check_decode, check_prefill
from dataplane.core.handoff import (
    HandoffBook,
    HandoffRefusal,
    HandoffTicket,
    HeldHandoff,
    HeldTable,
    prompt_digest,
)
from servicekit.clock import Clock
from servicekit.errors import SteelyardError


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who an agent is: fixed for its life, unlike its engine's epoch."""

    instance_id: str
    role: Role
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoad:
    """One measurement, with what the agent counts itself; fields as in InstanceLoad."""

    measure: EngineMeasure
    queued_prefill_tokens: int
    step_seconds: float
    by_router: Sequence[RouterCounts]
    time_unix_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The answer to a prefill."""

    ticket: HandoffTicket
    result: PrefillResult
    engine_seconds: float
    tokens_ahead: int
    """Prompt tokens accepted before it and not prefilled when it came."""


class Generation:
    """One decode under way: its stream, its place in the books; `close` ends both."""

    def __init__(self, agent: "Agent", job: DecodeJob, stream: TokenStream, charge: Charge) -> None:
        self._agent = agent
        self._job = job
        self._stream = stream
        self._charge = charge

    async def read(self) -> Chunk:
        """Wait for tokens or the end, and keep the books."""
        chunk = await self._stream.read()
        tokens = len(chunk.token_ids)
        if tokens:
            self._charge.move_to(ChargePhase.DECODE)
            self._charge.grow(tokens)
            self._agent.saw_step(chunk.step_seconds)
        if chunk.finish is not None:
            self._leave()
        return chunk

    async def close(self) -> None:
        """End it on the engine and in the books; safe to call twice."""
        self._leave()
        await self._stream.close()

    def _leave(self) -> None:
        self._charge.free()
        self._agent.forget(self._job.request_id, self)


class Agent:
    """Runs requests on one engine; every entry in its books is freed on every exit."""

    def __init__(
        self,
        engine: Engine,
        identity: Identity,
        description: EngineDescription,
        *,
        clock: Clock,
        accounting: Accounting,
        handoff_margin_seconds: float,
    ) -> None:
        self.identity = identity
        self.engine = engine
        self.accounting = accounting
        self._description = description
        self._clock = clock
        self._book = HandoffBook(
            pairing_key=description.pairing_key,
            margin_seconds=handoff_margin_seconds,
            remember_seconds=description.lease_seconds,
        )
        self._held = HeldTable()
        self._held_charges: dict[str, Charge] = {}
        self._prefills: dict[str, asyncio.Task[PrefillResult]] = {}
        self._generations: dict[str, Generation] = {}
        self._starting: set[str] = set()
        self._taking_over = asyncio.Lock()
        self._undescribed = False
        self._meter = StepMeter()
        self.refusals: Counter[HandoffRefusal] = Counter()
        self.last_load: AgentLoad | None = None
        self._log = structlog.get_logger("dataplane.agent")

    def __repr__(self) -> str:
        """Show what is under way."""
        return (
            f"Agent({self.identity.instance_id}, prefills={len(self._prefills)}, "
            f"generations={len(self._generations)}, {self._held!r})"
        )

    @property
    def description(self) -> EngineDescription:
        """What the engine is, as far as the agent knows."""
        return self._description

    async def prefill(
        self, job: PrefillJob, *, router_id: str, expected_epoch: str = ""
    ) -> Prefilled:
        """Compute a prompt and hold its KV; cancelling frees it.

        Raises:
            WrongRole: the engine only decodes.
            EpochChanged: the engine has restarted since the router looked.
            DuplicateRequest: the id is being prefilled here.
            RequestAborted: `abort` was called meanwhile.
        """
        if not self.identity.role.prefills:
            raise WrongRole(f"{self.identity.instance_id} only decodes")
        self._check_epoch(expected_epoch)
        if job.request_id in self._prefills:
            raise DuplicateRequest(f"request {job.request_id} is being prefilled here already")
        check_prefill(job, self._description)
        begin = self._clock.monotonic()
        tokens_ahead = self.accounting.tokens(ChargePhase.PREFILL)
        charge = self.accounting.charge(router_id, ChargePhase.PREFILL, len(job.prompt))
        try:
            result = await self._abortable_prefill(job)
        except BaseException:
            charge.free()
            raise
        ticket = self._hold(job, result, charge)
        return Prefilled(
            ticket=ticket,
            result=result,
            engine_seconds=self._clock.monotonic() - begin,
            tokens_ahead=tokens_ahead,
        )

    async def decode(
        self,
        job: DecodeJob,
        *,
        router_id: str,
        ticket: HandoffTicket | None = None,
        valid_for_seconds: float | None = None,
        expected_epoch: str = "",
    ) -> Generation:
        """Start a generation; the caller closes it on every exit.

        Raises:
            WrongRole: the engine only prefills.
            EpochChanged: the engine has restarted since the router looked.
            HandoffRefused: the hand-off must not reach the engine.
            DuplicateRequest: the id is generating here.
        """
        if not self.identity.role.decodes:
            raise WrongRole(f"{self.identity.instance_id} only prefills")
        self._check_epoch(expected_epoch)
        if job.request_id in self._generations or job.request_id in self._starting:
            raise DuplicateRequest(f"request {job.request_id} is generating here already")
        check_decode(job, self._description)
        if ticket is not None:
            self._admit(ticket, job.prompt, valid_for_seconds)
        phase = ChargePhase.PREFILL if ticket is None else ChargePhase.DECODE
        charge = self.accounting.charge(router_id, phase, len(job.prompt))
        self._starting.add(job.request_id)
        try:
            stream = await self.engine.decode(job)
        except BaseException:
            charge.free()
            raise
        finally:
            self._starting.discard(job.request_id)
        generation = self._generations[job.request_id] = Generation(self, job, stream, charge)
        return generation

    async def abort(self, request_id: str) -> bool:
        """End a request in whatever phase it is; False where it is not known."""
        found = False
        task = self._prefills.get(request_id)
        if task is not None:
            task.cancel()
            found = True
        generation = self._generations.get(request_id)
        if generation is not None:
            await generation.close()
            found = True
        for held in self._held.of_request(request_id):
            await self._let_go(held, ())
            found = True
        return found

    async def release(
        self, ticket: HandoffTicket, engine_params: bytes, prompt: Sequence[int]
    ) -> bool:
        """Free a hand-off that nobody will pull; False where its lease has to do it.

        A hand-off that was given to this engine before, or that is over, has nothing left to free.
        """
        held = self._held.find(ticket.handoff_id)
        if held is not None:
            return await self._let_go(held, prompt)
        if (
            not self.identity.role.decodes
            or self._book.admit(ticket, None, now_unix_seconds=self._clock.unix()) is not None
        ):
            return False
        return await self.engine.release(engine_params, prompt)

    async def load(self) -> AgentLoad:
        """Measure the engine, notice what has left it, and add what the agent counts."""
        measure = await self.engine.measure()
        if measure.healthy and measure.epoch and measure.epoch != self._description.epoch:
            described = await self._take_over_new_boot()
            measure = measure if described else EngineMeasure(healthy=False)
        self._sweep_held(measure)
        now = self._clock.monotonic()
        self.last_load = AgentLoad(
            measure=measure,
            queued_prefill_tokens=self.accounting.tokens(ChargePhase.PREFILL),
            step_seconds=self._meter.mean_seconds(now),
            by_router=self.accounting.by_router(),
            time_unix_seconds=self._clock.unix(),
        )
        return self.last_load

    async def close(self) -> None:
        """End everything under way."""
        for task in list(self._prefills.values()):
            task.cancel()
        for generation in list(self._generations.values()):
            await generation.close()
        for held in self._held.clear():
            self._free_held(held)

    def saw_step(self, step_seconds: float) -> None:
        """Note the time of an engine step; for generations only."""
        self._meter.record(step_seconds, self._clock.monotonic())

    def forget(self, request_id: str, generation: Generation) -> None:
        """Take a generation that ends out of the table; for generations only."""
        if self._generations.get(request_id) is generation:
            del self._generations[request_id]

    async def _abortable_prefill(self, job: PrefillJob) -> PrefillResult:
        """Prefill in a task of its own, so that `abort` ends it without ending the caller."""
        task = asyncio.create_task(self.engine.prefill(job))
        self._prefills[job.request_id] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise RequestAborted(f"request {job.request_id} was aborted") from None
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                await self.engine.release(task.result().engine_params, job.prompt)
            raise
        finally:
            del self._prefills[job.request_id]

    def _hold(self, job: PrefillJob, result: PrefillResult, charge: Charge) -> HandoffTicket:
        """Write a finished prefill into the table of what is held."""
        ticket = HandoffTicket(
            handoff_id=uuid.uuid4().hex,
            prefill_instance_id=self.identity.instance_id,
            prefill_epoch=result.epoch,
            pairing_key=self._description.pairing_key,
            prompt_tokens=result.prompt_tokens,
            expire_unix_seconds=self._clock.unix() + result.lease_seconds,
            prompt_digest=prompt_digest(job.prompt),
        )
        charge.move_to(ChargePhase.HELD)
        self._held_charges[ticket.handoff_id] = charge
        self._held.add(
            HeldHandoff(
                ticket=ticket,
                request_id=job.request_id,
                hold_id=result.hold_id,
                engine_params=result.engine_params,
                since_seconds=self._clock.monotonic(),
            )
        )
        return ticket

    def _admit(
        self, ticket: HandoffTicket, prompt: Sequence[int], valid_for_seconds: float | None
    ) -> None:
        refusal = self._book.admit(
            ticket,
            prompt,
            now_unix_seconds=self._clock.unix(),
            valid_for_seconds=valid_for_seconds,
        )
        if refusal is not None:
            self.refusals[refusal] += 1
            raise HandoffRefused(refusal, f"hand-off {ticket.handoff_id}: {refusal.name.lower()}")

    def _check_epoch(self, expected_epoch: str) -> None:
        if expected_epoch and expected_epoch != self._description.epoch:
            raise EpochChanged(
                f"epoch {expected_epoch} was expected, the engine is in {self._description.epoch}"
            )

    def _sweep_held(self, measure: EngineMeasure) -> None:
        """Take out of the table what was pulled or whose lease has ended."""
        gone = self._held.expire(self._clock.unix())
        pulled = self.engine.pulled()
        if pulled is not None:
            gone += self._held.remove_holds(pulled)
        elif measure.healthy:
            seen_seconds = self._clock.monotonic() - measure.age_seconds
            gone += self._held.trim(measure.kv_used_tokens, seen_seconds=seen_seconds)
        for held in gone:
            self._free_held(held)

    async def _let_go(self, held: HeldHandoff, prompt: Sequence[int]) -> bool:
        """Free what this engine holds; it stays in the books where only its lease frees it."""
        released = await self.engine.release(held.engine_params, prompt)
        if released and self._held.remove(held.ticket.handoff_id) is not None:
            self._free_held(held)
        return released

    def _free_held(self, held: HeldHandoff) -> None:
        charge = self._held_charges.pop(held.ticket.handoff_id, None)
        if charge is not None:
            charge.free()

    async def _take_over_new_boot(self) -> bool:
        """Learn what the restarted engine is; what its old boot held is gone.

        Returns:
            False where it does not say yet what it is: it may be going down again.
        """
        old = self._description
        async with self._taking_over:
            if self._description is not old:
                return True  # whoever measured at the same time has done it
            try:
                self._description = await self.engine.describe()
            except SteelyardError as error:
                if not self._undescribed:  # one line a boot, not one a report
                    self._log.warning("engine_not_described", reason=error.message)
                self._undescribed = True
                return False
            self._undescribed = False
            self._book.set_pairing_key(self._description.pairing_key)
            for held in self._held.clear():
                self._free_held(held)
        self._log.warning("engine_restarted", old_epoch=old.epoch, new_epoch=self.description.epoch)
        return True
