"""What the document's sentences state of our experiments: grid, scarcity, routers, robustness, tail."""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from evaluation.published.figures import (
    ALL_IN_TIME,
    closest,
    factor,
    interval,
    mean,
    on_seeds,
    place,
    points,
    seconds,
    share,
    signed,
    tail_ratios,
)
from evaluation.published.results import Results, field_of
from evaluation.published.tables_ours import ROBUST_FILES, ROUTER_FILES
from evaluation.rows import Row
from evaluation.tables import Contest, contests

LOADS = (0.7, 1.0, 1.3)
LOST_BELOW = -0.005
A_POINT = 0.01

Fact = tuple[str, str]


def verdict(met: object) -> str:
    """Return whether an aim is met."""
    return "met" if met else "missed"


def worst_of(rows: Sequence[Row]) -> Contest:
    """Return the contest that goes worst for late binding."""
    return min(contests(rows), key=lambda contest: contest.difference.mean)


def described(contest: Contest) -> str:
    """Say how a contest went."""
    return (
        f"{signed(contest.difference.mean)} (95 % {interval(contest)}) in {place(contest.ours)}, "
        f"against {field_of(contest.best, 'base')}"
    )


def grid(results: Results) -> Iterator[Fact]:
    """Facts about the grid."""
    rows = results.file("grid")
    worst = worst_of(rows)
    yield "grid_worst", signed(worst.difference.mean)
    yield "grid_verdict", verdict(worst.difference.mean >= LOST_BELOW)
    yield "grid_worst_cell", described(worst)
    means = {}
    for load in LOADS:
        here = [row for row in rows if row.load == load]
        found = contests(here)
        means[load] = mean(contest.ours.goodput for contest in found)
        yield f"grid_mean_{load}", share(means[load])
        behind = [c for c in found if c.difference.mean < 0.0]
        level = [c for c in found if c.best.goodput >= ALL_IN_TIME]
        yield (
            f"grid_behind_{load}",
            f"{len(behind)} of {len(found)}; all have 1.000 in {len(level)}",
        )
        yield f"grid_leads_{load}", "; ".join(described(contest) for contest in closest(here, 4))
        ratios = tail_ratios(here)
        largest, where = max(ratios, key=lambda pair: pair[0])
        yield (
            f"grid_p99_over_least_loaded_{load}",
            f"median {median(r for r, _ in ratios):.2f}, at most {largest:.2f} ({place(where)})",
        )
    yield "grid_means_verdict", verdict(means[1.0] >= 0.83 and means[1.3] >= 0.75)
    best = Counter(c.best.policy for c in contests(rows) if c.best.goodput < ALL_IN_TIME)
    yield "grid_best_of_the_others", ", ".join(f"{p} in {n}" for p, n in best.most_common())
    for policy in ("late_binding", "least_loaded", "round_robin"):
        spans = [
            max(r.goodput_by_seed) - min(r.goodput_by_seed) for r in rows if r.policy == policy
        ]
        yield f"grid_range_over_seeds_{policy}", f"{share(mean(spans))} in the mean"
    yield (
        "grid_requests",
        f"{sum(r.requests * len(r.seeds) for r in rows) / 1e6:.2f} million scored",
    )


def unseen(results: Results) -> Iterator[Fact]:
    """Facts about the grid on seeds that nobody had seen."""
    rows = results.file("grid-41")
    yield "unseen_worst_cell", described(worst_of(rows))
    yield "unseen_lost", f"{sum(c.difference.mean < LOST_BELOW for c in contests(rows))} cells"
    for load in LOADS:
        found = contests([row for row in rows if row.load == load])
        ours = mean(contest.ours.goodput for contest in found)
        by_policy = {
            policy: mean(r.goodput for r in rows if r.load == load and r.policy == policy)
            for policy in {row.policy for row in rows} - {"late_binding"}
        }
        best = max(by_policy, key=lambda policy: by_policy[policy])
        yield (
            f"unseen_mean_{load}",
            f"{share(ours)}; best other mean {share(by_policy[best])} {best}",
        )


