"""The plots of a report, as SVG files; matplotlib is only needed here."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from evaluation.experiments.base import FAIRNESS_ORDER
from evaluation.rows import Row
from evaluation.tables import OURS, best_splits, contests, means_by_load, place_name

OUR_COLOUR = "#c44e52"
POLICY_COLOURS = {
    "round_robin": "#7f7f7f",
    "least_loaded": "#4c72b0",
    "length_threshold": "#ccb974",
    "power_of_two": "#64b5cd",
    "marginal_cost": "#55a868",
    "drain_time": "#8172b3",
    "block_overlap": "#da8bc3",
    "token_product": "#dd8452",
    "slo_headroom": "#937860",
}
COLOURS = tuple(POLICY_COLOURS.values())
LINE_STYLES = ("-", "--", "-.", (0, (1, 1)))
SHADES = (*COLOURS[1:], "#1b3a6b", "#7a1f5c", "#2f7d32", "#b34700")


def colour(policy: str, place: int) -> str:
    """Return a policy's colour, the same in every plot; by place for one that has none."""
    if policy.startswith(OURS):
        return OUR_COLOUR
    name = re.split(r"[^a-z_]", policy)[0]
    return POLICY_COLOURS.get(name, COLOURS[place % len(COLOURS)])


def new_figure(width: float = 8.0, height: float = 4.5) -> tuple[Figure, Any]:
    """Return a figure with one plain plot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    return figure, axes


def logarithmic(axis: Any) -> None:
    """Label an axis in plain numbers at 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> Path:
    """Write an SVG that is the same for the same data."""
    with mpl.rc_context({"svg.hashsalt": "steelyard", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    return path


def goodput_by_policy(rows: Sequence[Row], path: Path) -> Path:
    """Bars of mean goodput by policy with the range over cells and seeds; the ceiling as a line."""
    by_policy: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_policy[row.policy].append(row)
    names = sorted(by_policy, key=lambda name: average(r.goodput for r in by_policy[name]))
    figure, axes = new_figure(8.0, 1.2 + 0.34 * len(names))
    for place, name in enumerate(names):
        members = by_policy[name]
        mean = average(r.goodput for r in members)
        axes.barh(place, mean, color=colour(name, place), height=0.7)
        low, high = min(r.goodput_min for r in members), max(r.goodput_max for r in members)
        axes.plot([low, high], [place, place], color="black", linewidth=1)
        axes.text(mean + 0.005, place + 0.06, f"{mean:.3f}", va="bottom", fontsize=7)
    ceiling = average(row.ceiling for row in rows)
    axes.axvline(ceiling, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(0.0, 1.05)
    axes.set_xlabel(
        "goodput (bar: mean over cells; line: range over cells and seeds; dotted: ceiling)"
    )
    axes.grid(axis="y", visible=False)
    return save(figure, path)


def goodput_over_load(rows: Sequence[Row], path: Path) -> Path:
    """Lines of mean goodput over load."""
    table = means_by_load(rows)
    loads = list(table)
    figure, axes = new_figure()
    policies = sorted({policy for by_policy in table.values() for policy in by_policy})
    drawn: dict[str, int] = defaultdict(int)
    for place, policy in enumerate(policies):
        values = [table[load].get(policy) for load in loads]
        ceiling = policy == "(ceiling)"
        shade = "black" if ceiling else colour(policy, place)
        style = ":" if ceiling else LINE_STYLES[drawn[shade] % len(LINE_STYLES)]
        drawn[shade] += 1
        axes.plot(
            loads,
            values,
            marker="" if ceiling else "o",
            linestyle=style,
            color=shade,
            linewidth=2.2 if policy.startswith(OURS) else 1.2,
            zorder=3 if policy.startswith(OURS) else 2,
            label=policy,
        )
    axes.set_xlabel("load, times round robin's saturation rate")
    axes.set_ylabel("goodput, mean over cells")
    axes.set_ylim(0.0, 1.02)
    axes.legend(fontsize=7, ncols=2, handlelength=4.0)
    return save(figure, path)


def frontier(rows: Sequence[Row], path: Path) -> Path:
    """Goodput by number of engines, the best split of each policy."""
    figure, axes = new_figure()
    best: dict[str, dict[int, Row]] = defaultdict(dict)
    for total, by_policy in best_splits(rows).items():
        for policy, row in by_policy.items():
            best[policy][total] = row
    for place, (policy, by_total) in enumerate(sorted(best.items())):
        totals = sorted(by_total)
        values = [by_total[total].goodput for total in totals]
        axes.plot(totals, values, marker="o", color=colour(policy, place), label=policy)
        if policy.startswith(OURS):
            for total, value in zip(totals, values, strict=True):
                split = f"{by_total[total].prefill}P{by_total[total].decode}D"
                axes.annotate(
                    split,
                    (total, value),
                    (0, 7),
                    textcoords="offset points",
                    fontsize=7,
                    ha="center",
                )
    axes.set_xticks(sorted({row.prefill + row.decode for row in rows}))
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("engines (each policy at its best split)")
    axes.set_ylabel("goodput")
    axes.legend(fontsize=7)
    return save(figure, path)


def rolling_p95(rows: Sequence[Row], path: Path) -> Path:
    """Rolling P95 of TTFT over time."""
    figure, axes = new_figure(10.0, 4.0)
    for place, row in enumerate(rows):
        if row.series:
            times, values = zip(*row.series, strict=True)
            axes.plot(
                times,
                values,
                color=colour(row.policy, place),
                label=row.policy,
                linewidth=1.8 if row.policy.startswith(OURS) else 1.0,
            )
    axes.set_yscale("log")
    logarithmic(axes.yaxis)
    axes.set_xlabel("arrival, s")
    axes.set_ylabel("P95 TTFT of the last 2 s, s (first seed)")
    axes.legend(fontsize=7, ncols=2)
    return save(figure, path)


def goodput_against_tail(rows: Sequence[Row], path: Path) -> Path:
    """Goodput against P99: the curve that `fairness` moves along, a line for each workload and load."""
    figure, axes = new_figure(9.0, 5.5)
    groups: dict[tuple[str, float], list[Row]] = defaultdict(list)
    for row in rows:
        if row.ttft_p99_seconds is not None:
            groups[(row.workload, row.load)].append(row)
    for place, ((workload, load), members) in enumerate(sorted(groups.items())):
        shade = SHADES[place % len(SHADES)]
        curve = [row for row in members if row.policy.startswith(OURS)]
        curve.sort(key=lambda row: FAIRNESS_ORDER.index(row.policy.split()[-1]))
        others = [row for row in members if not row.policy.startswith(OURS)]
        axes.plot(
            [r.ttft_p99_seconds for r in curve],
            [r.goodput for r in curve],
            marker="o",
            color=shade,
            label=f"{workload} x{load:g}",
        )
        axes.scatter(
            [r.ttft_p99_seconds for r in others],
            [r.goodput for r in others],
            marker="x",
            color=shade,
        )
    axes.set_xscale("log")
    logarithmic(axes.xaxis)
    axes.set_xlabel(
        "P99 TTFT, s (dots: late binding, goodput-first to strict; crosses: the others)"
    )
    axes.set_ylabel("goodput")
    axes.legend(fontsize=7, ncols=2)
    return save(figure, path)


def gains(rows: Sequence[Row], path: Path) -> Path:
    """Late binding minus the best other policy, cell by cell, with bootstrap intervals."""
    found = sorted(contests(rows), key=lambda contest: contest.difference.mean)
    figure, axes = new_figure(9.0, 1.2 + 0.16 * len(found))
    for place, contest in enumerate(found):
        difference = contest.difference
        axes.plot([difference.low, difference.high], [place, place], color=OUR_COLOUR, linewidth=1)
        axes.plot([difference.mean], [place], marker="o", markersize=3, color=OUR_COLOUR)
    names = [place_name(contest.ours) for contest in found]
    axes.axvline(0.0, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_xlabel("goodput over the best other policy of the cell (95 % bootstrap interval)")
    return save(figure, path)


def average(values: Any) -> float:
    """Return the mean of an iterable."""
    numbers = list(values)
    return float(sum(numbers) / len(numbers))


Plot = Callable[[Sequence[Row], Path], Path]
EXTRA_PLOTS: dict[str, Plot] = {
    "frontier": frontier,
    "burst-train": rolling_p95,
    "fairness": goodput_against_tail,
}
