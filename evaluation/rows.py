"""A cell's seeds folded into the row that is published."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from evaluation.cells import Cell, Conditions, SeedResult


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a result file; means over seeds unless the name says otherwise."""

    experiment: str
    workload: str
    prefill: int
    decode: int
    rate: float
    policy: str
    seeds: list[int]
    goodput: float
    goodput_min: float
    goodput_max: float
    ceiling: float
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    ttft_max_seconds: float | None
    tpot_p99_seconds: float | None
    goodput_by_class: dict[str, float]
    preemptions: float
    shed: float
    valid: bool
    load: float
    profile: str
    overrides: dict[str, float]
    settings: dict[str, object]
    conditions: dict[str, object]
    completed: float
    beyond_3x: float
    goodput_by_tenant: dict[str, float]
    ttft_p99_by_tenant: dict[str, float | None]
    goodput_by_seed: list[float]
    requests: float
    series: list[tuple[float, float]] = []


def make_row(cell: Cell, results: Sequence[SeedResult]) -> Row:
    """Fold the seeds of a cell; a quantile is None where any seed has none."""
    results = sorted(results, key=lambda result: result.seed)
    goodputs = [result.goodput for result in results]
    defaults = msgspec.to_builtins(Conditions())
    conditions = msgspec.to_builtins(cell.conditions)
    return Row(
        experiment=cell.experiment,
        workload=cell.workload,
        prefill=cell.pool.prefill,
        decode=cell.pool.decode,
        rate=cell.rate,
        policy=cell.label,
        seeds=[result.seed for result in results],
        goodput=mean(goodputs),
        goodput_min=min(goodputs),
        goodput_max=max(goodputs),
        ceiling=mean(r.ceiling for r in results),
        ttft_p50_seconds=mean_or_none(r.ttft_p50_seconds for r in results),
        ttft_p99_seconds=mean_or_none(r.ttft_p99_seconds for r in results),
        ttft_max_seconds=max_or_none([r.ttft_max_seconds for r in results]),
        tpot_p99_seconds=mean_or_none(r.tpot_p99_seconds for r in results),
        goodput_by_class=merge(results, lambda r: dict(r.goodput_by_class)),
        preemptions=mean(r.preemptions for r in results),
        shed=mean(r.shed for r in results),
        valid=all(r.valid for r in results),
        load=cell.load,
        profile=cell.pool.profile,
        overrides=cell.pool.overrides,
        settings=cell.settings,
        conditions={name: value for name, value in conditions.items() if value != defaults[name]}
        | ({"slower": cell.pool.slower} if cell.pool.slower else {})
        | ({"slower_untold": cell.pool.slower_untold} if cell.pool.slower_untold else {}),
        completed=mean(r.completed for r in results),
        beyond_3x=mean(r.beyond_3x for r in results),
        goodput_by_tenant=merge(results, lambda r: dict(r.goodput_by_tenant)),
        ttft_p99_by_tenant={
            tenant: mean_or_none(r.ttft_p99_by_tenant.get(tenant) for r in results)
            for tenant in sorted({t for r in results for t in r.ttft_p99_by_tenant})
        },
        goodput_by_seed=goodputs,
        requests=mean(r.requests for r in results),
        series=results[0].series,
    )


def mean(values: Iterable[float]) -> float:
    """Return the mean, rounded to what is worth reading."""
    numbers = list(values)
    return round(sum(numbers) / len(numbers), 5)


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """Return the mean; None where any value is."""
    numbers = list(values)
    known = [value for value in numbers if value is not None]
    return mean(known) if known and len(known) == len(numbers) else None


def max_or_none(values: Sequence[float | None]) -> float | None:
    """Return the largest; None where any value is unbounded."""
    known = [value for value in values if value is not None]
    return round(max(known), 5) if len(known) == len(values) else None


def merge(
    results: Sequence[SeedResult], part: Callable[[SeedResult], dict[str, float]]
) -> dict[str, float]:
    """Return the mean by name over the seeds that have it."""
    names = sorted({name for result in results for name in part(result)})
    return {
        name: mean(part(result)[name] for result in results if name in part(result))
        for name in names
    }
