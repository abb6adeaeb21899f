"""The router's shell in virtual time: performs a scheduler's actions, tells it what happened.

Everything crosses the wire both ways. A scheduler hears of engines only through events that a
router would get, after the delay that a router would see them with.
"""

from collections.abc import Callable, Mapping

from dataplane.core.cluster import SloPolicy, Snapshot
from dataplane.core.events import (
    Action,
    Cancelled,
    Event,
    Failed,
    Finished,
    Leg,
    PrefillDone,
    Reject,
    SnapshotArrived,
    StartDecode,
    StartPrefill,
    Tick,
    TokensStreamed,
    WakeAt,
)
from dataplane.core.request import Request
from dataplane.core.scheduler import Scheduler
from dataplane.core.slo import urgency
from simulator.engine import Engine, Job
from simulator.errors import LostRequestError
from simulator.kernel import Kernel, Priority
from simulator.prediction import Prediction
from simulator.values import Arrival, Collector, End, Outcome, Timing

HANDOFF_LEASE_SECONDS = 30.0


class Flight:
    """A request between its arrival and its end."""

    __slots__ = ("arrival", "attempts", "first_token_at", "job", "preemptions", "router")

    def __init__(self, arrival: Arrival, router: int) -> None:
        self.arrival = arrival
        self.router = router
        self.job: Job | None = None
        self.first_token_at = float("inf")
        self.attempts = 0
        self.preemptions = 0


