"""The generated blocks of docs/results-simulator.md, in its order."""

# ruff: noqa: RUF001  the document writes its loads with a multiplication sign

from collections.abc import Sequence

from evaluation.published import tables_ours as ours
from evaluation.published import tables_paper as paper
from evaluation.published.blocks import Block, Text
from evaluation.published.facts import known_facts

AIMS = Text(
    name="aims",
    facts=known_facts,
    lines=(
        "| aim | found | |",
        "|--|--|--|",
        "| grid: no cell of 72 more than .005 below the best other policy | worst {grid_worst} | {grid_verdict} |",
        "| grid: mean at 1.0 × ≥ .83, at 1.3 × ≥ .75 | {grid_mean_1.0}, {grid_mean_1.3} | {grid_means_verdict} |",
        "| robustness: no cell lost | worst {robust_worst} of {robust_cells} | {robust_verdict} |",
        "| scarcity: ≥ .88 where least_loaded has about .74 | {scarcity_ours}, least_loaded {scarcity_least_loaded} | {scarcity_verdict} |",
        "| frontier: round robin's goodput with 7 engines from 5 or fewer | {frontier_round_robin_7} with 7; {frontier_ours_5} with 5 | {frontier_verdict}; P99 {frontier_ours_5_p99} s against {frontier_round_robin_7_p99} s |",
        "| routers: 4 with a dispatcher within 1 point of one | at worst {routers_worst} | {routers_verdict} |",
        "| 4 routers without a dispatcher not below least_loaded with 4 | they run least_loaded | met; the gain is gone |",
        "| constants 7.4 × off: within 1 point | {calibration_dear} and {calibration_cheap} points | {calibration_verdict} |",
        "| simulated requests per CPU-second: 10,000 late_binding, 20,000 round_robin | see [benchmarks.md](benchmarks.md) | missed |",
    ),
)

VALIDITY = Text(
    name="validity",
    facts=known_facts,
    lines=(
        "Of the {rows} rows behind these tables {invalid} are invalid, {unfinished} have requests that did not finish, {shed} shed any.",
    ),
)

GRID_OTHERS = Text(
    name="grid-others",
    facts=known_facts,
    lines=(
        "- The best of the others, by cells: {grid_best_of_the_others}.",
        "- Between the best and the worst of four seeds goodput varies by {grid_range_over_seeds_late_binding} for late_binding, by {grid_range_over_seeds_least_loaded} for least_loaded.",
    ),
)

ROBUST_TWO_SEEDS = Text(
    name="robustness-two-seeds",
    facts=known_facts,
    lines=(
        "How much two seeds are worth: with the first two alone documents on the 7 B engine are {robust_two_seeds_1.0} and {robust_two_seeds_0.7} at 1.0 and .7 ×.",
    ),
)

BLOCKS: Sequence[Block] = (
    VALIDITY,
    AIMS,
    ours.GRID_MEANS,
    ours.GRID_WORKLOADS,
    ours.GRID_LEADS,
    ours.GRID_CLOSEST,
    GRID_OTHERS,
    ours.UNSEEN,
    ours.UNSEEN_CLOSEST,
    ours.TAIL,
    ours.SCARCITY,
    ours.SCARCITY_CLOSEST,
    ours.COLLAPSE,
    paper.FRONTIER,
    paper.CALIBRATION,
    paper.NOISE,
    ours.ROUTERS,
    ours.robustness("documents", 8, "robustness-documents"),
    ours.robustness("mixed", 4, "robustness"),
    ours.robustness("reasoning", 4, "robustness"),
    ours.robustness("chat", 4, "robustness-chat"),
    ours.ROBUST_CLOSEST,
    ROBUST_TWO_SEEDS,
    paper.TABLE2,
    paper.WIDTH,
    paper.ablation("late_binding", {"30 ms ahead": "sent 30 ms ahead"}),
    paper.ablation("marginal_cost", {}),
    ours.FAIRNESS,
    paper.LOAD,
    paper.BURST,
    paper.UNEVEN,
    ours.STALE,
)
