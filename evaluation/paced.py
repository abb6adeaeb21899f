"""Real vLLM and NIXL, paced after an engine profile, as a backend.

A cluster stays up over the runs on its pool: engines, control plane, agents. Each run gets a router
of its own, so that nothing learned under one policy serves the next, with output lengths taught to
the control plane before. Gates come first: exact token counts, equal greedy tokens on all decode
engines, every pair warmed.
"""

import asyncio
import os
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from calibrator.check import check_cluster, ready_clients
from evaluation.cells import Cell, Pool, SeedResult
from evaluation.errors import EvaluationError
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
from localcluster.pace_check import Validity
from localcluster.pace_machine import MachineWatch, prefer
from localcluster.pace_records import read_validity
from localcluster.spec import ClusterSpec, Pools
from servicekit.clock import clock_at
from simulator.values import Outcome

_MODEL = "tiny"
_LIMITS = ("kv_total_tokens", "max_num_seqs", "max_batched_tokens")
_TOKENS_AN_EVENT = 8
_DRAIN_SECONDS = 8.0
"""Some texts have 4,000 tokens: waiting for the last of them would take as long as the arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedOptions:
    """How paced runs are made.

    Attributes:
        dilation: Real seconds an engine second.
        directory: Of the cluster's logs and step records.
        vllm_python: Python of the vLLM environment.
    """

    dilation: float = 3.0
    directory: Path = Path(".run/paced")
    vllm_python: Path = Path(".venv-vllm/bin/python")


class PacedBackend:
    """Runs cells on paced engines, one cluster at a time.

    Args:
        options: How.
        stack: Takes the last cluster down.
        journal: Where each request of each run is written down.
    """

    def __init__(
        self, options: PacedOptions, stack: ExitStack, *, journal: RunJournal | None = None
    ) -> None:
        self._options = options
        self._journal = journal or RunJournal(None)
        self._clock = clock_at(1.0 / options.dilation)
        self._pool: Pool | None = None
        self._cluster: LocalCluster | None = None
        self._taught: set[str] = set()
        self._open = AsyncExitStack()
        prefer(os.getpid())
        self._runner = stack.enter_context(asyncio.Runner())
        stack.callback(lambda: self._runner.run(self._open.aclose()))

    def run(self, cell: Cell, seed: int) -> SeedResult:
        """Play the cell's requests on its pool, which is brought up where another one is up.

        Raises:
            EvaluationError: The cell asks for something that engines cannot be given, or a gate
                failed.
            ClusterError: A process does not come up or dies.
        """
        refuse_what_is_simulated_only(cell)
        if cell.pool.slower or cell.pool.slower_untold or cell.conditions.routers != 1:
            raise EvaluationError("paced engines are all alike, behind one router: simulate this")
        return self._runner.run(self._run(cell, seed))

    async def _run(self, cell: Cell, seed: int) -> SeedResult:
        cluster = await self._cluster_of(cell.pool)
        control = cluster.addresses.control[0]
        await publish(control, slo_of(cell.conditions.slo_scale), cell)
        if cell.workload not in self._taught:
            await teach_lengths(control, cell, _MODEL)
            self._taught.add(cell.workload)
        await self._renew_router(cluster, cell)
        arrivals, outcomes = arrivals_of(cell, seed), list[Outcome]()
        before, since_unix = await self._preemptions(control), time.time()
        async with MachineWatch() as watch:
            cut = await play(
                cell,
                cluster.addresses.routers,
                arrivals,
                self._clock,
                seed=seed,
                on_outcome=outcomes.append,
                drain_seconds=_DRAIN_SECONDS,
            )
        preemptions = await self._preemptions(control) - before
        validity = read_validity(self._options.directory, since_unix, time.time(), watch.load)
        self._journal.write(cell, seed, outcomes)
        result = score(cell, seed, arrivals, outcomes)
        return msgspec.structs.replace(
            result,
            preemptions=preemptions,
            valid=result.valid and validity.valid,
            validity=numbers_of(validity) | {"cut": float(cut)},
            why_invalid="; ".join(validity.reasons),
        )

    async def _renew_router(self, cluster: LocalCluster, cell: Cell) -> None:
        settings = router_settings(cell)
        settings["journal_path"] = self._options.directory.resolve() / "router.jsonl"
        cluster.spec = replace(cluster.spec, router_settings=settings)
        await cluster.processes.end("router-0")
        await cluster.start_router(0)
        await cluster.wait_serving()

    async def _cluster_of(self, pool: Pool) -> LocalCluster:
        if self._cluster is not None and self._pool == pool:
            return self._cluster
        await self._open.aclose()
        self._open, self._cluster, self._taught = AsyncExitStack(), None, set()
        options = self._options
        spec = cluster_spec(pool, options)
        cluster = await self._open.enter_async_context(LocalCluster(spec))
        await self._pass_gates(cluster.addresses.control[0])
        self._cluster, self._pool = cluster, pool
        return cluster

    async def _pass_gates(self, control: str) -> None:
        """Run the gates of a calibration on all instances.

        Raises:
            EvaluationError: One fails.
        """
        results = await check_cluster(control, self._clock)
        failed = [gate for gate in results if not gate.passed]
        if failed:
            raise EvaluationError("; ".join(f"gate {gate.name}: {gate.detail}" for gate in failed))

    async def _preemptions(self, control: str) -> int:
        """Return how many there were on all engines since they started."""
        async with ready_clients(control, self._clock) as (_, clients):
            return sum([(await client.load()).preemptions for client in clients.values()])


def cluster_spec(pool: Pool, options: PacedOptions) -> ClusterSpec:
    """Return the processes of a pool."""
    overrides: dict[str, object] = {
        name: int(value) for name, value in pool.overrides.items() if name in _LIMITS
    }
    constants = {name: value for name, value in pool.overrides.items() if name not in _LIMITS}
    if constants:
        overrides["constants"] = constants
    return ClusterSpec(
        engine="paced",
        pools=Pools(pool.prefill, pool.decode),
        time_scale=1.0 / options.dilation,
        profile=pool.profile,
        profile_overrides=overrides,
        agent_settings={"vllm_fixed_lengths": True},
        # A token an event costs this machine more than the engine's step; the first comes alone.
        vllm_flags=("--stream-interval", str(_TOKENS_AN_EVENT)),
        log_level="WARNING",
        directory=options.directory,
        vllm_python=options.vllm_python,
    )


def numbers_of(validity: Validity) -> dict[str, float]:
    """Return what a verdict rests on, by name."""
    pace, machine = validity.pace, validity.machine
    numbers = {
        "steps": float(pace.steps),
        "late_share": pace.late_share,
        "very_late_share": pace.very_late_share,
        "real_to_modelled": pace.real_to_modelled,
    }
    if machine is not None:
        numbers |= {"own_share": machine.own_share, "other_share": machine.other_share}
    return {name: round(value, 5) for name, value in numbers.items()}
