"""Tables of the experiments in which late binding has to show that it loses nowhere."""

# ruff: noqa: RUF001  the document writes its loads with a multiplication sign

from evaluation.experiments.base import FAIRNESS_ORDER
from evaluation.published import figures
from evaluation.published.blocks import Closest, Column, Line, Table, by_load, by_policy
from evaluation.published.figures import factor

RIVALS = ("token_product", "drain_time", "least_loaded", "round_robin", "marginal_cost")

GRID_MEANS = Table(
    name="grid-means",
    files=("grid",),
    heads=("policy",),
    columns=by_load(0.7, 1.0, 1.3),
    lines=(
        Line(("(ceiling)",), {"policy": "round_robin"}, figures.ceiling),
        *by_policy(
            "late_binding", *RIVALS, "power_of_two", "block_overlap", "length_threshold", "slo_headroom"
        ),
    ),
    rows=24,
    ranked=True,
)  # fmt: skip

GRID_WORKLOADS = Table(
    name="grid-workloads",
    files=("grid",),
    heads=("",),
    columns=tuple(
        Column(head, {"workload": head.split()[0]}, figures.at_loads(1.0, 1.3))
        for head in ("chat 1.0 / 1.3", "documents", "mixed", "reasoning")
    ),
    lines=by_policy(
        "late_binding", "token_product", "least_loaded", "marginal_cost", "round_robin"
    ),
    rows=18,
)

GRID_LEADS = Table(
    name="grid-leads",
    files=("grid",),
    heads=("late_binding",),
    columns=by_load(0.7, 1.0, 1.3),
    lines=(
        Line(("behind the best other policy, cells",), {}, figures.cells_behind),
        Line(("smallest lead, but where all have 1.000",), {}, figures.smallest_lead),
        Line(("P99 TTFT over least_loaded's, median cell",), {}, figures.median_tail_ratio),
        Line(("the same, largest",), {}, figures.largest_tail_ratio),
    ),
    rows=0,
)

GRID_CLOSEST = Closest(name="grid-closest", files=("grid",), most=4)

UNSEEN = Table(
    name="unseen",
    files=("grid-41",),
    heads=("policy",),
    columns=by_load(0.7, 1.0, 1.3),
    lines=by_policy("late_binding", *RIVALS),
    rows=24,
    ranked=True,
)

UNSEEN_CLOSEST = Closest(name="unseen-closest", files=("grid-41",), most=3)

_MIXED_TAIL = ("round_robin", "least_loaded", "token_product", "marginal_cost", "late_binding")
TAIL = Table(
    name="tail",
    files=("grid",),
    heads=("", "policy"),
    where={"pool": "2P4D"},
    columns=(
        Column("goodput", {}, figures.goodput_range),
        Column("ceiling", {}, figures.short_ceiling, once=True),
        Column("P50", {}, figures.p50),
        Column("P99", {}, figures.p99),
        Column("max", {}, figures.slowest),
        Column("> 3 ×", {}, figures.far_beyond),
        Column("tight / loose", {}, figures.classes),
    ),
    lines=tuple(
        Line(
            (f"{workload} {factor(load)}", policy),
            {"workload": workload, "load": load, "policy": policy},
        )
        for workload in ("mixed", "chat", "documents", "reasoning")
        for load in (1.0, 1.3)
        for policy in (
            _MIXED_TAIL if (workload, load) == ("mixed", 1.0) else ("least_loaded", "late_binding")
        )
    ),
    grouped=True,
)

SCARCITY = Table(
    name="scarcity",
    files=("scarcity",),
    heads=("policy",),
    columns=by_load(1.0, 1.3),
    lines=(
        Line(("(ceiling)",), {"policy": "round_robin"}, figures.ceiling),
        *by_policy("late_binding", *RIVALS),
    ),
    rows=9,
    ranked=True,
)

SCARCITY_CLOSEST = Closest(name="scarcity-closest", files=("scarcity",), most=3)