class SimulatedRouter:
    """One scheduler with its front ends."""

    def __init__(
        self,
        kernel: Kernel,
        scheduler: Scheduler,
        engines: Mapping[str, Engine],
        collector: Collector,
        prediction: Prediction,
        *,
        slo: SloPolicy,
        timing: Timing,
        ended: Callable[[], None],
        hop_seconds: float = 0.0,
    ) -> None:
        """Start with nothing in flight.

        Args:
            kernel: The clock.
            scheduler: Decides.
            engines: By id; may change during the run.
            collector: Takes outcomes.
            prediction: Of output lengths.
            slo: Targets by class.
            timing: Delays.
            ended: Called once for every ended request.
            hop_seconds: One way between the front ends and the scheduler.
        """
        self.scheduler = scheduler
        self._kernel = kernel
        self._engines = engines
        self._collector = collector
        self._prediction = prediction
        self._classes = {
            name: (targets, urgency(slo, targets)) for name, targets in slo.classes.items()
        }
        self._hop_seconds = hop_seconds
        self._delay_seconds = timing.wire_seconds + hop_seconds
        self._wire_seconds = timing.wire_seconds
        self._ended = ended
        self._flights: dict[str, Flight] = {}
        self._wake_at = float("inf")

    def __repr__(self) -> str:
        return f"<SimulatedRouter {len(self._flights)} in flight, {self.scheduler!r}>"

    def __len__(self) -> int:
        return len(self._flights)

    def arrive(self, arrival: Arrival, router: int) -> None:
        """Take a request that a client sent `overhead_seconds` ago to the scheduler, now."""
        request_id = arrival.request_id
        if request_id in self._flights:
            raise LostRequestError(f"{request_id} arrived twice")
        self._flights[request_id] = flight = Flight(arrival, router)
        if arrival.cancel_after_seconds != float("inf"):
            at = max(arrival.at_seconds + arrival.cancel_after_seconds, self._kernel.now)
            self._kernel.at(at, Priority.WIRE, self._cancel, request_id)
        self._submit(request_id, flight)

    def take_snapshot(self, snapshot: Snapshot) -> None:
        """Hand a snapshot to the scheduler."""
        self._observe(SnapshotArrived(snapshot))

    # ---- what engines tell, at engine time

    def prefilled(self, job: Job) -> None:
        """Pass on the end of a prefill leg."""
        self._later(self._on_prefilled, job)

    def first_token(self, job: Job, at: float) -> None:
        """Pass on a first token that will be there at a time."""
        self._kernel.at(at + self._delay_seconds, Priority.WIRE, self._on_first_token, job)

    def progressed(self, jobs: list[tuple[Job, int]]) -> None:
        """Pass on the progress of a batch, each part to whoever owns it."""
        owners = {job.listener for job, _ in jobs}
        for owner in sorted(owners, key=id) if len(owners) > 1 else owners:
            if isinstance(owner, SimulatedRouter):
                mine = [news for news in jobs if news[0].listener is owner]
                owner._later(owner._on_progress, mine if len(owners) > 1 else jobs)  # noqa: SLF001

    def finished(self, job: Job) -> None:
        """Pass on the last token."""
        self._later(self._on_finished, job)

    def failed(self, job: Job, leg: Leg, *, retryable: bool) -> None:
        """Pass on the loss of a leg."""
        self._later(self._on_failed, (job, Failed(job.request_id, leg, retryable)))

    # ---- the same, a wire later

    def _later(self, callback: Callable[..., None], argument: object) -> None:
        self._kernel.at(self._kernel.now + self._delay_seconds, Priority.WIRE, callback, argument)

    def _on_prefilled(self, job: Job) -> None:
        if not job.gone:
            expires_at = self._kernel.now + HANDOFF_LEASE_SECONDS
            self._observe(PrefillDone(job.request_id, expires_at))

    def _on_first_token(self, job: Job) -> None:
        if job.gone:
            return
        flight = self._flights[job.request_id]
        flight.first_token_at = self._kernel.now - self._hop_seconds
        self._observe(TokensStreamed(job.request_id, 1))

    def _on_progress(self, jobs: list[tuple[Job, int]]) -> None:
        for job, count in jobs:
            if not job.gone:
                self._observe(TokensStreamed(job.request_id, count))

    def _on_finished(self, job: Job) -> None:
        if job.gone:
            return
        request_id = job.request_id
        self._prediction.learn(job.arrival)
        self._end(request_id, End.FINISHED)
        self._observe(Finished(request_id))

    def _on_failed(self, news: tuple[Job, Failed]) -> None:
        job, event = news
        if job.gone:
            return
        self._abandon(job)
        self._observe(event)

    # ---- what clients do

    def _submit(self, request_id: str, flight: Flight) -> None:
        arrival = flight.arrival
        targets, weight = self._classes[arrival.slo_class]
        request = Request(
            request_id=request_id,
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.max_tokens,
            length=self._prediction.predict(arrival),
            slo_class=arrival.slo_class,
            urgency=weight,
            targets=targets,
            arrived_at=arrival.at_seconds,
        )
        self._perform(self.scheduler.submit(request, self._kernel.now))

    def _cancel(self, request_id: str) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        if flight.job is not None:
            self._abandon(flight.job)
        self._end(request_id, End.CANCELLED)
        self._observe(Cancelled(request_id))

    # ---- acting

    def _observe(self, event: Event) -> None:
        actions = self.scheduler.observe(event, self._kernel.now)
        if actions:
            self._perform(actions)

    def _tick(self, at: float) -> None:
        if at == self._wake_at:
            self._wake_at = float("inf")
            self._observe(Tick())

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            kind = type(action)
            if kind is StartPrefill:
                self._start_prefill(action.request_id, action.instance_id)  # type: ignore[union-attr]
            elif kind is StartDecode:
                self._start_decode(action.request_id, action.instance_id)  # type: ignore[union-attr]
            elif isinstance(action, WakeAt):
                self._wake_at = at = max(action.at, self._kernel.now)
                self._kernel.at(at, Priority.TIMER, self._tick, at)
            elif isinstance(action, Reject):
                self._reject(action.request_id)

    def _start_prefill(self, request_id: str, instance_id: str) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        job = self._new_job(flight)
        job.prefill = engine = self._engines[instance_id]
        self._later(engine.arrive, job)

    def _start_decode(self, request_id: str, instance_id: str) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        job = flight.job
        if job is None or job.gone or job.decode is not None:
            job = self._new_job(flight)
        job.decode = engine = self._engines[instance_id]
        self._later(engine.arrive, job)

    def _new_job(self, flight: Flight) -> Job:
        """Begin an attempt; the one before, if any, is over."""
        if flight.job is not None and not flight.job.gone:
            self._abandon(flight.job)
        flight.job = job = Job(flight.arrival, self, flight.router)
        flight.attempts += 1
        return job

    def _reject(self, request_id: str) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        if flight.job is not None and not flight.job.gone:
            self._abandon(flight.job)
        self._end(request_id, End.REJECTED)

    def _abandon(self, job: Job) -> None:
        """Free what an attempt holds anywhere; the engines hear of it a wire later."""
        job.gone = True
        for engine in (job.decode, job.prefill):
            if engine is not None:
                self._kernel.at(
                    self._kernel.now + self._wire_seconds, Priority.WIRE, engine.abort, job
                )

    def _end(self, request_id: str, end: End) -> None:
        """Account for a request and forget it."""
        flight = self._flights.pop(request_id)
        arrival, job = flight.arrival, flight.job
        now = self._kernel.now - self._hop_seconds
        tpot = float("inf")
        if end is End.FINISHED:
            tpot = (now - flight.first_token_at) / max(1, arrival.output_tokens - 1)
        prefill = decode = ""
        preemptions = 0
        if job is not None:
            prefill = "" if job.prefill is None else job.prefill.instance_id
            decode = "" if job.decode is None else job.decode.instance_id
            preemptions = job.preemptions
            job.gone = True
        self._collector.record(
            Outcome(
                arrival,
                end,
                flight.first_token_at - arrival.at_seconds,
                tpot,
                now,
                prefill,
                decode,
                preemptions,
                flight.attempts,
            )
        )
        self._ended()