def scarcity(results: Results) -> Iterator[Fact]:
    """Facts about little KV and few seats."""
    rows = results.file("scarcity")

    def of(policy: str, load: float) -> list[Row]:
        return [row for row in rows if row.policy == policy and row.load == load]

    ours = mean(row.goodput for row in of("late_binding", 1.0))
    yield "scarcity_ours", share(ours)
    yield "scarcity_least_loaded", share(mean(r.goodput for r in of("least_loaded", 1.0)))
    yield "scarcity_verdict", verdict(ours >= 0.88)
    yield "scarcity_leads", "; ".join(described(contest) for contest in closest(rows, 3))
    for load in (1.0, 1.3):
        for policy in ("late_binding", "least_loaded"):
            tails = [r.ttft_p99_seconds or float("inf") for r in of(policy, load)]
            yield (
                f"scarcity_p99_{policy}_{load}",
                f"{seconds(min(tails))} to {seconds(max(tails))} s",
            )
            yield (
                f"scarcity_preemptions_{policy}_{load}",
                "; ".join(f"{place(r)}: {r.preemptions:.0f} a run" for r in of(policy, load)),
            )


def routers(results: Results) -> Iterator[Fact]:
    """Facts about one router and four."""
    by_place: dict[tuple[str, float], dict[str, dict[str, float]]] = {}
    for row in results.select(ROUTER_FILES, {}):
        base, arm = str(field_of(row, "base")), str(field_of(row, "variant"))
        here = by_place.setdefault((row.workload, row.load), {})
        here.setdefault(base, {})[arm] = row.goodput
    worst: dict[str, float] = {}
    for (workload, load), here in by_place.items():
        ours, counting = here["late_binding"], here["least_loaded"]
        dispatched = ours["4 routers, dispatcher"] - ours["1 router"]
        worst[workload] = min(worst.get(workload, 1.0), dispatched)
        yield (
            f"routers_{workload}_{load}",
            (
                f"with a dispatcher {points(dispatched)} points of one router, "
                f"without {points(ours['4 routers'] - ours['1 router'])}; "
                f"without, over least_loaded with 4: {points(ours['4 routers'] - counting['4 routers'])}"
            ),
        )
    yield "routers_worst", ", ".join(f"{name} {points(value)}" for name, value in worst.items())
    over = [name for name, value in worst.items() if value < -A_POINT]
    yield "routers_verdict", f"met but for {', '.join(over)}" if over else "met"


def robustness(results: Results) -> Iterator[Fact]:
    """Facts about other engines, links and arrivals."""
    rows = results.select(ROBUST_FILES, {})
    found = contests(rows)
    worst = worst_of(rows)
    yield "robust_cells", str(len(found))
    yield "robust_worst", signed(worst.difference.mean)
    yield "robust_verdict", verdict(worst.difference.mean >= LOST_BELOW)
    yield "robust_worst_cell", described(worst)
    behind = [contest for contest in found if contest.difference.mean < 0.0]
    lost = [contest for contest in behind if contest.difference.mean < LOST_BELOW]
    yield "robust_behind", f"{len(behind)} cells, {len(lost)} by more than {share(-LOST_BELOW)}"
    for place_, contest in enumerate(closest(rows, 8), start=1):
        yield f"robust_closest_{place_}", described(contest)
    for load in (0.7, 1.0):
        here = results.select(
            ["robustness-documents"], {"variant": "7b", "workload": "documents", "load": load}
        )
        contest = on_seeds(here, here[0].seeds[:2])
        yield f"robust_two_seeds_{load}", signed(contest.difference.mean)


def fairness(results: Results) -> Iterator[Fact]:
    """Facts about goodput against the tail."""
    for file, workload, load in (
        ("fairness", "mixed", 1.3),
        ("fairness", "mixed", 1.6),
        ("fairness-2", "documents", 1.6),
        ("fairness-2", "reasoning", 1.0),
        ("fairness-2", "reasoning", 1.3),
        ("fairness-chat", "chat", 1.3),
    ):
        rows = {r.policy: r for r in results.select([file], {"workload": workload, "load": load})}
        first, strict = rows["late_binding goodput_first"], rows["late_binding strict"]
        other = rows["least_loaded"]
        p99 = [seconds(row.ttft_p99_seconds) for row in (strict, first, other)]
        yield (
            f"fairness_{workload}_{load}",
            (
                f"strict {points(strict.goodput - first.goodput)} points of goodput_first and "
                f"{points(strict.goodput - other.goodput)} of least_loaded; P99 {p99[0]} s against "
                f"{p99[1]} s and {p99[2]} s"
            ),
        )


def staleness(results: Results) -> Iterator[Fact]:
    """Facts about old telemetry."""
    for policy in ("least_loaded", "marginal_cost", "late_binding"):
        fresh = results.one("staleness", policy=f"{policy} 0.05 s")
        old = results.one("staleness", policy=f"{policy} 2 s")
        yield (
            f"staleness_{policy}",
            (
                f"{share(fresh.goodput)} to {share(old.goodput)}: {points(old.goodput - fresh.goodput)} "
                f"points at {factor(old.load)}"
            ),
        )
