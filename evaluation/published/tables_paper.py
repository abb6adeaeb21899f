"""Tables of the paper's experiments."""

# ruff: noqa: RUF001  the document writes its loads with a multiplication sign

from evaluation.experiments.paper import ABLATIONS
from evaluation.published import figures
from evaluation.published.blocks import Column, Line, Table, by_policy
from evaluation.published.figures import DIVIDED, TIMES, factor

RIVALS = ("token_product", "drain_time", "least_loaded", "round_robin", "marginal_cost")

FRONTIER = Table(
    name="frontier",
    files=("frontier",),
    heads=("engines",),
    where={"load": 1.0},
    columns=tuple(
        Column(policy, {"policy": policy}, figures.best_split)
        for policy in ("round_robin", "least_loaded", "marginal_cost", "late_binding")
    ),
    lines=tuple(Line((str(total),), {"engines": total}) for total in range(3, 9)),
    rows=0,
)

_BELIEVED = (("1", "x1.00"), (f"{TIMES} 7.4", "x7.40"), (f"{DIVIDED} 7.4", "x0.14"))
CALIBRATION = Table(
    name="calibration",
    files=("calibration",),
    heads=("policy", "factor"),
    columns=(
        Column("2P4D", {"pool": "2P4D", "seats": None}),
        Column("1P2D scarce", {"pool": "1P2D", "seats": 64.0}),
        Column("2P4D scarce", {"pool": "2P4D", "seats": 64.0}),
    ),
    lines=(
        *(
            Line((policy, shown), {"policy": f"{policy} {suffix}"})
            for policy in ("late_binding", "marginal_cost")
            for shown, suffix in _BELIEVED
        ),
        Line(("marginal_cost", f"decode only {DIVIDED} 7.4"), {"policy": "marginal_cost decode x0.14"}),
        Line(("least_loaded", "any"), {"policy": "least_loaded x1.00"}),
    ),
    grouped=True,
)  # fmt: skip

NOISE = Table(
    name="noise",
    files=("noise",),
    heads=("error",),
    columns=tuple(
        Column(f"{error} %" if error else "0", {"variant": f"error {error / 100.0:.2f}"})
        for error in (0, 25, 50, 100, 150)
    ),
    lines=tuple(Line((p,), {"base": p}) for p in ("marginal_cost", "late_binding")),
)

TABLE2 = Table(
    name="table2",
    files=("table2",),
    heads=("policy",),
    columns=(Column("goodput", {}, figures.goodput_range), Column("P99", {}, figures.p99)),
    lines=by_policy(
        "late_binding", *RIVALS, "power_of_two", "block_overlap", "length_threshold", "slo_headroom"
    ),
    ranked=True,
)

WIDTH = Table(
    name="width",
    files=("width",),
    heads=("policy",),
    columns=tuple(Column(pool, {"pool": pool}) for pool in ("2P3D", "2P4D", "2P6D")),
    lines=by_policy(
        "late_binding", "token_product", "least_loaded", "drain_time", "marginal_cost", "round_robin"
    ),
)  # fmt: skip


def ablation(policy: str, renamed: dict[str, str]) -> Table:
    """Return the ablation of a policy."""
    rest = {"file": "ablation-all", "load": 1.3, "pool": "2P4D"}
    return Table(
        name=f"ablation-{policy.replace('_', '-')}",
        files=(),
        heads=(policy,),
        columns=(
            Column("mixed 1.0 ×", {"file": "ablation"}),
            *(
                Column(workload, {**rest, "workload": workload})
                for workload in ("mixed", "chat", "documents", "reasoning")
            ),
            Column("mixed 2P2D", {**rest, "workload": "mixed", "pool": "2P2D"}),
        ),
        lines=tuple(
            Line((renamed.get(part, part),), {"policy": f"{policy}: {part}"})
            for part, _ in ABLATIONS[policy]
        ),
    )


LOAD = Table(
    name="load",
    files=("load",),
    heads=("load",),
    columns=tuple(
        Column(factor(load).removesuffix(f" {TIMES}"), {"load": load})
        for load in (0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0)
    ),
    lines=by_policy(
        "late_binding", "token_product", "least_loaded", "marginal_cost", "round_robin"
    ),
)

BURST = Table(
    name="burst-train",
    files=("burst-train",),
    heads=("policy",),
    columns=(
        Column("goodput"),
        Column("P99", {}, figures.p99),
        Column("largest rolling P95", {}, figures.largest_rolling_p95),
    ),
    lines=by_policy("late_binding", *RIVALS),
    ranked=True,
)

UNEVEN = Table(
    name="heterogeneity",
    files=("heterogeneity",),
    heads=("policy",),
    where={"load": 0.85},
    columns=(
        Column("told", {"variant": "slow told"}),
        Column("not told", {"variant": "slow untold"}),
    ),
    lines=tuple(Line((p,), {"base": p}) for p in ("late_binding", *RIVALS)),
    ranked=True,
)
