"""Builds and runs one simulation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataplane.core.cluster import SloPolicy
from dataplane.core.pool import Pool
from dataplane.core.scheduler import Scheduler
from dataplane.core.schedulers import make_scheduler
from dataplane.core.slo import DEFAULT_SLO
from simulator.cluster import SimulatedCluster, dispatcher_hop
from simulator.errors import LostRequestError
from simulator.kernel import Kernel
from simulator.prediction import MeanPrediction, Prediction
from simulator.router import SimulatedRouter
from simulator.values import Arrival, ClusterSpec, Collector, Routing, SchedulerSpec

MakeScheduler = Callable[[SchedulerSpec, Pool], Scheduler]


@dataclass(frozen=True, slots=True)
class Run:
    """What a finished simulation can tell besides its outcomes."""

    virtual_seconds: float
    events: int
    preemptions: int
    routers: tuple[SimulatedRouter, ...]
    pools: tuple[Pool, ...]
    cluster: SimulatedCluster


def make_scheduler_of(spec: SchedulerSpec, pool: Pool) -> Scheduler:
    """Construct a scheduler as a router would."""
    return make_scheduler(spec.name, spec.settings, pool)


def simulate(
    spec: ClusterSpec,
    arrivals: Iterator[Arrival],
    collector: Collector,
    *,
    slo: SloPolicy = DEFAULT_SLO,
    make_prediction: Callable[[], Prediction] = MeanPrediction,
    build: MakeScheduler = make_scheduler_of,
    watch: Callable[[SimulatedCluster], None] = lambda _: None,
) -> Run:
    """Run arrivals through a cluster until every request has ended.

    Args:
        spec: The cluster.
        arrivals: In order of time; read one at a time.
        collector: Takes every outcome as it happens.
        slo: Targets by class.
        make_prediction: Called once a router: routers do not share what they learn.
        build: Called once a deciding router.
        watch: Called with the cluster at every telemetry report.

    Raises:
        InvalidClusterError: The cluster cannot be built.
        LostRequestError: A request was still open when nothing more could happen.
    """
    kernel = Kernel()
    cluster = SimulatedCluster(kernel, spec, slo, watch=watch)
    deciding = 1 if spec.routing is Routing.DISPATCHER else spec.routers
    pools = tuple(Pool() for _ in range(deciding))
    routers = tuple(
        SimulatedRouter(
            kernel,
            build(spec.scheduler, pool),
            cluster.engines,
            collector,
            make_prediction(),
            slo=slo,
            timing=spec.timing,
            hop_seconds=dispatcher_hop(spec),
            ended=cluster.one_ended,
        )
        for pool in pools
    )
    cluster.start(list(routers), arrivals)
    kernel.run()
    if cluster.live:
        raise LostRequestError(f"{cluster.live} requests never ended: {routers}")
    return Run(kernel.now, kernel.events, cluster.preemptions, routers, pools, cluster)
