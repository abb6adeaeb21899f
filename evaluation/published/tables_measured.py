"""The generated blocks of docs/results.md, in its order."""

from collections.abc import Callable, Mapping, Sequence

from evaluation.errors import MissingResultsError
from evaluation.published import figures
from evaluation.published.blocks import Block, Column, Line, Table, Text, by_policy
from evaluation.published.figures import TIMES, Value, mean, share
from evaluation.published.measured import MeasuredResults
from evaluation.published.results import Results
from evaluation.rows import Row

POLICIES = (
    "late_binding",
    "marginal_cost",
    "length_threshold",
    "least_loaded",
    "round_robin",
)
TRACES = (31, 32, 33)
ONE_TRACE = {"seeds": [32]}
PACED = ("table2", "others", "documents-reasoning", "chat", "again")

# Goodput, P99 TTFT and P99 TPOT of the paper's table II.
PAPER = {
    "marginal_cost": ".864, .321 s, 18 ms",
    "length_threshold": ".847, .318 s, 18 ms",
    "least_loaded": ".835, .346 s, 18 ms",
    "round_robin": ".836, .337 s, 18 ms",
}


def marked(rows: Sequence[Row]) -> str:
    """Return the mean goodput, with a star where a run is not valid."""
    star = "" if all(row.valid for row in rows) else "\\*"
    return figures.goodput(rows) + star


def by_trace(of: Callable[[Row], str]) -> Value:
    """Return what says something of each run, in order of their traces."""

    def value(rows: Sequence[Row]) -> str:
        return " / ".join(of(row) for row in sorted(rows, key=lambda row: row.seeds))

    return value


def _p99_ttft(row: Row) -> str:
    return figures.short_seconds(row.ttft_p99_seconds)


def _p50_ttft_ms(row: Row) -> str:
    return "-" if row.ttft_p50_seconds is None else f"{1e3 * row.ttft_p50_seconds:.0f}"


def _p99_tpot_ms(row: Row) -> str:
    return "-" if row.tpot_p99_seconds is None else f"{1e3 * row.tpot_p99_seconds:.1f}"


def _rate(rows: Sequence[Row]) -> str:
    return f"{rows[0].rate:.1f}"


def _of_the_ceiling(rows: Sequence[Row]) -> str:
    return share(mean(row.goodput for row in rows) / mean(row.ceiling for row in rows))


def _with_p99(rows: Sequence[Row]) -> str:
    return f"{marked(rows)} ({_p99_ttft(rows[0])} s)"


TABLE2 = Table(
    name="table2",
    files=("table2",),
    heads=("policy",),
    where={"load": 1.0},
    columns=(
        *(Column(str(seed), {"seeds": [seed]}, marked) for seed in TRACES),
        Column("mean"),
        Column("P99 TTFT by trace, s", {}, by_trace(_p99_ttft)),
        Column("P99 TPOT, ms", {}, by_trace(_p99_tpot_ms)),
        Column("paper: goodput, P99 TTFT, P99 TPOT", {}, lambda rows: PAPER.get(rows[0].policy, "")),
    ),
    lines=by_policy(*POLICIES),
    rows=0,
)  # fmt: skip

SATURATION = Table(
    name="saturation",
    files=("table2",),
    heads=("load",),
    where={"policy": "round_robin"},
    columns=(
        Column("requests a second", {}, _rate),
        Column("goodput by trace", {}, by_trace(lambda row: share(row.goodput))),
        Column("mean", {}, marked),
        Column("share of the ceiling", {}, _of_the_ceiling),
    ),
    lines=tuple(Line((figures.factor(load),), {"load": load}) for load in (0.85, 0.92, 1.0)),
    rows=3,
)

AGAIN = Table(
    name="again",
    files=(),
    heads=("policy",),
    where={**ONE_TRACE, "load": 1.0},
    columns=(
        Column("first run", {"file": "table2"}, marked),
        Column("second run", {"file": "again"}, marked),
    ),
    lines=by_policy("late_binding", "least_loaded", "round_robin"),
)

