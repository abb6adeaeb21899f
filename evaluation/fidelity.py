"""How far simulations are to be believed: the same requests on real engines, emulated and simulated.

For every run of real engines the simulator plays the same cell and seed: as the cells say, and in
surroundings like those of this machine. What differs between the two shows how much of the
residual is the surroundings' and how much the engines'.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

import msgspec
from scipy.stats import kendalltau

from enginemodel.model import NOTICE_SHARE
from evaluation.cells import Cell, SeedResult
from evaluation.simulated import Surroundings

Runs = Mapping[tuple[str, int], tuple[Cell, SeedResult]]
"""Runs of one backend, by cell key and seed."""

Place: TypeAlias = tuple[str, str, float, bytes, int]
"""Workload, pool, rate, conditions and seed."""


def dilated_surroundings(dilation: float, *, notice_share: float = NOTICE_SHARE) -> Surroundings:
    """Return what is around paced engines on one machine, in engine seconds.

    On a busy two-core machine some 7 ms pass between router and engine core, each way: gRPC, agent,
    HTTP, vLLM's API server (`steelyard evaluate handoffs` measures them); 4 ms to the router with
    all that is done there. Engine seconds are `dilation` real ones. Steps hardly jitter, and
    held-back hand-offs do not wait for each other.

    Args:
        dilation: Real seconds an engine second.
        notice_share: When in a step finished pulls are looked for.
    """
    return Surroundings(
        overhead_seconds=4e-3 / dilation,
        wire_seconds=7e-3 / dilation,
        jitter_sigma=0.01,
        stall_probability=0.0,
        serial_link=False,
        notice_share=notice_share,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A run on one backend against the same run on real engines: backend minus real.

    Attributes:
        cell: The cell.
        seed: The seed.
        real: Goodput on real engines.
        goodput: Difference of goodput.
        ttft_p50_seconds: Difference; None where either has none.
        ttft_p99_seconds: Likewise.
        tpot_p99_seconds: Likewise.
    """

    cell: Cell
    seed: int
    real: float
    goodput: float
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    tpot_p99_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a backend agrees with real engines.

    Attributes:
        residuals: Of each run both have.
        mean_absolute: Of the goodput residuals.
        worst: The largest of them, absolute.
        bias: Their mean.
        tau: Mean of Kendall's tau-b between the policies' goodputs, over places with two or more.
        same_winner: Places at which both have the same best policy, and the places there are.
    """

    residuals: Sequence[Residual]
    mean_absolute: float
    worst: float
    bias: float
    tau: float | None
    same_winner: tuple[int, int]


def compare(real: Runs, other: Runs) -> Agreement | None:
    """Return how a backend agrees with real engines on the runs that both have; None if none."""
    both = [key for key in real if key in other]
    if not both:
        return None
    residuals = [_residual(*real[key], other[key][1]) for key in both]
    taus, same, places = [], 0, 0
    for keys in by_place(real, both).values():
        if len(keys) < 2:
            continue
        ours = [real[key][1].goodput for key in keys]
        theirs = [other[key][1].goodput for key in keys]
        tau = kendalltau(ours, theirs).statistic
        if tau == tau:  # not a number where one side ranks nothing  # noqa: PLR0124
            taus.append(float(tau))
        places += 1
        same += ours.index(max(ours)) == theirs.index(max(theirs))
    errors = [residual.goodput for residual in residuals]
    return Agreement(
        residuals=residuals,
        mean_absolute=fmean(map(abs, errors)),
        worst=max(map(abs, errors)),
        bias=fmean(errors),
        tau=fmean(taus) if taus else None,
        same_winner=(same, places),
    )


def by_place(runs: Runs, keys: Sequence[tuple[str, int]]) -> dict[Place, list[tuple[str, int]]]:
    """Group runs that compare policies: same workload, pool, rate, conditions and seed."""
    places: dict[Place, list[tuple[str, int]]] = defaultdict(list)
    for key in keys:
        cell, result = runs[key]
        conditions = msgspec.json.encode(cell.conditions, order="deterministic")
        place = (cell.workload, cell.pool.name, cell.rate, conditions, result.seed)
        places[place].append(key)
    return places


def _residual(cell: Cell, real: SeedResult, other: SeedResult) -> Residual:
    return Residual(
        cell=cell,
        seed=real.seed,
        real=real.goodput,
        goodput=other.goodput - real.goodput,
        ttft_p50_seconds=_difference(other.ttft_p50_seconds, real.ttft_p50_seconds),
        ttft_p99_seconds=_difference(other.ttft_p99_seconds, real.ttft_p99_seconds),
        tpot_p99_seconds=_difference(other.tpot_p99_seconds, real.tpot_p99_seconds),
    )


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other
