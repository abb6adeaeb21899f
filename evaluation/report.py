"""The report of an experiment: Markdown and HTML with the same tables and plots."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape

from evaluation import plots
from evaluation.rows import Row
from evaluation.tables import COLUMNS, best_splits, cells_of, contests, means_by_load, place_name

LOST_BELOW = -0.005


def write_report(experiment: str, rows: Sequence[Row], folder: Path) -> None:
    """Write report.md, report.html and the plots.

    Args:
        experiment: Its name, for titles.
        rows: In the order in which they are to be listed.
        folder: Made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    images = draw(experiment, rows, folder)
    lines = findings(rows)
    means = means_table(rows)
    compared = contest_table(rows)
    environment = Environment(
        loader=PackageLoader("evaluation", "templates"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    values = {
        "experiment": experiment,
        "findings": lines,
        "means": means,
        "contests": compared,
        "splits": split_table(rows) if experiment == "frontier" else [],
        "images": [image.name for image in images],
        "rows": [COLUMNS, *(cells_of(row) for row in rows)],
    }
    for name in ("report.md", "report.html"):
        text = environment.get_template(f"{name}.jinja").render(values)
        (folder / name).write_text(text, encoding="utf-8")


def draw(experiment: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the plots that these rows are enough for."""
    images = [plots.goodput_by_policy(rows, folder / "goodput.svg")]
    if len({row.load for row in rows}) > 1:
        images.append(plots.goodput_over_load(rows, folder / "load.svg"))
    if len(contests(rows)) > 1:
        images.append(plots.gains(rows, folder / "gains.svg"))
    extra = plots.EXTRA_PLOTS.get(experiment)
    if extra is not None:
        images.append(extra(rows, folder / f"{experiment}.svg"))
    return images


def findings(rows: Sequence[Row]) -> list[str]:
    """Return what the rows say, in sentences."""
    found = contests(rows)
    lines = []
    if found:
        lost = [c for c in found if c.difference.mean < LOST_BELOW]
        worst = min(found, key=lambda c: c.difference.mean)
        lines.append(
            f"late_binding is below the best other policy by more than {-LOST_BELOW} in "
            f"{len(lost)} of {len(found)} cells; its worst difference is "
            f"{worst.difference.mean:+.4f} (against {worst.best.policy} in {place_name(worst.ours)})."
        )
    invalid = [row for row in rows if not row.valid]
    lines.append(
        f"{len(invalid)} of {len(rows)} rows are invalid."
        if invalid
        else "In every row every request ended exactly once and left nothing behind."
    )
    incomplete = [row for row in rows if row.completed < 1.0]
    lines.append(
        f"{len(incomplete)} rows have requests that did not finish."
        if incomplete
        else "Every request of every row finished: no policy wins by abandoning requests."
    )
    seeds = sorted({seed for row in rows for seed in row.seeds})
    lines.append(f"Seeds {', '.join(map(str, seeds))}; the same requests for every policy.")
    return lines


def means_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return mean goodput by policy (rows) and load (columns), the best first."""
    table = means_by_load(rows)
    loads = list(table)
    policies = {policy for by_policy in table.values() for policy in by_policy}
    ranked = sorted(policies, key=lambda p: -sum(table[load].get(p, 0.0) for load in loads))
    body = [
        (
            policy,
            *(f"{table[load][policy]:.4f}" if policy in table[load] else "-" for load in loads),
        )
        for policy in ranked
    ]
    return [("policy", *(f"load {load:g}" for load in loads)), *body]


def split_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return goodput, split and P99 TTFT by number of engines (rows) and policy (columns)."""
    best = best_splits(rows)
    policies = list(dict.fromkeys(policy for by_policy in best.values() for policy in by_policy))
    body = []
    for total, by_policy in best.items():
        cells = []
        for policy in policies:
            row = by_policy.get(policy)
            tail = "-" if row is None or row.ttft_p99_seconds is None else row.ttft_p99_seconds
            cells.append(
                "-" if row is None else f"{row.goodput:.3f} ({row.prefill}P{row.decode}D, {tail} s)"
            )
        body.append((str(total), *cells))
    return [("engines", *policies), *body]


def contest_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return late binding against the best other policy, the worst cell first."""
    head = ("cell", "late_binding", "best other", "its goodput", "difference", "95 % interval")
    found = sorted(contests(rows), key=lambda contest: contest.difference.mean)
    if not found:
        return []
    body = [
        (
            place_name(c.ours),
            f"{c.ours.goodput:.4f}",
            c.best.policy,
            f"{c.best.goodput:.4f}",
            f"{c.difference.mean:+.4f}",
            f"{c.difference.low:+.4f} to {c.difference.high:+.4f}",
        )
        for c in found
    ]
    return [head, *body]
