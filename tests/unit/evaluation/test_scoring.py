import pytest

from dataplane.core.slo import DEFAULT_SLO
from enginemodel.profiles import REFERENCE
from evaluation.cells import Cell
from evaluation.scoring import Scorer, idle_ttft_seconds, longest_feasible_prompt, rolling_p95
from simulator.app import simulate
from simulator.values import (
    SILENT,
    Arrival,
    ClusterSpec,
    End,
    Outcome,
    SchedulerSpec,
    Timing,
    pool_of,
)

CELL = Cell(experiment="x", label="p", policy="p", workload="mixed", rate=1.0)


def outcome(at, ttft, tpot, slo_class="tight", *, prompt=100, end=End.FINISHED):
    """Return an outcome."""
    arrival = Arrival(0, at, prompt, 10, 10, slo_class, "a")
    return Outcome(arrival, end, ttft, tpot, at + 1.0, "p", "d", 0, 1)


def result_of(*outcomes, cell=CELL):
    """Return the result of these outcomes."""
    scorer = Scorer(cell, DEFAULT_SLO, REFERENCE, Timing())
    for one in outcomes:
        scorer.record(one)
    return scorer.result(1, preemptions=0, virtual_seconds=9.0, clean=True)


def test_goodput_needs_both_targets():
    """A request is good when it met both targets of its own class and finished."""
    result = result_of(
        outcome(10, 0.1, 0.02),
        outcome(10, 0.2, 0.02),
        outcome(10, 0.2, 0.02, "loose"),
        outcome(10, 0.1, 0.05),
        outcome(10, float("inf"), float("inf"), end=End.REJECTED),
    )

    assert result.goodput == pytest.approx(2 / 5)
    assert result.goodput_by_class == {"tight": 0.25, "loose": 1.0}
    assert (result.shed, result.completed) == (1, 0.8)
    assert result.ttft_max_seconds is None


def test_warmup_and_cancelled_are_not_scored():
    """Requests of the warm-up, and those whose client left, say nothing about a policy."""
    result = result_of(
        outcome(1, 9.0, 0.02),
        outcome(10, 0.1, 0.02),
        outcome(10, float("inf"), float("inf"), end=End.CANCELLED),
    )

    assert (result.requests, result.goodput) == (1, 1.0)


def test_ceiling_counts_what_an_idle_cluster_could_do():
    """A prompt too long for its target lowers the ceiling, whatever became of it."""
    result = result_of(outcome(10, 9.0, 0.02, prompt=4000), outcome(10, 9.0, 0.02, prompt=100))

    assert (result.ceiling, result.goodput, result.beyond_3x) == (0.5, 0.0, 1.0)


@pytest.mark.parametrize("prompt", [1, 200, 2048, 3000])
def test_idle_time_is_what_an_idle_cluster_takes(prompt):
    """The time that the ceiling goes by is the one that the simulator shows without any load."""
    seen = []

    class Kept:
        def record(self, one):
            seen.append(one.ttft_seconds)

    spec = ClusterSpec(
        engines=pool_of(1, 1), scheduler=SchedulerSpec(name="round_robin"), noise=SILENT
    )
    arrival = Arrival(0, 0.0, prompt, 5, 10, "tight", "a")
    simulate(spec, iter([arrival]), Kept())

    assert seen == [pytest.approx(idle_ttft_seconds(REFERENCE, Timing(), prompt), abs=1e-9)]


def test_longest_feasible_prompt_is_the_last_within_target():
    """One token more would miss the target."""
    longest = longest_feasible_prompt(REFERENCE, Timing(), 0.175)

    assert idle_ttft_seconds(REFERENCE, Timing(), longest) <= 0.175
    assert idle_ttft_seconds(REFERENCE, Timing(), longest + 1) > 0.175


def test_rolling_p95_follows_a_burst():
    """The rolling percentile rises where first tokens were late, and only there."""
    points = [(t / 10, 5.0 if 10 <= t / 10 < 12 else 0.1) for t in range(300)]

    series = dict(rolling_p95(points))

    assert series[9.0] == pytest.approx(0.1)
    assert series[12.0] == pytest.approx(5.0)
    assert series[15.0] == pytest.approx(0.1)
