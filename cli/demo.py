"""`steelyard demo`: a cluster, a few hundred mixed requests through each policy, one table."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cli.up import where_to_look
from dataplane.core.request import Targets
from dataplane.core.slo import DEFAULT_SLO
from evaluation.live import LiveOptions, LivePlayer
from evaluation.workloads import load_workload
from localcluster.cluster import LocalCluster, addresses_at
from localcluster.spec import DEFAULT_PORT_BASE, ClusterSpec, Pools
from servicekit.clock import clock_at
from simulator.values import Arrival, End, Outcome

POLICIES = ("round_robin", "least_loaded", "length_threshold", "marginal_cost", "late_binding")
_TABLE_COLUMNS = ("policy", "goodput", "TTFT p50", "TTFT p99", "TPOT p99", "prompt", "output")


@dataclass(slots=True)
class Tally:
    """What came of one policy's requests."""

    targets: dict[str, Targets]
    outcomes: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Take one in."""
        self.outcomes.append(outcome)

    def row(self, policy: str) -> list[str]:
        """Return the table's row."""
        met = sum(self._met(outcome) for outcome in self.outcomes)
        ttft = sorted(outcome.ttft_seconds for outcome in self.outcomes)
        tpot = sorted(outcome.tpot_seconds for outcome in self.outcomes)
        done = [o.arrival for o in self.outcomes if o.end is End.FINISHED]
        return [
            policy,
            f"{met / max(1, len(self.outcomes)):.3f}",
            f"{1e3 * quantile(ttft, 0.5):.0f} ms",
            f"{1e3 * quantile(ttft, 0.99):.0f} ms",
            f"{1e3 * quantile(tpot, 0.99):.1f} ms",
            f"{sum(a.prompt_tokens for a in done):,}",
            f"{sum(a.output_tokens for a in done):,}",
        ]

    def _met(self, outcome: Outcome) -> bool:
        targets = self.targets[outcome.arrival.slo_class]
        return (
            outcome.end is End.FINISHED
            and outcome.ttft_seconds <= targets.ttft_seconds
            and outcome.tpot_seconds <= targets.tpot_seconds
        )


def demo(
    *,
    engine: Literal["emulated", "vllm"] = "emulated",
    pools: str = "2P4D",
    requests: int = 0,
    rate: float = 0.0,
    time_scale: float = 0.0,
    seed: int = 1,
    vllm_python: Path = Path(".venv-vllm/bin/python"),
) -> None:
    """Bring a cluster up, send the same mixed requests through each policy, print a table.

    Args:
        engine: emulated, or vllm for real vLLM and NIXL on this CPU.
        pools: How many of each role.
        requests: Requests for each policy; left out, what fits a minute and a half.
        rate: Requests an engine second; left out, near round robin's saturation.
        time_scale: Engine seconds a real second, emulated engines only.
        seed: Same seed, same requests.
        vllm_python: Python of the vLLM environment.
    """
    real = engine == "vllm"
    plan = _Plan(
        requests=requests or (60 if real else 300),
        rate=rate or (6.0 if real else 24.0),
        time_scale=1.0 if real else (time_scale or 1.0),
        seed=seed,
        real=real,
    )
    agents = {} if real else {"jitter_sigma": 0.04, "seed": seed}
    spec = ClusterSpec(
        engine=engine,
        pools=Pools.parse(pools),
        time_scale=plan.time_scale,
        agent_settings=agents,
        # Tokens travel together for at most one engine step or so: the first is never held back.
        router_settings={"coalesce_seconds": 0.02, "journal_path": ".run/demo-journal.jsonl"},
        log_level="WARNING",
        vllm_python=vllm_python,
    )
    asyncio.run(_demo(spec, plan))


@dataclass(frozen=True, slots=True)
class _Plan:
    requests: int
    rate: float
    time_scale: float
    seed: int
    real: bool


async def _demo(spec: ClusterSpec, plan: _Plan) -> None:
    console = Console(highlight=False)
    started_at = time.monotonic()
    lines: list[str] = []
    arrivals = _arrivals(plan)
    with console.status(f"bringing up {spec.pools} {spec.engine} engines"):
        cluster = await LocalCluster(
            spec, lambda name, line: lines.append(f"{name} {line}")
        ).__aenter__()
    try:
        console.print(f"{spec.pools} up in {time.monotonic() - started_at:.1f} s")
        tallies = await _play_all(cluster, plan, arrivals, console)
        console.print(_table(tallies))
        console.print(
            f"{len(arrivals)} requests each, the same for all; times in engine seconds "
            f"(1 real second = {plan.time_scale:g}); SLO: tight 175 ms / 39.7 ms, loose 3 x. "
            f"{time.monotonic() - started_at:.0f} s in all."
        )
        console.print("While `make up` runs, look here:")
        console.print(where_to_look(addresses_at(DEFAULT_PORT_BASE)), soft_wrap=True)
    finally:
        await cluster.__aexit__(None, None, None)
    for line in lines:
        if "error" in line.lower():
            console.print(line, markup=False)


async def _play_all(
    cluster: LocalCluster, plan: _Plan, arrivals: Sequence[Arrival], console: Console
) -> dict[str, Tally]:
    tallies = {}
    bar = Progress(
        TextColumn("{task.description:>16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with bar:
        for policy in POLICIES:
            tally = tallies[policy] = Tally(dict(DEFAULT_SLO.classes))
            task = bar.add_task(policy, total=len(arrivals))
            options = LiveOptions(
                router=cluster.addresses.routers[0],
                policy=policy,
                seed=plan.seed,
                fix_length="max_tokens" if plan.real else "hint",
            )

            def done(outcome: Outcome, tally: Tally = tally, task: object = task) -> None:
                tally.add(outcome)
                bar.advance(task)  # type: ignore[arg-type]

            await LivePlayer(options, clock_at(plan.time_scale)).play(arrivals, done)
    return tallies


def _arrivals(plan: _Plan) -> list[Arrival]:
    """Return the mixed workload's first requests, outputs cut to what a demo has time for."""
    workload = load_workload("mixed")
    cut_prompt, cut_output = (1_500, 48) if plan.real else (4_000, 250)
    arrivals = []
    for arrival in workload.arrivals(plan.rate, 1e4, plan.seed):
        arrivals.append(
            arrival._replace(
                prompt_tokens=min(arrival.prompt_tokens, cut_prompt),
                prefix_tokens=0,
                output_tokens=min(arrival.output_tokens, cut_output),
                max_tokens=min(arrival.max_tokens, 512),
            )
        )
        if len(arrivals) == plan.requests:
            break
    return arrivals


def _table(tallies: dict[str, Tally]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in _TABLE_COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy, tally in tallies.items():
        table.add_row(*tally.row(policy))
    return table


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that `share` of an ordered sequence is at or below; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