_SCARCE = {"file": "scarcity", "kv_tokens": 20_000.0, "seats": 256.0}
COLLAPSE = Table(
    name="collapse",
    files=(),
    heads=("mixed",),
    where={"workload": "mixed"},
    columns=tuple(
        Column(policy, {"policy": policy})
        for policy in ("marginal_cost", "round_robin", "least_loaded", "late_binding")
    ),
    lines=(
        Line(
            ("2P4D, 20,000 tokens, 1.0 ×",), {**_SCARCE, "load": 1.0}, figures.goodput_range
        ),
        Line(
            ("2P4D, 20,000 tokens, 1.3 ×",), {**_SCARCE, "load": 1.3}, figures.goodput_range
        ),
        Line(
            ("1P2D, 60,000 tokens, 1.0 ×",),
            {"file": "grid", "pool": "1P2D", "load": 1.0},
            figures.goodput_range,
        ),
    ),
)  # fmt: skip

_ROUTER_PLACES = [
    (workload, load)
    for workload in ("mixed", "documents", "chat", "reasoning")
    for load in (0.7, 1.0, 1.3)
    if (workload, load) != ("reasoning", 0.7)
]
ROUTER_FILES = ("routers", "routers-documents")
ROUTERS = Table(
    name="routers",
    files=ROUTER_FILES,
    heads=("", ""),
    columns=(
        Column("1 router", {"variant": "1 router"}),
        Column("4 routers and a dispatcher", {"variant": "4 routers, dispatcher"}),
        Column("4 routers, each for itself", {"variant": "4 routers"}),
    ),
    lines=tuple(
        Line(
            (f"{workload} {factor(load)}", policy),
            {"workload": workload, "load": load, "base": policy},
            figures.goodput_range if workload in ("mixed", "chat") and load == 1.0 else None,
        )
        for workload, load in _ROUTER_PLACES
        for policy in ("late_binding", "least_loaded")
    ),
    grouped=True,
)

_ROBUST_PLACES = (
    ("engine like an H100", "h100"),
    ("7 B model, targets doubled", "7b"),
    ("slow link (1 GB/s, 30 ms)", "slow link"),
    ("jitter 15 %, stalls in 2 % of steps", "stalls"),
    ("Poisson arrivals", "poisson"),
    ("Gamma arrivals, CV 3", "gamma"),
    ("20 % tight", "tight 20 %"),
    ("80 % tight", "tight 80 %"),
    ("round trip 10 ms", "round trip 10 ms"),
)
ROBUST_FILES = ("robustness-documents", "robustness", "robustness-chat")


def robustness(workload: str, seeds: int, file: str) -> Table:
    """Return the robustness table of a workload."""
    return Table(
        name=f"robustness-{workload}",
        files=(file,),
        heads=(f"{workload}, {seeds} seeds",),
        where={"workload": workload},
        columns=tuple(
            Column(factor(load), {"load": load}, figures.against_best) for load in (0.7, 1.0, 1.3)
        ),
        lines=tuple(Line((shown,), {"variant": place}) for shown, place in _ROBUST_PLACES),
        rows=0,
    )


ROBUST_CLOSEST = Closest(name="robustness-closest", files=ROBUST_FILES, most=6)

FAIRNESS = Table(
    name="fairness",
    files=("fairness", "fairness-2", "fairness-chat"),
    heads=("",),
    columns=tuple(
        Column(
            f"{workload} {factor(load)}",
            {"workload": workload, "load": load},
            figures.goodput_and_p99,
        )
        for workload, load in (
            ("mixed", 1.3),
            ("mixed", 1.6),
            ("documents", 1.6),
            ("reasoning", 1.0),
            ("reasoning", 1.3),
            ("chat", 1.3),
        )
    ),
    lines=(
        *(Line((name,), {"policy": f"late_binding {name}"}) for name in FAIRNESS_ORDER),
        Line(("least_loaded",), {"policy": "least_loaded"}),
    ),
)

STALE = Table(
    name="staleness",
    files=("staleness",),
    heads=("policy",),
    columns=(Column("50 ms", {"variant": "0.05 s"}), Column("2 s", {"variant": "2 s"})),
    lines=tuple(Line((p,), {"base": p}) for p in ("least_loaded", "marginal_cost", "late_binding")),
)
