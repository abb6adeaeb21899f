"""Real processes with emulated engines as a backend: agents, control plane, Redis, routers, gRPC.

A cell's cluster is brought up, its requests are played through the first routers over gRPC as
clients do, and the outcomes are scored as simulated ones are. At a time scale other than 1 the
engines run that many times faster; targets and constants are published in real seconds then, and
measured times are multiplied back, so that rows read in engine seconds. What router, wire and
Python cost does not shrink with it.
"""

import asyncio
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from steelyard.v1 import control_pb2, control_pb2_grpc, types_pb2

from dataplane.core.cluster import SloPolicy
from enginemodel.model import EngineConstants
from evaluation.cells import Cell, SeedResult
from evaluation.errors import EvaluationError
from evaluation.live import LiveOptions, LivePlayer
from evaluation.scoring import Scorer
from evaluation.simulated import profile_of, slo_of, workload_of
from localcluster.cluster import LocalCluster
from localcluster.spec import ClusterSpec, Pools
from servicekit.channel import open_channel
from servicekit.clock import SystemClock
from simulator.values import Arrival, Outcome, Timing

_AGENT_LIMITS = ("kv_total_tokens", "max_num_seqs", "max_batched_tokens", "block_tokens")
_SECONDS_PER = ("p0", "p1", "p2", "p3", "d0", "d1", "d2", "h0")


class EmulatedBackend:
    """Runs cells on processes of this machine, one cluster a seed."""

    def __init__(self, *, time_scale: float = 1.0) -> None:
        self._time_scale = time_scale

    def run(self, cell: Cell, seed: int) -> SeedResult:
        """Bring a cluster up, play the cell's requests, take it down.

        Raises:
            EvaluationError: The cell asks for something that processes cannot be given.
            ClusterError: A process does not come up or dies.
        """
        refuse_what_is_simulated_only(cell)
        return asyncio.run(self._run(cell, seed))

    async def _run(self, cell: Cell, seed: int) -> SeedResult:
        slo = slo_of(cell.conditions.slo_scale)
        scorer = Scorer(cell, slo, profile_of(cell.pool), Timing())
        arrivals = list(workload_of(cell).arrivals(cell.rate, cell.seconds, seed))
        with TemporaryDirectory(prefix="steelyard-") as folder:
            spec = cluster_spec(cell, seed, self._time_scale, Path(folder))
            async with LocalCluster(spec) as cluster:
                control = cluster.addresses.control[0]
                await publish(control, slo, cell, self._time_scale)
                outcomes = await self._play(cell, seed, cluster.addresses.routers, arrivals)
        for outcome in outcomes:
            scorer.record(outcome)
        last = max(outcome.ended_at_seconds for outcome in outcomes)
        once = {outcome.arrival.number for outcome in outcomes}
        clean = len(outcomes) == len(once) == len(arrivals)
        return scorer.result(seed, preemptions=0, virtual_seconds=last, clean=clean)

    async def _play(
        self, cell: Cell, seed: int, routers: list[str], arrivals: list[Arrival]
    ) -> list[Outcome]:
        """Play the requests, spread over the routers as the simulator spreads them."""
        outcomes: list[Outcome] = []
        count = len(routers)
        async with asyncio.TaskGroup() as group:
            for place, router in enumerate(routers):
                options = LiveOptions(
                    router=router, policy=cell.policy, time_scale=self._time_scale, seed=seed
                )
                mine = [arrival for arrival in arrivals if arrival.number % count == place]
                player = LivePlayer(options, SystemClock())
                group.create_task(player.play(mine, outcomes.append))
        return outcomes


def refuse_what_is_simulated_only(cell: Cell) -> None:
    """Check that a cell can be had with processes.

    Raises:
        EvaluationError: It cannot; the message says what is in the way.
    """
    conditions = cell.conditions
    if conditions.prediction in {"true", "constant"}:
        raise EvaluationError("a router cannot be told output lengths: simulate this cell")
    if conditions.incidents:
        raise EvaluationError("losses of instances are only simulated")


def cluster_spec(cell: Cell, seed: int, time_scale: float, folder: Path) -> ClusterSpec:
    """Return the processes of a cell."""
    pool, conditions = cell.pool, cell.conditions
    limits = {name: int(v) for name, v in pool.overrides.items() if name in _AGENT_LIMITS}
    constants = {name: v for name, v in pool.overrides.items() if name not in _AGENT_LIMITS}
    agents: dict[str, object] = {
        "profile": pool.profile,
        "time_scale": time_scale,
        "jitter_sigma": conditions.jitter_sigma,
        "stall_probability": conditions.stall_probability,
        "seed": seed,
        **limits,
    }
    if constants:
        agents["constants"] = constants
    instances = {}
    for short, slowness in (pool.slower | pool.slower_untold).items():
        role = "prefill" if short.startswith("p") else "decode"
        instances[f"{role}-{int(short[1:])}"] = {"slowness": slowness}
    routers: dict[str, object] = {
        "policy": cell.policy,
        "dispatch": conditions.dispatcher,
        "predictor_error": conditions.prediction_error,
        "coalesce_seconds": 0.02 / time_scale,
    }
    if cell.settings:
        routers["policy_settings"] = {cell.policy: cell.settings}
    return ClusterSpec(
        pools=Pools(pool.prefill, pool.decode),
        routers=conditions.routers,
        agent_settings=agents,
        instance_settings=instances,
        router_settings=routers,
        log_level="WARNING",
        directory=folder,
    )


async def publish(control: str, slo: SloPolicy, cell: Cell, time_scale: float) -> None:
    """Publish targets and believed constants in real seconds."""
    async with open_channel(control) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        message = control_pb2.SetSloRequest()
        message.slo.default_class = slo.default_class
        for name, targets in slo.classes.items():
            entry = message.slo.classes[name]
            entry.ttft.FromNanoseconds(round(targets.ttft_seconds / time_scale * 1e9))
            entry.tpot.FromNanoseconds(round(targets.tpot_seconds / time_scale * 1e9))
        await stub.SetSlo(message)
        believed = real_seconds(
            profile_of(cell.pool).constants, cell.conditions.believed_factor / time_scale
        )
        version = types_pb2.ConstantsVersion(
            profile=cell.pool.profile,
            constants=types_pb2.EngineConstants(**asdict(believed)),
            heldout_median_error=-1.0,
            reason="what an experiment tells the routers",
        )
        request = control_pb2.PublishConstantsRequest(constants=version, accept_jump=True)
        await stub.PublishConstants(request)


def real_seconds(constants: EngineConstants, factor: float) -> EngineConstants:
    """Return constants with every time multiplied, and the link's speed divided."""
    values = asdict(constants)
    for name in values:
        if name.startswith(_SECONDS_PER):
            values[name] *= factor
    values["handoff_bytes_per_second"] /= factor
    return EngineConstants(**values)
