"""What the document's sentences state of the paper's experiments."""

from collections.abc import Iterator

from evaluation.published.facts_ours import A_POINT, Fact, verdict
from evaluation.published.figures import factor, points, seconds, share, short_seconds
from evaluation.published.results import Results, field_of
from evaluation.rows import Row
from evaluation.tables import best_splits

CALIBRATION_POOLS = (("2P4D", None), ("1P2D", 64.0), ("2P4D", 64.0))


def frontier(results: Results) -> Iterator[Fact]:
    """Facts about goodput by number of engines."""
    best = best_splits(results.file("frontier"))
    for total, by_policy in best.items():
        for policy, row in by_policy.items():
            name = {"late_binding": "ours"}.get(policy, policy)
            yield f"frontier_{name}_{total}", share(row.goodput)
            yield f"frontier_{name}_{total}_p99", short_seconds(row.ttft_p99_seconds)
    target = best[7]["round_robin"].goodput
    enough = {
        policy: min((n for n in best if best[n][policy].goodput >= target), default=None)
        for policy in best[7]
    }
    yield (
        "frontier_engines_for_round_robin_7",
        ", ".join(f"{policy} {total or 'none'}" for policy, total in enough.items()),
    )
    yield "frontier_verdict", verdict(best[5]["late_binding"].goodput >= target)
    yield "frontier_rate", f"{best[7]['round_robin'].rate:.1f} requests a second"


def calibration(results: Results) -> Iterator[Fact]:
    """Facts about constants 7.4 times off."""
    worst = {"x7.40": 1.0, "x0.14": 1.0}
    for pool, seats in CALIBRATION_POOLS:
        where = {"pool": pool, "seats": seats}
        for policy in ("late_binding", "marginal_cost", "least_loaded"):
            right = results.one("calibration", policy=f"{policy} x1.00", **where)
            others = [
                row
                for row in results.select(["calibration"], where)
                if field_of(row, "base") == policy and row is not right
            ]
            for row in others:
                off = row.goodput - right.goodput
                variant = str(field_of(row, "variant"))
                scarce = " scarce" if seats else ""
                yield (
                    f"calibration_{policy}_{variant}_{pool}{scarce}".replace(" ", "_"),
                    (
                        f"{points(off)} points; P99 {seconds(row.ttft_p99_seconds)} s against "
                        f"{seconds(right.ttft_p99_seconds)} s"
                    ),
                )
                if policy == "late_binding":
                    worst[variant] = min(worst[variant], off)
    yield "calibration_dear", points(worst["x7.40"])
    yield "calibration_cheap", points(worst["x0.14"])
    yield "calibration_verdict", verdict(min(worst.values()) >= -A_POINT)


def noise(results: Results) -> Iterator[Fact]:
    """Facts about errors of prediction."""
    for policy in ("marginal_cost", "late_binding"):
        none = results.one("noise", policy=f"{policy} error 0.00")
        for error in ("0.25", "0.50", "1.00", "1.50"):
            row = results.one("noise", policy=f"{policy} error {error}")
            same = "the same by seed" if row.goodput_by_seed == none.goodput_by_seed else "differs"
            yield f"noise_{policy}_{error}", f"{points(row.goodput - none.goodput)} points, {same}"


def paper_and_width(results: Results) -> Iterator[Fact]:
    """Facts about the paper's table, its order below saturation, and the narrow pool."""
    rows = sorted(results.file("table2"), key=lambda row: -row.goodput)
    yield "table2_order", ", ".join(f"{row.policy} {share(row.goodput)}" for row in rows)
    for workload, load in (("mixed", 0.7), ("mixed", 1.0), ("chat", 1.0)):
        where = {"workload": workload, "pool": "2P4D", "load": load}
        rows = sorted(results.select(["grid"], where), key=lambda row: -row.goodput)
        yield (
            f"grid_order_{workload}_{load}",
            ", ".join(f"{row.policy} {share(row.goodput)}" for row in rows),
        )
    where = {"workload": "mixed", "pool": "1P2D", "load": 1.0}
    rows = sorted(results.select(["grid"], where), key=lambda row: -row.goodput)
    yield "grid_order_1P2D", ", ".join(f"{row.policy} {share(row.goodput)}" for row in rows)


def ablation(results: Results) -> Iterator[Fact]:
    """Facts about parts taken out: points gained or lost, and what it does to the tail."""

    def compared(row: Row, full: Row) -> str:
        return (
            f"{points(row.goodput - full.goodput)} points, P99 {seconds(row.ttft_p99_seconds)} s "
            f"against {seconds(full.ttft_p99_seconds)} s in full, beyond three times the target "
            f"{share(row.beyond_3x)} against {share(full.beyond_3x)}"
        )

    for file, at in (("ablation", 1.0), ("ablation-all", 1.3)):
        rows = results.select([file], {"load": at})
        full = {
            (field_of(row, "base"), row.workload, field_of(row, "pool")): row
            for row in rows
            if field_of(row, "variant") == "full"
        }
        for row in rows:
            base, variant, pool = (field_of(row, name) for name in ("base", "variant", "pool"))
            if variant != "full":
                yield (
                    f"{base} {variant}, {row.workload} {pool} {factor(at)}",
                    compared(row, full[base, row.workload, pool]),
                )


def load(results: Results) -> Iterator[Fact]:
    """Facts about load."""
    for policy in ("late_binding", "least_loaded", "round_robin"):
        for at in (1.0, 1.3, 2.0):
            row = results.one("load", policy=policy, load=at)
            yield (
                f"load_{policy}_{at}",
                f"{share(row.goodput)}, P99 {seconds(row.ttft_p99_seconds)} s",
            )
