"""Engines that change their pace are flagged; steady traffic is not."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.drift import DriftWatch
from controlplane.core.drift_detector import ShiftDetector
from controlplane.core.drift_rls import Recursion
from controlplane.core.values import Constants
from enginemodel.model import decode_step_seconds, prefill_seconds
from enginemodel.profiles import A40_QWEN
from tests.support.drifting_traffic import Traffic

PUBLISHED = Constants(profile="a40", version=1, constants=A40_QWEN.constants)
MINUTE = 60.0


def feed_prefill(watch: DriftWatch, name: str, heard) -> bool:
    """Tell the watch of one prompt."""
    return watch.prefilled(
        name, "a40", tokens=heard.tokens, chunk_tokens=2048, seconds=heard.seconds, now=heard.now
    )


def feed_decode(watch: DriftWatch, name: str, heard) -> bool:
    """Tell the watch of one generation."""
    return watch.decoded(
        name,
        "a40",
        sequences=heard.sequences,
        kv_tokens=heard.kv_tokens,
        seconds=heard.seconds,
        now=heard.now,
    )


def watching() -> DriftWatch:
    """Return a watch of the calibrated profile."""
    watch = DriftWatch()
    watch.calibrated(PUBLISHED)
    return watch


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_prefill_engine_that_turns_40_percent_slower_is_flagged_within_a_minute(seed):
    """The alarm comes within 60 s of traffic, names the instance and the factor."""
    watch = watching()

    for heard in Traffic(A40_QWEN, seed=seed, slow_from=5 * MINUTE).prefills(7 * MINUTE, 5.0):
        if feed_prefill(watch, "p0", heard):
            break

    (drift,) = watch.drifting
    assert (drift.instance_id, drift.part) == ("p0", "prefill")
    assert 5 * MINUTE < drift.since_unix_seconds < 6 * MINUTE
    assert drift.ratio == pytest.approx(1.4, rel=0.1)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_decode_engine_that_turns_40_percent_slower_is_flagged_within_a_minute(seed):
    """Time per token against the reported batch shows it as well."""
    watch = watching()

    for heard in Traffic(A40_QWEN, seed=seed, slow_from=3 * MINUTE).decodes(5 * MINUTE, 4.0):
        if feed_decode(watch, "d0", heard):
            break

    (drift,) = watch.drifting
    assert (drift.instance_id, drift.part) == ("d0", "decode")
    assert 3 * MINUTE < drift.since_unix_seconds < 4 * MINUTE
    assert drift.ratio == pytest.approx(1.4, rel=0.1)


def test_30_minutes_of_steady_traffic_raise_no_alarm():
    """Jitter, stalls and batching are no drift, on either side."""
    watch = watching()

    for heard in Traffic(A40_QWEN, seed=7).prefills(30 * MINUTE, 6.0):
        assert not feed_prefill(watch, "p0", heard)
    for heard in Traffic(A40_QWEN, seed=8).decodes(30 * MINUTE, 1.5):
        assert not feed_decode(watch, "d0", heard)

    assert watch.drifting == []
    assert watch.proposals() == {}


def test_one_slow_instance_changes_its_scale_and_not_the_profile():
    """Three engines of four keep the constants; the fourth gets the factor."""
    watch = watching()
    rng = Random(1)
    for step in range(400):
        for index in range(4):
            slow = 1.4 if index == 3 and step > 100 else 1.0
            sequences, kv_tokens = rng.randint(1, 100), rng.randint(500, 40_000)
            seconds = decode_step_seconds(A40_QWEN.constants, sequences, kv_tokens) * slow
            watch.decoded(
                f"d{index}",
                "a40",
                sequences=sequences,
                kv_tokens=kv_tokens,
                seconds=seconds * rng.lognormvariate(0, 0.03),
                now=float(step),
            )

    proposed = watch.proposals()["a40"]

    assert [drift.instance_id for drift in watch.drifting] == ["d3"]
    assert proposed.instance_scale["d3"] == pytest.approx(1.4, rel=0.05)
    assert proposed.instance_scale["d0"] == pytest.approx(1.0, rel=0.05)
    assert proposed.constants.d0_seconds == pytest.approx(A40_QWEN.constants.d0_seconds, rel=0.05)
    assert "400" in proposed.reason or "finished requests" in proposed.reason


def test_a_whole_profile_that_slows_changes_the_constants():
    """When all engines of a profile slow, the proposal carries the new constants, not scales."""
    watch = watching()
    rng = Random(2)
    for step in range(900):
        for name in ("p0", "p1"):
            tokens = rng.randint(16, 4000)
            slow = 1.4 if step > 100 else 1.0
            seconds = prefill_seconds(A40_QWEN.constants, tokens, 2048) * slow
            watch.prefilled(
                name,
                "a40",
                tokens=tokens,
                chunk_tokens=2048,
                seconds=seconds * rng.lognormvariate(0, 0.05),
                now=float(step),
            )

    proposed = watch.proposals()["a40"]

    assert len(watch.drifting) == 2
    assert proposed.instance_scale["p0"] == pytest.approx(1.0, rel=0.05)
    for tokens in (50, 1000, 4000):
        wanted = 1.4 * prefill_seconds(A40_QWEN.constants, tokens, 2048)
        assert prefill_seconds(proposed.constants, tokens, 2048) == pytest.approx(wanted, rel=0.05)


def test_a_new_version_begins_anew_and_a_return_to_the_old_pace_clears_the_flag():
    """Publication forgets old alarms; an engine that recovers is no drift any more."""
    watch = watching()
    seconds = decode_step_seconds(A40_QWEN.constants, 8, 4000)

    def run(factor: float) -> None:
        for step in range(60):
            watch.decoded(
                "d0", "a40", sequences=8, kv_tokens=4000, seconds=seconds * factor, now=float(step)
            )

    run(1.0)
    run(1.5)
    assert watch.drifting
    run(1.0)
    assert not watch.drifting
    run(1.5)
    assert watch.drifting
    watch.calibrated(replace(PUBLISHED, version=2))
    assert not watch.drifting


def test_profiles_that_nobody_calibrated_are_not_watched():
    """Against built-in constants everything would look like drift."""
    watch = DriftWatch()
    watch.calibrated(replace(PUBLISHED, version=0, uncalibrated=True))

    for step in range(100):
        watch.decoded("d0", "a40", sequences=1, kv_tokens=10, seconds=1.0, now=float(step))

    assert watch.drifting == []


@settings(max_examples=30, deadline=None)
@given(sigma=st.floats(0.01, 0.3), bias=st.floats(-0.15, 0.15), seed=st.integers(0, 10_000))
def test_noise_alone_is_no_shift(sigma, bias, seed):
    """Residuals of any spread around a small bias never alarm in a thousand requests."""
    rng, detector = Random(seed), ShiftDetector()

    for _ in range(1000):
        detector.observe(rng.gauss(bias, sigma))

    assert detector.shift is None


@settings(max_examples=30, deadline=None)
@given(sigma=st.floats(0.01, 0.15), seed=st.integers(0, 10_000))
def test_a_shift_of_40_percent_is_seen_within_60_requests(sigma, seed):
    """Either way, whatever the noise up to 15 %."""
    rng = Random(seed)
    for sign in (1, -1):
        detector = ShiftDetector()
        for _ in range(200):
            detector.observe(rng.gauss(0, sigma))
        for _ in range(60):
            detector.observe(sign * math.log(1.4) + rng.gauss(0, sigma))

        assert detector.shift is not None


def test_the_recursion_finds_which_constant_changed():
    """When only the cost of KV doubles, only its multiplier moves."""
    rng, learned = Random(3), Recursion(3)
    for _ in range(3000):
        shares = np.array([rng.uniform(0.2, 1.0), rng.uniform(0, 0.5), rng.uniform(0, 0.5)])
        shares /= shares.sum()
        learned.observe(shares, float(shares @ [1.0, 1.0, 2.0]) * rng.lognormvariate(0, 0.02))

    assert learned.theta[2] == pytest.approx(2.0, rel=0.15)
    assert learned.theta[1] == pytest.approx(1.0, rel=0.15)
