"""Real processes with emulated engines as a backend: agents, control plane, Redis, routers, gRPC.

A cell's cluster is brought up, its requests are played through the first routers over gRPC as
clients do, and the outcomes are scored as simulated ones are. At a time scale other than 1 the
engines run that many times faster and everybody counts engine seconds; what router, wire and
Python cost does not shrink with it.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from evaluation.cells import Cell, SeedResult
from evaluation.processes import (
    arrivals_of,
    play,
    publish,
    refuse_what_is_simulated_only,
    router_settings,
    score,
    teach_lengths,
)
from evaluation.run_journal import RunJournal
from evaluation.simulated import slo_of
from localcluster.cluster import LocalCluster
from localcluster.spec import ClusterSpec, Pools
from servicekit.clock import clock_at
from simulator.values import Outcome

_MODEL = "qwen2.5-3b"
_AGENT_LIMITS = ("kv_total_tokens", "max_num_seqs", "max_batched_tokens", "block_tokens")


class EmulatedBackend:
    """Runs cells on processes of this machine, one cluster a seed.

    Args:
        time_scale: Engine seconds a real second.
        journal: Where each request of each run is written down.
    """

    def __init__(self, *, time_scale: float = 1.0, journal: RunJournal | None = None) -> None:
        self._time_scale = time_scale
        self._journal = journal or RunJournal(None)

    def run(self, cell: Cell, seed: int) -> SeedResult:
        """Bring a cluster up, play the cell's requests, take it down.

        Raises:
            EvaluationError: The cell asks for something that processes cannot be given.
            ClusterError: A process does not come up or dies.
        """
        refuse_what_is_simulated_only(cell)
        return asyncio.run(self._run(cell, seed))

    async def _run(self, cell: Cell, seed: int) -> SeedResult:
        arrivals = arrivals_of(cell, seed)
        outcomes: list[Outcome] = []
        with TemporaryDirectory(prefix="steelyard-") as folder:
            spec = cluster_spec(cell, seed, self._time_scale, Path(folder))
            async with LocalCluster(spec) as cluster:
                control = cluster.addresses.control[0]
                await publish(control, slo_of(cell.conditions.slo_scale), cell)
                await teach_lengths(control, cell, _MODEL)
                clock = clock_at(self._time_scale)
                routers = cluster.addresses.routers
                await play(cell, routers, arrivals, clock, seed=seed, on_outcome=outcomes.append)
        self._journal.write(cell, seed, outcomes)
        return score(cell, seed, arrivals, outcomes)


def cluster_spec(cell: Cell, seed: int, time_scale: float, folder: Path) -> ClusterSpec:
    """Return the processes of a cell."""
    pool, conditions = cell.pool, cell.conditions
    limits = {name: int(v) for name, v in pool.overrides.items() if name in _AGENT_LIMITS}
    constants = {name: v for name, v in pool.overrides.items() if name not in _AGENT_LIMITS}
    agents: dict[str, object] = {
        "model": _MODEL,
        "profile": pool.profile,
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
    return ClusterSpec(
        pools=Pools(pool.prefill, pool.decode),
        time_scale=time_scale,
        routers=conditions.routers,
        agent_settings=agents,
        instance_settings=instances,
        router_settings=router_settings(cell),
        log_level="WARNING",
        directory=folder,
    )
