"""Rows as text tables, and what can be said about them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from evaluation.rows import Row
from evaluation.stats import Difference, paired_difference

OURS = "late_binding"
COLUMNS = (
    "workload",
    "pool",
    "load",
    "rate",
    "policy",
    "goodput",
    "min-max",
    "ceiling",
    "TTFT P50",
    "P99",
    "max",
    "TPOT P99 ms",
    ">3xSLO",
    "done",
    "tight",
    "loose",
    "preempted",
)

SHORT_COLUMNS = (
    "workload",
    "pool",
    "load",
    "policy",
    "goodput",
    "ceiling",
    "TTFT P50",
    "P99",
    "max",
    "TPOT P99 ms",
    ">3xSLO",
    "preempted",
)


def cells_of(row: Row) -> tuple[str, ...]:
    """Return a row's columns as text."""
    tpot = row.tpot_p99_seconds
    return (
        row.workload,
        f"{row.prefill}P{row.decode}D",
        f"{row.load:g}",
        f"{row.rate:.2f}",
        row.policy + ("" if row.valid else " (INVALID)"),
        f"{row.goodput:.3f}",
        f"{row.goodput_min:.3f}-{row.goodput_max:.3f}",
        f"{row.ceiling:.3f}",
        seconds(row.ttft_p50_seconds),
        seconds(row.ttft_p99_seconds),
        seconds(row.ttft_max_seconds),
        "-" if tpot is None else f"{tpot * 1e3:.1f}",
        f"{row.beyond_3x:.3f}",
        f"{row.completed:.3f}",
        f"{row.goodput_by_class.get('tight', float('nan')):.3f}",
        f"{row.goodput_by_class.get('loose', float('nan')):.3f}",
        f"{row.preemptions:.0f}",
    )


def seconds(value: float | None) -> str:
    """Return seconds as text; a dash where there is no such value."""
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Print rows as a table of the most telling columns, wide enough wherever it goes."""
    shown = [COLUMNS.index(name) for name in SHORT_COLUMNS]
    table = Table()
    for place in shown:
        table.add_column(COLUMNS[place], no_wrap=True)
    for row in rows:
        cells = cells_of(row)
        table.add_row(*(cells[place] for place in shown))
    console.print(table)


def group_key(row: Row) -> tuple[object, ...]:
    """Return what rows must have in common to be compared: everything but the policy."""
    return (
        row.workload,
        row.prefill,
        row.decode,
        row.rate,
        row.profile,
        tuple(sorted(row.overrides.items())),
        repr(sorted((k, repr(v)) for k, v in row.conditions.items())),
    )


@dataclass(frozen=True, slots=True)
class Contest:
    """Late binding against the best other policy of one cell."""

    ours: Row
    best: Row
    difference: Difference


def place_name(row: Row) -> str:
    """Return what a row's cell is called: workload, pool, load and what differs from the default."""
    overrides = "".join(f" {name} {value:g}" for name, value in row.overrides.items())
    variant = row.policy.partition("(")[2].rstrip(")")
    return f"{row.workload} {row.prefill}P{row.decode}D x{row.load:g}{overrides}" + (
        f" {variant}" if variant else ""
    )


def contests(rows: Sequence[Row]) -> list[Contest]:
    """Return, cell by cell, our policy against the best of the others."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[group_key(row)].append(row)
    found = []
    for members in groups.values():
        ours = [row for row in members if row.policy.startswith(OURS)]
        others = [row for row in members if not row.policy.startswith(OURS)]
        if len(ours) == 1 and others:
            best = max(others, key=lambda row: row.goodput)
            difference = paired_difference(ours[0].goodput_by_seed, best.goodput_by_seed)
            found.append(Contest(ours[0], best, difference))
    return found


def best_splits(rows: Sequence[Row]) -> dict[int, dict[str, Row]]:
    """Return, by number of engines and policy, the row of the best split, at the lowest load."""
    load = min(row.load for row in rows)
    best: dict[int, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.load == load:
            by_policy = best[row.prefill + row.decode]
            known = by_policy.get(row.policy)
            if known is None or row.goodput > known.goodput:
                by_policy[row.policy] = row
    return dict(sorted(best.items()))


def means_by_load(rows: Sequence[Row]) -> dict[float, dict[str, float]]:
    """Return the mean goodput over cells, by load and policy."""
    sums: dict[float, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        sums[row.load][row.policy].append(row.goodput)
        sums[row.load]["(ceiling)"].append(row.ceiling)
    return {
        load: {policy: sum(values) / len(values) for policy, values in by_policy.items()}
        for load, by_policy in sorted(sums.items())
    }
