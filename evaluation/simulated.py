"""The simulator as a backend."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dataplane.core.cluster import SloPolicy
from dataplane.core.request import Targets
from dataplane.core.slo import DEFAULT_SLO
from enginemodel.model import NOTICE_SHARE
from enginemodel.profiles import PROFILES, EngineProfile
from evaluation.cells import Cell, SeedResult
from evaluation.cells import Pool as PoolSpec
from evaluation.errors import EvaluationError
from evaluation.scoring import Scorer
from evaluation.workloads import Workload, load_workload, with_arrivals
from simulator.app import Run, simulate
from simulator.prediction import LearnedPrediction, MeanPrediction, Prediction, TruePrediction
from simulator.values import (
    Change,
    ClusterSpec,
    EngineSpec,
    Incident,
    Noise,
    Routing,
    SchedulerSpec,
    Timing,
)

SINGLE_ROUTER_TELEMETRY_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is around the engines, where it is not as a cell's conditions say.

    Attributes:
        overhead_seconds: From a client's send to the scheduler.
        wire_seconds: One way between router and engine.
        jitter_sigma: Of step times.
        stall_probability: Of a step.
        serial_link: Hand-offs to one engine go one after the other.
        notice_share: When in a step finished pulls are looked for, as a share of the step.
    """

    overhead_seconds: float
    wire_seconds: float
    jitter_sigma: float
    stall_probability: float
    serial_link: bool
    notice_share: float = NOTICE_SHARE

    def around(self, spec: ClusterSpec) -> ClusterSpec:
        """Return a cluster within these surroundings."""
        timing = replace(
            spec.timing, overhead_seconds=self.overhead_seconds, wire_seconds=self.wire_seconds
        )
        noise = replace(
            spec.noise, jitter_sigma=self.jitter_sigma, stall_probability=self.stall_probability
        )
        return replace(
            spec,
            timing=timing,
            noise=noise,
            serial_link=self.serial_link,
            engines={
                name: replace(engine, notice_share=self.notice_share)
                for name, engine in spec.engines.items()
            },
        )


class SimulatedBackend:
    """Runs cells in virtual time, in this process.

    Args:
        surroundings: Take the place of what the cells say of them.
    """

    def __init__(self, surroundings: Surroundings | None = None) -> None:
        self._surroundings = surroundings

    def run(self, cell: Cell, seed: int) -> SeedResult:
        """Simulate one seed.

        Raises:
            EvaluationError: The cell names something that is not there.
        """
        workload = workload_of(cell)
        spec = cluster_of(cell, seed)
        if self._surroundings is not None:
            spec = self._surroundings.around(spec)
        slo = slo_of(cell.conditions.slo_scale)
        scorer = Scorer(cell, slo, profile_of(cell.pool), spec.timing)
        run = simulate(
            spec,
            workload.arrivals(cell.rate, cell.seconds, seed),
            scorer,
            slo=slo,
            make_prediction=prediction_of(cell, workload),
        )
        return scorer.result(
            seed,
            preemptions=run.preemptions,
            virtual_seconds=run.virtual_seconds,
            clean=left_nothing(run),
        )


def left_nothing(run: Run) -> bool:
    """Return whether every ledger and every engine is empty at the end."""
    return all(len(pool.ledger) == 0 for pool in run.pools) and all(
        len(engine) == 0 for engine in run.cluster.engines.values() if engine.alive
    )


def workload_of(cell: Cell) -> Workload:
    """Return the cell's workload with its conditions applied."""
    workload = load_workload(cell.workload)
    conditions = cell.conditions
    if conditions.arrivals:
        workload = with_arrivals(workload, conditions.arrivals)
    if conditions.tight_share is not None:
        workload = replace(workload, tight_share=conditions.tight_share)
    return workload


def slo_of(scale: float) -> SloPolicy:
    """Return the default targets, all multiplied."""
    return replace(
        DEFAULT_SLO,
        classes={
            name: Targets(targets.ttft_seconds * scale, targets.tpot_seconds * scale)
            for name, targets in DEFAULT_SLO.classes.items()
        },
    )


def profile_of(pool: PoolSpec) -> EngineProfile:
    """Return the pool's engine profile with its overrides.

    Raises:
        EvaluationError: The profile or a field of it is not known.
    """
    profile = PROFILES.get(pool.profile)
    if profile is None:
        raise EvaluationError(f"no profile {pool.profile!r}; there are {sorted(PROFILES)}")
    try:
        for field, value in pool.overrides.items():
            if field in EngineProfile.__slots__:
                profile = replace(profile, **{field: int(value)})  # type: ignore[arg-type]
            else:
                constants = replace(profile.constants, **{field: value})
                profile = replace(profile, constants=constants)
    except TypeError as error:
        raise EvaluationError(f"profile {pool.profile}: {error}") from error
    return profile


def engines_of(pool: PoolSpec) -> dict[str, EngineSpec]:
    """Return the pool's engines by id: p00, p01 and so on, d00 and so on."""
    profile = profile_of(pool)
    engines = {}
    for role, count in (("prefill", pool.prefill), ("decode", pool.decode)):
        for place in range(count):
            instance_id = f"{role[0]}{place:02d}"
            told = pool.slower.get(instance_id, 1.0)
            scale = told * pool.slower_untold.get(instance_id, 1.0)
            engines[instance_id] = EngineSpec(
                role=role, profile=profile, scale=scale, scale_known=scale == told
            )
    return engines


def cluster_of(cell: Cell, seed: int) -> ClusterSpec:
    """Return the simulated cluster of a cell."""
    conditions = cell.conditions
    alone = conditions.routers == 1 or conditions.dispatcher
    telemetry = conditions.telemetry_seconds
    if alone:
        # One scheduler knows all loads from its own ledger: snapshots bring it next to nothing.
        telemetry = max(telemetry, SINGLE_ROUTER_TELEMETRY_SECONDS)
    return ClusterSpec(
        engines=engines_of(cell.pool),
        scheduler=SchedulerSpec(name=cell.policy, settings=cell.settings),
        timing=Timing(
            wire_seconds=conditions.wire_seconds,
            hop_seconds=conditions.hop_seconds,
            telemetry_seconds=telemetry,
            staleness_seconds=conditions.staleness_seconds,
        ),
        noise=Noise(
            jitter_sigma=conditions.jitter_sigma, stall_probability=conditions.stall_probability
        ),
        routers=conditions.routers,
        routing=Routing.DISPATCHER if conditions.dispatcher else Routing.INDEPENDENT,
        believed_factor=conditions.believed_factor,
        incidents=tuple(
            Incident(at_seconds=i.at_seconds, change=Change.KILL, instance_id=i.instance_id)
            for i in conditions.incidents
        ),
        seed=seed,
    )


def prediction_of(cell: Cell, workload: Workload) -> Callable[[], Prediction]:
    """Return what constructs the cell's predictor.

    Raises:
        EvaluationError: There is none of that name.
    """
    error = cell.conditions.prediction_error
    means = workload.mean_output_by_tenant()
    kinds: dict[str, Callable[[], Prediction]] = {
        "mean": lambda: MeanPrediction(by_tenant=means, error=error),
        "constant": lambda: MeanPrediction(error=error),
        "learned": lambda: LearnedPrediction(error=error),
        "true": lambda: TruePrediction(error=error),
    }
    kind = kinds.get(cell.conditions.prediction)
    if kind is None:
        raise EvaluationError(
            f"no prediction {cell.conditions.prediction!r}; there are {sorted(kinds)}"
        )
    return kind
