"""Which points are measured, which targets follow, and what is not published."""

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrator.design import (
    Limits,
    choose,
    decode_cost_seconds,
    decode_grid,
    decode_rows,
    geometric,
    prefill_grid,
    prefill_rows,
    random_decode,
)
from calibrator.fit import Constant, PartFit
from calibrator.planner import DecodeSide, Planner, PrefillSide
from calibrator.profile import CONSTANT_NAMES, HeldOut, ProfileFit
from calibrator.publish import Rules, draft, refusals
from calibrator.slo import light_load, targets
from controlplane.core.values import Constants
from enginemodel.profiles import A40_QWEN

A40 = A40_QWEN.constants
LIMITS = Limits(8192, 2048, 256, 60_000)


@given(st.integers(1, 100), st.integers(1, 100_000), st.sampled_from([1.5, 2.0, 4.0]))
def test_a_geometric_grid_rises_from_end_to_end(first, span, factor):
    """Both ends are there, steps are at most the factor, nothing repeats."""
    last = first + span - 1

    grid = geometric(first, last, factor)

    assert (grid[0], grid[-1]) == (first, last)
    assert all(a < b for a, b in itertools.pairwise(grid))


@given(
    st.integers(64, 40_000), st.integers(128, 8192), st.integers(1, 512), st.integers(512, 100_000)
)
def test_no_probe_exceeds_what_the_engine_holds(model_tokens, batched, seqs, kv):
    """Grids and random points stay inside the model's length, the slots, the step and the KV."""
    limits = Limits(min(model_tokens, kv), batched, seqs, kv)

    prompts = prefill_grid(limits)
    batches = [*decode_grid(limits)]
    drawn = random_decode(limits, Random(1))

    for point in prompts:
        assert max(point.prompt_tokens) < limits.max_model_tokens
        assert len(point.prompt_tokens) <= seqs
        assert len(point.prompt_tokens) == 1 or sum(point.prompt_tokens) <= batched
    for batch in [*batches, *([drawn] if drawn else [])]:
        assert batch.sequences <= seqs
        assert batch.context_tokens + batch.output_tokens <= limits.max_model_tokens
        assert batch.sequences * (batch.context_tokens + batch.output_tokens) <= kv


def test_refinement_goes_where_the_constants_are_least_certain():
    """With only short prompts measured, the next are long; with only small batches, large."""
    prompts = [point for point in prefill_grid(LIMITS) if len(point.prompt_tokens) == 1]
    shapes = [point.steps(LIMITS) for point in prompts]
    done = prefill_rows(A40, [shapes[0]] * 200)
    batches = decode_grid(LIMITS)
    rows = decode_rows(A40, [(b.sequences, b.kv_tokens) for b in batches])

    next_prompt = choose(done, prefill_rows(A40, shapes), [1.0] * len(shapes), 1)[0]
    next_batch = choose(rows[:1].repeat(200, axis=0), rows, [1.0] * len(rows), 2)

    assert prompts[next_prompt].prompt_tokens[0] >= 512
    assert (
        max(batches[i].sequences for i in next_batch) == 256
        or max(batches[i].kv_tokens for i in next_batch) > 30_000
    )


def test_refinement_prefers_cheap_points_of_equal_worth():
    """Of two candidates that tell the same, the cheaper is measured."""
    same = np.array([[0.5, 0.5], [0.5, 0.5]])

    assert choose(np.zeros((0, 2)), same, [2.0, 1.0], 3) == [1, 1, 1]


def test_a_planner_measures_grid_then_more_then_held_out_points_within_its_time():
    """Held-out points come last, nothing is begun that would not end in time."""
    planner = Planner(DecodeSide(LIMITS), Random(1), A40, sweep_seconds=60.0, workers=1)
    spent, tasks = 0.0, []

    while (task := planner.next(spent)) is not None:
        assert spent + task.predicted_seconds <= 60.0
        spent += decode_cost_seconds(A40, task.point, LIMITS)
        tasks.append(task)

    held_out = [task.held_out for task in tasks]
    assert sorted(held_out) == held_out
    assert 5 <= sum(held_out) < len(tasks) / 2
    assert spent > 50.0


def test_a_planner_learns_how_slow_probes_really_are():
    """Where probes take five times what the constants say, fewer are begun."""
    planner = Planner(PrefillSide(LIMITS), Random(1), A40, sweep_seconds=20.0, workers=1)
    spent = 0.0

    while (task := planner.next(spent)) is not None:
        seconds = 5 * task.predicted_seconds
        planner.took(task, min(seconds, 2.0))
        spent += min(seconds, 2.0)

    assert spent <= 22.0


