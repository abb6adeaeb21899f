"""The fit finds constants through noise, and says what it does not know."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrator.fit import fit_decode, fit_handoff, fit_prefill
from calibrator.observations import (
    DecodeObservation,
    HandoffObservation,
    PrefillObservation,
    StepSeen,
    chunks_of,
    middle_mean,
    split_into_steps,
    steady_middle,
    together,
)
from enginemodel.model import (
    EngineConstants,
    decode_step_seconds,
    handoff_seconds,
    prefill_seconds,
)
from enginemodel.profiles import A40_QWEN, H100_QWEN

A40 = A40_QWEN.constants
PROFILES = {
    "a40": A40,
    "twice_as_slow": A40.slowed(2.0),
    "other_knee": EngineConstants(
        **{name: getattr(A40, name) for name in A40.__slots__} | {"p0_seconds": 0.02}
    ),
}


def noisy(seconds: float, rng: Random, *, stall_probability: float = 0.01) -> float:
    """Apply 5 % jitter and, seldom, a stall of 10 to 30 ms."""
    seconds *= math.exp(rng.gauss(0, 0.05))
    return seconds + (rng.uniform(0.01, 0.03) if rng.random() < stall_probability else 0.0)


def prefills(constants, rng, count, slowness=(("p0", 1.0),), *, longest=8191, shortest=8):
    """Observe prompts of log-uniform length."""
    seen = []
    for index in range(count):
        name, factor = slowness[index % len(slowness)]
        tokens = round(math.exp(rng.uniform(math.log(shortest), math.log(longest))))
        steps = chunks_of(tokens, 2048)
        seconds = noisy(factor * prefill_seconds(constants, tokens, 2048), rng)
        seen.append(PrefillObservation(instance_id=name, steps=steps, seconds=seconds))
    return seen


def decodes(constants, rng, count, slowness=(("d0", 1.0),), stall_probability=0.01):
    """Observe batches of log-uniform size and context."""
    seen = []
    for index in range(count):
        name, factor = slowness[index % len(slowness)]
        sequences = round(math.exp(rng.uniform(0, math.log(256))))
        kv_tokens = round(math.exp(rng.uniform(math.log(16 * sequences), math.log(54_000))))
        seconds = factor * decode_step_seconds(constants, sequences, kv_tokens)
        seconds = noisy(seconds, rng, stall_probability=stall_probability)
        seen.append(
            DecodeObservation(
                instance_id=name, sequences=sequences, kv_tokens=kv_tokens, seconds=seconds
            )
        )
    return seen


@pytest.mark.parametrize("name", PROFILES)
def test_prefill_constants_are_found_within_three_errors_and_mostly_within_five_percent(name):
    """p0 to p3 of every profile come out of jitter and stalls, the knee included."""
    true = PROFILES[name]

    found = fit_prefill(prefills(true, Random(1), 1500)).constants

    for constant, got in found.items():
        wanted = getattr(true, constant)
        assert got.relative_error < 0.08, constant
        assert abs(got.value - wanted) < 3.5 * got.standard_error, constant
        if got.relative_error < 0.015:
            assert got.value == pytest.approx(wanted, rel=0.05), constant


@pytest.mark.parametrize("name", PROFILES)
def test_decode_constants_are_found_within_five_percent(name):
    """d0 to d2 of every profile come out of jitter and stalls."""
    true = PROFILES[name]

    found = fit_decode(decodes(true, Random(2), 1500)).constants

    for constant, got in found.items():
        assert got.value == pytest.approx(getattr(true, constant), rel=0.05), constant


def test_a_slow_instance_is_found_and_does_not_move_the_constants():
    """One of four engines is 30 % slower: its scale says so, the profile stays that of the others."""
    slowness = (("d0", 1.0), ("d1", 1.0), ("d2", 1.3), ("d3", 1.0))

    found = fit_decode(decodes(A40, Random(3), 800, slowness))

    assert found.scale["d2"] == pytest.approx(1.3, rel=0.03)
    assert found.scale["d0"] == pytest.approx(1.0, rel=0.03)
    assert found.constants["d0_seconds"].value == pytest.approx(A40.d0_seconds, rel=0.03)


def test_a_fifth_of_wild_outliers_does_not_move_the_fit():
    """Times three to twenty times too long in every fifth point get no weight."""
    rng = Random(4)
    seen = decodes(A40, rng, 500)
    spoilt = [
        DecodeObservation(
            instance_id=o.instance_id,
            sequences=o.sequences,
            kv_tokens=o.kv_tokens,
            seconds=o.seconds * (rng.uniform(3, 20) if index % 5 == 0 else 1),
        )
        for index, o in enumerate(seen)
    ]

    found = fit_decode(spoilt)

    assert found.outliers >= 95
    for constant, got in found.constants.items():
        assert got.value == pytest.approx(getattr(A40, constant), rel=0.08), constant


def test_what_a_call_adds_is_told_from_what_steps_take():
    """Prompts alone hold a call, gaps between steps do not: p0 and p1 hold one call, known by itself."""
    rng, call = Random(8), 0.003
    alone = [replace(o, seconds=o.seconds + call) for o in prefills(A40, rng, 300)]
    gaps = [replace(o, called=False) for o in prefills(A40, rng, 150, longest=2048)]

    found = fit_prefill(alone + gaps)

    assert found.call_seconds == pytest.approx(call, abs=3 * found.call_error)
    assert found.call_error < 0.15 * call
    for name in ("p0_seconds", "p1_seconds"):
        got = found.constants[name]
        step_alone = got.value - found.call_seconds
        assert step_alone == pytest.approx(getattr(A40, name), abs=4 * got.standard_error), name
    for name in ("p2_seconds_per_token", "p3_seconds_per_token_squared"):
        got = found.constants[name]
        assert abs(got.value - getattr(A40, name)) < 3.5 * got.standard_error, name


def test_a_call_is_not_invented():
    """Where gaps take what steps alone take, and where there are no gaps, a call adds nothing."""
    rng = Random(9)
    alone = prefills(A40, rng, 300)
    gaps = [replace(o, called=False) for o in prefills(A40, rng, 150, longest=2048)]

    assert fit_prefill(alone + gaps).call_seconds < 2e-4
    assert fit_prefill(alone).call_seconds == 0.0


def test_an_engine_without_a_floor_gets_none():
    """Where short prompts follow the line, p0 equals p1 rather than something invented."""
    line = EngineConstants(
        **{name: getattr(A40, name) for name in A40.__slots__} | {"p0_seconds": 0.0}
    )

    found = fit_prefill(prefills(line, Random(5), 800)).constants

    assert found["p0_seconds"].value == found["p1_seconds"].value
    assert found["p1_seconds"].value == pytest.approx(line.p1_seconds, rel=0.05)


def test_a_floor_nobody_looked_below_is_not_identified():
    """Without short prompts p0 is unknown, whatever value it has."""
    found = fit_prefill(prefills(A40, Random(6), 300, shortest=300)).constants

    assert found["p0_seconds"].standard_error == math.inf


def test_one_batch_size_does_not_identify_what_a_sequence_costs():
    """Points that vary in nothing leave infinite or useless errors, not false certainty."""
    same = [
        DecodeObservation(instance_id="d", sequences=8, kv_tokens=800, seconds=0.0123)
        for _ in range(30)
    ]

    found = fit_decode(same).constants

    assert max(constant.influence for constant in found.values()) > 0.1


def test_handoff_constants_are_found_beside_the_decode_step():
    """h0 and the bandwidth come out of times that hold a decode step as well."""
    rng, seen, steps = Random(7), [], []
    for _ in range(600):
        tokens = rng.randint(16, 8000)
        step = decode_step_seconds(A40, 1, tokens)
        moved = handoff_seconds(A40, tokens, 36_864)
        seen.append(
            HandoffObservation(
                prefill_instance_id="p",
                decode_instance_id="d",
                prompt_tokens=tokens,
                seconds=moved + noisy(step, rng),
            )
        )
        steps.append(step)

    found = fit_handoff(seen, steps, 36_864).constants

    assert found["h0_seconds"].value == pytest.approx(A40.h0_seconds, rel=0.05)
    assert found["handoff_bytes_per_second"].value == pytest.approx(4e9, rel=0.05)


@settings(max_examples=25, deadline=None)
@given(
    d0=st.floats(1e-3, 0.1),
    d1=st.floats(1e-6, 1e-3),
    d2=st.floats(1e-9, 1e-6),
    seed=st.integers(0, 1000),
)
def test_any_decode_constants_come_back_without_noise(d0, d1, d2, seed):
    """Exact observations give the constants back exactly enough to predict with."""
    true = EngineConstants(
        **{name: getattr(A40, name) for name in A40.__slots__}
        | {"d0_seconds": d0, "d1_seconds_per_sequence": d1, "d2_seconds_per_kv_token": d2}
    )
    rng = Random(seed)
    points = [(float(rng.randint(1, 256)), float(rng.randint(256, 60_000))) for _ in range(60)]
    seen = [
        DecodeObservation(
            instance_id="d", sequences=b, kv_tokens=kv, seconds=decode_step_seconds(true, b, kv)
        )
        for b, kv in points
    ]

    found = fit_decode(seen).constants
    back = EngineConstants(
        **{name: getattr(A40, name) for name in A40.__slots__}
        | {name: constant.value for name, constant in found.items()}
    )

    for b, kv in points:
        wanted = decode_step_seconds(true, b, kv)
        assert decode_step_seconds(back, b, kv) == pytest.approx(wanted, rel=0.01)


@settings(max_examples=15, deadline=None)
@given(
    profile=st.sampled_from([A40_QWEN, H100_QWEN]), factor=st.floats(0.2, 20), seed=st.integers()
)
def test_the_fit_follows_the_unit_of_time(profile, factor, seed):
    """Engines `factor` times slower give constants `factor` times larger."""
    seen = prefills(profile.constants, Random(seed), 200)
    scaled = [
        PrefillObservation(instance_id=o.instance_id, steps=o.steps, seconds=o.seconds * factor)
        for o in seen
    ]

    before, after = fit_prefill(seen).constants, fit_prefill(scaled).constants

    assert after["p2_seconds_per_token"].value == pytest.approx(
        factor * before["p2_seconds_per_token"].value, rel=0.02
    )


def test_prompts_that_finish_together_shared_a_step():
    """Completions 1 ms apart are one step, those a step later another."""
    steps = split_into_steps([100, 200, 300], [0.013, 0.041, 0.040], 0.0125)

    assert [(shape.tokens, round(seconds, 3)) for shape, seconds in steps] == [
        (100, 0.013),
        (500, 0.027),
    ]
    assert steps[1][0] == together([200, 300])


def test_smeared_completions_tell_nothing():
    """Where answers trickle in, or two steps would be closer than a step can be, nothing is said."""
    assert split_into_steps([100] * 4, [0.013, 0.016, 0.019, 0.022], 0.0125) == []
    assert split_into_steps([100] * 2, [0.013, 0.018], 0.0125) == []


def test_only_steps_of_the_whole_steady_batch_count():
    """Steps at which others joined, or with fewer sequences, are dropped; stalls do not weigh."""
    steps = [StepSeen(0.2, 3, 30, unsteady=True), StepSeen(0.1, 4, 40, unsteady=True)]
    steps += [StepSeen(0.010, 4, 44, unsteady=False) for _ in range(12)]
    steps += [StepSeen(0.500, 4, 48, unsteady=False), StepSeen(0.010, 2, 20, unsteady=False)]

    seen = steady_middle("d", steps, 4, held_out=False)

    assert seen is not None
    assert seen.seconds == pytest.approx(0.010)
    assert steady_middle("d", steps[:4], 4, held_out=False) is None


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=40))
def test_the_middle_mean_lies_within_the_values(values):
    """It never leaves the range of what it averages."""
    assert min(values) - 1e-12 <= middle_mean(values) <= max(values) + 1e-12
