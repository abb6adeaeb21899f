"""The simulated cluster: engines, what is reported of them, and what happens to them."""

from array import array
from collections.abc import Callable, Iterator

import numpy as np

from dataplane.core.cluster import (
    Instance,
    Measurements,
    PricedConstants,
    Role,
    Roster,
    SloPolicy,
    Snapshot,
    State,
)
from dataplane.core.events import Leg
from simulator.decode import DecodeEngine
from simulator.engine import Engine, Load
from simulator.errors import InvalidClusterError, LostRequestError
from simulator.kernel import Kernel, Priority
from simulator.noise import StepNoise
from simulator.prefill import PrefillEngine
from simulator.router import HANDOFF_LEASE_SECONDS, SimulatedRouter
from simulator.values import Arrival, Change, ClusterSpec, EngineSpec, Incident, Routing

POOL = "simulated"


class SimulatedCluster:
    """Owns engines and roster; feeds arrivals to routers and snapshots to their schedulers."""

    def __init__(
        self,
        kernel: Kernel,
        spec: ClusterSpec,
        slo: SloPolicy,
        *,
        watch: Callable[["SimulatedCluster"], None],
    ) -> None:
        """Build the engines; `watch` is called at every report.

        Raises:
            InvalidClusterError: There are no engines, or a role is unknown.
        """
        if not spec.engines:
            raise InvalidClusterError("a cluster has at least one engine")
        if spec.routers < 1:
            raise InvalidClusterError(f"routers is {spec.routers}; there is at least 1")
        self.engines: dict[str, Engine] = {}
        self.live = 0
        self._watch = watch
        # What a client's request goes through before a scheduler sees it.
        self._overhead_seconds = spec.timing.overhead_seconds + dispatcher_hop(spec)
        self._kernel = kernel
        self._spec = spec
        self._slo = slo
        self._instances: dict[str, Instance] = {}
        self._routers: list[SimulatedRouter] = []
        self._arrivals: Iterator[Arrival] = iter(())
        self._feeding = False
        self._sequence = 0
        self._seed = np.random.SeedSequence([spec.seed, 0x5EED])
        for instance_id, engine in sorted(spec.engines.items()):
            self._add(instance_id, engine)
        self._version = 1
        self._roster = self._make_roster()

    def __repr__(self) -> str:
        return f"<SimulatedCluster of {len(self.engines)}, {self.live} requests live>"

    def start(self, routers: list[SimulatedRouter], arrivals: Iterator[Arrival]) -> None:
        """Give every scheduler its first snapshot and begin to feed arrivals."""
        self._routers = routers
        self._arrivals = arrivals
        self._feeding = True
        for router, measurements in zip(routers, self._measure(), strict=True):
            router.take_snapshot(self._snapshot(measurements))
        for incident in self._spec.incidents:
            self._kernel.at(incident.at_seconds, Priority.ENGINE, self._happen, incident)
        self._kernel.at(
            self._kernel.now + self._spec.timing.telemetry_seconds,
            Priority.TELEMETRY,
            self._report,
        )
        self._feed_next()

    def one_ended(self) -> None:
        """Count a request that ended.

        Raises:
            LostRequestError: More ended than arrived.
        """
        self.live -= 1
        if self.live < 0:
            raise LostRequestError("more requests ended than arrived")

    @property
    def preemptions(self) -> int:
        """Preemptions on all engines so far."""
        return sum(e.preemptions for e in self.engines.values() if isinstance(e, DecodeEngine))

    # ---- arrivals

    def _feed_next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._feeding = False
        else:
            at = arrival.at_seconds + self._overhead_seconds
            self._kernel.at(at, Priority.ARRIVAL, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self.live += 1
        front_end = arrival.number % self._spec.routers
        self._routers[front_end % len(self._routers)].arrive(arrival, front_end)
        self._feed_next()

    # ---- what is reported

    def _report(self, _: object) -> None:
        """Measure everything; the routers get it when it is `staleness_seconds` old."""
        if self.live == 0 and not self._feeding:
            return
        self._watch(self)
        timing = self._spec.timing
        for router, measurements in zip(self._routers, self._measure(), strict=True):
            self._kernel.at(
                self._kernel.now + timing.staleness_seconds,
                Priority.WIRE,
                router.take_snapshot,
                self._snapshot(measurements),
            )
        self._kernel.at(
            self._kernel.now + timing.telemetry_seconds, Priority.TELEMETRY, self._report
        )

    def _snapshot(self, measurements: Measurements) -> Snapshot:
        self._sequence += 1
        return Snapshot(sequence=self._sequence, roster=self._roster, measurements=measurements)

    def _measure(self) -> list[Measurements]:
        """Return what each router may know: loads of all others, never the truth of its own."""
        engines = [self.engines[i.instance_id] for i in self._roster.instances]
        kv_used = array("d", (float(e.kv_used_tokens) for e in engines))
        steps = array("d", (float(getattr(e, "step_seconds", 0.0)) for e in engines))
        ages = array("d", [self._spec.timing.staleness_seconds]) * len(engines)
        count = len(self._routers)
        zeros = array("d", bytes(8 * len(engines)))
        if count == 1:
            others = [(zeros, zeros, zeros, zeros)]
        else:
            others = _others([e.loads(self._spec.routers) for e in engines], count)
        return [
            Measurements(
                step_seconds=steps,
                age_seconds=ages,
                kv_used_tokens=kv_used,
                other_prefill_requests=columns[0],
                other_prefill_tokens=columns[1],
                other_decode_requests=columns[2],
                other_decode_kv_tokens=columns[3],
            )
            for columns in others
        ]

    # ---- what happens to it

    def _happen(self, incident: Incident) -> None:
        notice = self._kernel.now + self._spec.timing.loss_notice_seconds
        if incident.change is Change.JOIN:
            if incident.engine is None:
                raise InvalidClusterError(f"{incident.instance_id} joins without a description")
            self._add(incident.instance_id, incident.engine)
            self._publish()
        elif incident.instance_id not in self._instances:
            return
        elif incident.change is Change.DRAIN:
            self._set_state(incident.instance_id, State.DRAINING)
            self._publish()
        else:
            self._kill(incident.instance_id)
            self._kernel.at(notice, Priority.TELEMETRY, self._forget, incident.instance_id)

    def _kill(self, instance_id: str) -> None:
        """Lose an engine: its jobs fail, and so does every pull from it."""
        engine = self.engines[instance_id]
        for job in engine.kill():
            if job.gone:
                continue
            if job.holder is engine:
                # Its prompt is done: it fails where it is being pulled to, or once it gets there.
                if job.decode is not None and job.decode.abort(job):
                    job.listener.failed(job, Leg.DECODE, retryable=True)
            else:
                leg = Leg.PREFILL if job.prefill is engine else Leg.DECODE
                job.listener.failed(job, leg, retryable=True)

    def _forget(self, instance_id: str) -> None:
        self._instances.pop(instance_id, None)
        self._publish()

    def _publish(self) -> None:
        self._version += 1
        self._roster = self._make_roster()

    def _set_state(self, instance_id: str, state: State) -> None:
        old = self._instances[instance_id]
        self._instances[instance_id] = make_instance(instance_id, self._spec_of(old), state)

    def _spec_of(self, instance: Instance) -> EngineSpec:
        for incident in self._spec.incidents:
            if incident.engine is not None and incident.instance_id == instance.instance_id:
                return incident.engine
        return self._spec.engines[instance.instance_id]

    def _make_roster(self) -> Roster:
        instances = tuple(self._instances[i] for i in sorted(self._instances))
        specs = [self._spec_of(instance) for instance in instances]
        profiles = {spec.profile.name: spec.profile for spec in specs}
        return Roster(
            version=self._version,
            instances=instances,
            constants={
                name: PricedConstants(
                    version=1,
                    constants=profile.constants.slowed(self._spec.believed_factor),
                    uncalibrated=False,
                )
                for name, profile in profiles.items()
            },
            slo=self._slo,
        )

    def _add(self, instance_id: str, spec: EngineSpec) -> None:
        make = ENGINES.get(spec.role)
        if make is None:
            raise InvalidClusterError(f"{instance_id}: role {spec.role!r} is none of {[*ENGINES]}")
        noise = StepNoise(self._spec.noise, np.random.default_rng(self._seed.spawn(1)[0]))
        self.engines[instance_id] = make(instance_id, spec, self._kernel, noise, self._spec)
        self._instances[instance_id] = make_instance(instance_id, spec, State.READY)


def _make_prefill(
    instance_id: str, spec: EngineSpec, kernel: Kernel, noise: StepNoise, _: ClusterSpec
) -> Engine:
    return PrefillEngine(instance_id, spec, kernel, noise)


def _make_decode(
    instance_id: str, spec: EngineSpec, kernel: Kernel, noise: StepNoise, cluster: ClusterSpec
) -> Engine:
    return DecodeEngine(
        instance_id,
        spec,
        kernel,
        noise,
        serial_link=cluster.serial_link,
        report_stride=cluster.report_stride_tokens,
    )


ENGINES: dict[str, Callable[[str, EngineSpec, Kernel, StepNoise, ClusterSpec], Engine]] = {
    "prefill": _make_prefill,
    "decode": _make_decode,
    "mixed": _make_decode,
}


def make_instance(instance_id: str, spec: EngineSpec, state: State) -> Instance:
    """Return an engine as a roster describes it."""
    profile = spec.profile
    return Instance(
        instance_id=instance_id,
        epoch=f"{instance_id}-1",
        role=Role(spec.role),
        state=state,
        pool=POOL,
        address=f"{instance_id}:0",
        pairing_key=profile.name,
        profile=profile.name,
        scale=spec.scale if spec.scale_known else 1.0,
        max_model_tokens=profile.max_model_tokens,
        vocab_size=32_000,
        block_tokens=profile.block_tokens,
        kv_total_tokens=profile.kv_total_tokens // profile.block_tokens * profile.block_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        max_num_seqs=profile.max_num_seqs,
        max_batched_tokens=profile.max_batched_tokens,
        handoff_lease_seconds=HANDOFF_LEASE_SECONDS,
        tokenizer_sha256="",
    )


def _others(
    loads: list[list[Load]], routers: int
) -> list[tuple["array[float]", "array[float]", "array[float]", "array[float]"]]:
    """Return, for each router, what all others have on each engine, column by column."""
    names = ("prefill_requests", "prefill_tokens", "decode_requests", "decode_kv_tokens")
    return [
        tuple(  # type: ignore[misc]
            array(
                "d",
                (
                    float(sum(getattr(load, name) for r, load in enumerate(engine) if r != me))
                    for engine in loads
                ),
            )
            for name in names
        )
        for me in range(routers)
    ]


def dispatcher_hop(spec: ClusterSpec) -> float:
    """Return the hop between front ends and scheduler; 0 where each front end decides itself."""
    return spec.timing.hop_seconds if spec.routing is Routing.DISPATCHER else 0.0