def test_targets_are_multiples_of_light_load_near_the_papers():
    """Three times a light-load token of the reference engine is the paper's 39.7 ms within 6 %."""
    light = light_load(A40, A40, kv_bytes_per_token=36_864, chunk_tokens=2048)

    found = targets([light, replace(light, tpot_seconds=light.tpot_seconds / 2)])

    tight, loose = found["tight"], found["loose"]
    assert tight.tpot_seconds == pytest.approx(0.0397, rel=0.06)
    assert tight.ttft_seconds == pytest.approx(0.175, rel=0.10)
    assert loose.tpot_seconds == pytest.approx(3 * tight.tpot_seconds)
    assert tight.ttft_for(512) == pytest.approx(tight.ttft_seconds, rel=0.01)
    assert tight.ttft_for(4096) > 3 * tight.ttft_for(512)


def profile_fit(**changes) -> ProfileFit:
    """Return a good fit of decode alone, or one with changes to its constants."""
    values = {
        "d0_seconds": Constant(value=0.0118, standard_error=1e-4, influence=0.01),
        "d1_seconds_per_sequence": Constant(value=5e-5, standard_error=1e-6, influence=0.02),
        "d2_seconds_per_kv_token": Constant(value=8e-8, standard_error=2e-9, influence=0.01),
    } | changes
    part = PartFit(
        constants=values,
        scale={"d0": 1.0},
        scale_error={"d0": 0.01},
        sigma=0.05,
        points=50,
        outliers=1,
    )
    constants = replace(A40, **{name: constant.value for name, constant in values.items()})
    return ProfileFit(None, part, None, constants, {"decode": HeldOut(0.02, 0.05, 12)})


def judge(found: ProfileFit, current=None, **rules) -> list[str]:
    """Return the codes of the refusals."""
    made = draft("p", found, fingerprint="f", sample_count=62, reason="test")
    return [refusal.code for refusal in refusals(found, made, current, Rules(**rules))]


def test_a_good_fit_is_published_with_errors_only_where_it_measured():
    """What no instance showed keeps its value and an unknown error."""
    found = profile_fit()
    made = draft("p", found, fingerprint="f", sample_count=62, reason="test")

    assert judge(found) == []
    assert made.heldout_median_error == 0.02
    assert made.standard_error.d0_seconds == 1e-4
    assert made.standard_error.p0_seconds == -1.0
    assert made.constants.p0_seconds == A40.p0_seconds


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (
            profile_fit(
                d0_seconds=Constant(value=0.0118, standard_error=math.inf, influence=math.inf)
            ),
            "NOT_IDENTIFIED",
        ),
        (
            profile_fit(d0_seconds=Constant(value=0.0118, standard_error=0.01, influence=math.nan)),
            "NOT_IDENTIFIED",
        ),
        (
            profile_fit(d0_seconds=Constant(value=11.8, standard_error=0.1, influence=0.01)),
            "OUT_OF_BOUNDS",
        ),
        (replace(profile_fit(), heldout={"decode": HeldOut(0.16, 0.3, 12)}), "HELDOUT_ERROR"),
        (replace(profile_fit(), heldout={"decode": HeldOut(0.01, 0.02, 2)}), "HELDOUT_ERROR"),
        (replace(profile_fit(), heldout={}), "HELDOUT_ERROR"),
        (ProfileFit(None, None, None, A40, {}), "NOTHING_MEASURED"),
    ],
)
def test_what_may_not_price_requests_is_refused(found, code):
    """Unidentified constants, impossible values, bad or untested predictions: each has its code."""
    assert code in judge(found)


def test_a_jump_needs_consent_and_only_from_a_calibrated_version():
    """Three times the last measured value is refused once, accepted on demand."""
    current = Constants(profile="p", version=3, constants=replace(A40, d0_seconds=0.0039))
    far = replace(current, constants=replace(A40, p0_seconds=1.0))

    assert judge(profile_fit(), current) == ["JUMP"]
    assert judge(profile_fit(), current, accept_jump=True) == []
    assert judge(profile_fit(), replace(current, uncalibrated=True)) == []
    assert judge(profile_fit(), far) == []


def test_the_published_names_are_those_of_the_engine_model():
    """JSON, Redis and protocol share the names of the engine model's fields."""
    from calibrator.result import constants_fields

    fields = constants_fields(profile_fit())

    assert set(fields) == {n for name in CONSTANT_NAMES for n in (name, f"{name}_stderr")}
    assert fields["d2_seconds_per_kv_token_stderr"] == 2e-9