MORE_LOAD = Table(
    name="more-load",
    files=("others",),
    heads=("policy",),
    where={"load": 1.3},
    columns=(
        Column("goodput", {}, marked),
        Column("P50 TTFT, ms", {}, by_trace(_p50_ttft_ms)),
        Column("P99 TTFT, s", {}, by_trace(_p99_ttft)),
        Column("P99 TPOT, ms", {}, by_trace(_p99_tpot_ms)),
    ),
    lines=by_policy("late_binding", "least_loaded", "round_robin", "marginal_cost"),
)

WRONG = Table(
    name="wrong",
    files=("others",),
    heads=("policy",),
    where={**ONE_TRACE, "load": 1.0, "pool": "2P4D"},
    columns=(
        Column("as they are", {"file": "table2", "variant": ""}, marked),
        Column(f"constants {TIMES} 7.4", {"variant": "x7.4"}, marked),
        Column("lengths ± 150 %", {"variant": "error 1.50"}, marked),
    ),
    lines=tuple(Line((name,), {"base": name}) for name in ("marginal_cost", "late_binding")),
)

POOLS = Table(
    name="pools",
    files=("others",),
    heads=("policy",),
    where={**ONE_TRACE, "load": 1.0},
    columns=(
        *(Column(pool, {"pool": pool}, _with_p99) for pool in ("1P2D", "2P2D", "2P3D")),
        Column("2P4D", {"pool": "2P4D", "file": "table2"}, _with_p99),
    ),
    lines=by_policy("late_binding", "least_loaded", "round_robin", "marginal_cost"),
    sparse=True,
)

WORKLOADS = Table(
    name="workloads",
    files=("documents-reasoning",),
    heads=("policy",),
    columns=(
        Column("documents", {"workload": "documents"}, _with_p99),
        Column("reasoning", {"workload": "reasoning"}, _with_p99),
        Column("chat", {"workload": "chat", "file": "chat"}, _with_p99),
        Column("mixed", {"file": "table2", "load": 1.0, **ONE_TRACE}, _with_p99),
    ),
    lines=(
        *by_policy("late_binding", "least_loaded", "round_robin"),
        Line(("(an idle cluster)",), {"policy": "round_robin"}, figures.ceiling),
        Line(("requests a second",), {"policy": "round_robin"}, _rate),
    ),
)


def validity(results: Results) -> Mapping[str, str]:
    """Return what is known of the pace of all runs on paced engines.

    Raises:
        MissingResultsError: A file is not there, or not of runs.
    """
    if not isinstance(results, MeasuredResults):
        raise MissingResultsError("these results are not of runs")
    runs = [run for name in PACED for run in results.runs(name)]
    valid = [run for run in runs if run.valid]

    def span(key: str, shown: Callable[[float], str]) -> str:
        values = [run.validity[key] for run in valid]
        return f"{shown(min(values))} to {shown(max(values))}"

    reasons = "; ".join(run.why_invalid for run in runs if not run.valid)
    return {
        "runs": str(len(runs)),
        "valid": str(len(valid)),
        "reasons": reasons,
        "late": span("late_share", lambda value: f"{100 * value:.1f}"),
        "pace": span("real_to_modelled", lambda value: f"{value:.4f}"),
        "own": span("own_share", lambda value: f"{100 * value:.0f}"),
        "others": f"{100 * max(run.validity['other_share'] for run in valid):.1f}",
        "preempted": str(sum(run.preemptions for run in runs)),
        "cut": span("cut", lambda value: f"{value:.0f}"),
    }


VALIDITY = Text(
    name="run-validity",
    facts=validity,
    lines=(
        "Of {runs} runs {valid} are valid: {late} % of their steps over 5 % late, mean pace {pace} of the model, own processes",
        "{own} % of the machine, others at most {others} %. What is wrong with the rest (`*`): {reasons}. {preempted} preemptions; {cut} texts a run",
        "were still running 8 s after the last arrival.",
    ),
)

BLOCKS: Sequence[Block] = (
    VALIDITY,
    TABLE2,
    SATURATION,
    AGAIN,
    MORE_LOAD,
    WRONG,
    POOLS,
    WORKLOADS,
)
