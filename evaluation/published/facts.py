"""Everything that the document's sentences state, heading by heading, for who writes them."""

from collections.abc import Callable, Iterator

from evaluation.errors import MissingResultsError
from evaluation.published import facts_ours as ours
from evaluation.published import facts_paper as paper
from evaluation.published.facts_ours import Fact
from evaluation.published.results import Results


def totals(results: Results) -> Iterator[Fact]:
    """Facts about all rows of all files."""
    rows = [row for name in results.names() for row in results.file(name)]
    yield "rows", f"{len(rows):,}"
    yield "invalid", str(sum(not row.valid for row in rows))
    yield "unfinished", str(sum(row.completed < 1.0 for row in rows))
    yield "shed", str(sum(row.shed > 0.0 for row in rows))
    for name in results.names():
        seeds = sorted({tuple(row.seeds) for row in results.file(name)})
        yield f"seeds of {name}", ", ".join(str(list(each)) for each in seeds)


SECTIONS: tuple[tuple[str, Callable[[Results], Iterator[Fact]]], ...] = (
    ("Results in the simulator", totals),
    ("Grid: four workloads, six pools, three loads", ours.grid),
    ("Grid: seeds that nobody had seen", ours.unseen),
    ("Scarcity: few decode seats, little KV", ours.scarcity),
    ("Frontier: goodput by number of engines", paper.frontier),
    ("Calibration: constants 7.4 times off", paper.calibration),
    ("Prediction error", paper.noise),
    ("Routers: one and four", ours.routers),
    ("Robustness: other engines, links, arrivals", ours.robustness),
    ("The paper's table, and the width of the decode pool", paper.paper_and_width),
    ("Ablation", paper.ablation),
    ("Fairness: goodput against the tail", ours.fairness),
    ("Load, bursts, uneven engines, stale telemetry: load", paper.load),
    ("The same: stale telemetry", ours.staleness),
)


def by_heading(results: Results) -> dict[str, dict[str, str]]:
    """Return the facts of every heading, as far as there are results for them."""
    found: dict[str, dict[str, str]] = {}
    for heading, section in SECTIONS:
        facts = found.setdefault(heading, {})
        try:
            for name, text in section(results):
                facts[name] = text
        except MissingResultsError as error:
            facts["(not there)"] = str(error)
    return found


def known_facts(results: Results) -> dict[str, str]:
    """Return all facts by name."""
    return {name: text for facts in by_heading(results).values() for name, text in facts.items()}


def listing(results: Results) -> str:
    """Return all facts as text, a section a heading."""
    lines = []
    for heading, facts in by_heading(results).items():
        lines += [f"## {heading}", *(f"  {name}: {text}" for name, text in facts.items()), ""]
    return "\n".join(lines)
