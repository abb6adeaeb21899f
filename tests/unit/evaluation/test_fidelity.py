"""Simulations against real engines: residuals, ranks and winners over the same runs."""

import msgspec
import pytest

from evaluation.cells import Cell, Conditions, Pool
from evaluation.fidelity import compare, dilated_surroundings
from evaluation.simulated import SimulatedBackend

SCORED = SimulatedBackend().run(
    Cell(experiment="x", label="x", policy="round_robin", workload="mixed", rate=4.0, seconds=6.0),
    31,
)


def runs(goodputs, *, seed=31, pool=None, **fields):
    """Return runs of one place with these goodputs, by policy."""
    found = {}
    for policy, goodput in goodputs.items():
        cell = Cell(
            experiment="x",
            label=policy,
            policy=policy,
            workload="mixed",
            rate=20.0,
            pool=pool or Pool(),
        )
        result = msgspec.structs.replace(SCORED, seed=seed, goodput=goodput, **fields)
        found[(cell.key(), seed)] = (cell, result)
    return found


def test_residuals_are_the_backend_minus_real():
    """A backend that is .02 too high in one run and .01 too low in another says so."""
    real = runs({"a": 0.80, "b": 0.70}, ttft_p99_seconds=1.0)
    other = runs({"a": 0.82, "b": 0.69}, ttft_p99_seconds=0.9)

    agreement = compare(real, other)

    assert [round(r.goodput, 3) for r in agreement.residuals] == [0.02, -0.01]
    assert agreement.residuals[0].ttft_p99_seconds == pytest.approx(-0.1)
    assert agreement.mean_absolute == pytest.approx(0.015)
    assert agreement.worst == pytest.approx(0.02)
    assert agreement.bias == pytest.approx(0.005)


def test_ranks_and_winners_are_of_one_place():
    """Policies are ranked against each other only where they had the same requests."""
    real = runs({"a": 0.9, "b": 0.8, "c": 0.7}) | runs({"a": 0.5, "b": 0.6}, seed=32)
    other = runs({"a": 0.9, "b": 0.7, "c": 0.8}) | runs({"a": 0.6, "b": 0.5}, seed=32)

    agreement = compare(real, other)

    # One of three pairs the wrong way round: 1/3. The other place: the only pair is, -1.
    assert agreement.tau == pytest.approx((1 / 3 - 1) / 2)
    assert agreement.same_winner == (1, 2)


def test_a_place_with_one_policy_ranks_nothing():
    """Where there is nothing to rank there is no tau, and no winner to agree on."""
    agreement = compare(runs({"a": 0.9}), runs({"a": 0.8}))

    assert agreement.tau is None
    assert agreement.same_winner == (0, 0)


def test_runs_that_only_one_side_has_are_left_out():
    """What was not run on both sides is compared with nothing."""
    real = runs({"a": 0.9, "b": 0.8})

    assert len(compare(real, runs({"a": 0.9})).residuals) == 1
    assert compare(real, runs({"c": 0.9})) is None


def test_surroundings_change_what_is_simulated():
    """A slow wire shows in the first token's time; engines and requests stay the same."""
    cell = Cell(
        experiment="x", label="x", policy="least_loaded", workload="mixed", rate=4.0, seconds=10.0
    )
    near = SimulatedBackend(dilated_surroundings(10.0)).run(cell, 31)
    far = SimulatedBackend(dilated_surroundings(0.1)).run(cell, 31)

    assert far.requests == near.requests
    # 39.6 ms more to the scheduler, and four ways of the wire of 14.85 ms more.
    assert far.ttft_p50_seconds - near.ttft_p50_seconds > 0.05


def test_policies_are_compared_under_the_same_conditions_only():
    """A policy that was told wrong constants is no rival of one that was told right ones."""
    real = runs({"a": 0.9, "b": 0.8})
    wrong = Conditions(believed_factor=7.4)
    told_wrong = {
        (key, seed): (msgspec.structs.replace(cell, conditions=wrong), result)
        for (key, seed), (cell, result) in runs({"c": 0.95}).items()
    }

    assert compare(real | told_wrong, real | told_wrong).same_winner == (1, 1)


def test_an_early_look_delays_first_tokens_by_a_step():
    """Who looks when a pull cannot be done yet sees it one step later; later tokens do not mind."""
    cell = Cell(
        experiment="x", label="x", policy="least_loaded", workload="mixed", rate=4.0, seconds=10.0
    )
    late = SimulatedBackend(dilated_surroundings(4.0, notice_share=0.95)).run(cell, 31)
    early = SimulatedBackend(dilated_surroundings(4.0, notice_share=0.05)).run(cell, 31)

    # A step is 12 to 13 ms here, most pulls are shorter, and some meet an idle engine.
    assert early.ttft_p50_seconds - late.ttft_p50_seconds == pytest.approx(0.012, abs=0.004)
    assert early.tpot_p99_seconds == pytest.approx(late.tpot_p99_seconds, rel=0.1)
