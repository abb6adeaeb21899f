"""Whole sweeps over emulated engines, in virtual time."""

from dataclasses import replace

import pytest

from calibrator.errors import InstanceLost
from calibrator.profile import predict_prefill
from enginemodel.model import decode_step_seconds, handoff_seconds, prefill_seconds
from enginemodel.profiles import A40_QWEN
from tests.support.virtual_engines import calibrate

PROFILES = [
    A40_QWEN,
    replace(A40_QWEN, name="slow", constants=A40_QWEN.constants.slowed(2.0)),
    replace(A40_QWEN, name="knee", constants=replace(A40_QWEN.constants, p0_seconds=0.02)),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("profile", "budget_seconds", "tolerance"),
    [(profile, 60.0, 0.10) for profile in PROFILES] + [(A40_QWEN, 300.0, 0.05)],
    ids=["a40-60s", "slow-60s", "knee-60s", "a40-300s"],
)
async def test_a_sweep_finds_every_constant_within_its_budget(profile, budget_seconds, tolerance):
    """Jitter, stalls and a slow instance notwithstanding; predictions hold within 5 %."""
    sweep, took_seconds, _ = await calibrate(
        profile, budget_seconds, seed=1, slowness={"decode-2": 1.3}
    )

    found = sweep.found
    assert took_seconds <= budget_seconds + 1.0
    assert set(found.measured) == set(profile.constants.__slots__)
    for name, constant in found.measured.items():
        wanted = getattr(profile.constants, name)
        loose = max(tolerance, 3 * constant.relative_error if tolerance > 0.05 else 0.0)
        assert constant.value == pytest.approx(wanted, rel=loose), name
    assert found.slow_instances == {"decode-2": pytest.approx(1.3, rel=0.03)}
    assert found.heldout["decode"].median < 0.05
    assert found.heldout["prefill"].median < 0.05
    _check_fresh_points(found, profile)


def _check_fresh_points(found, profile):
    """Predicted TTFT and step times are within 5 % of the truth everywhere."""
    true, got, kv = profile.constants, found.constants, profile.kv_bytes_per_token
    for tokens in (20, 150, 700, 3000, 8000):
        wanted = prefill_seconds(true, tokens, 2048) + handoff_seconds(true, tokens, kv)
        ttft = prefill_seconds(got, tokens, 2048) + handoff_seconds(got, tokens, kv)
        assert ttft == pytest.approx(wanted, rel=0.05), tokens
    for sequences, kv_tokens in ((1, 100), (16, 8000), (200, 50_000)):
        step = decode_step_seconds(got, sequences, kv_tokens)
        assert step == pytest.approx(decode_step_seconds(true, sequences, kv_tokens), rel=0.05)


@pytest.mark.asyncio
async def test_a_call_around_each_prompt_is_found_apart_from_the_steps():
    """A server that adds 4 ms to a prompt: steps are known all the same, and predictions hold."""
    sweep, _, _ = await calibrate(A40_QWEN, 300.0, seed=1, call_seconds=0.004, jitter_sigma=0.02)

    found, true = sweep.found, A40_QWEN.constants
    call = found.prefill.call_seconds
    assert call == pytest.approx(0.004, rel=0.1)
    assert found.constants.p0_seconds - call == pytest.approx(true.p0_seconds, rel=0.05)
    assert found.constants.p1_seconds - call == pytest.approx(true.p1_seconds, rel=0.1)
    assert found.constants.p2_seconds_per_token == pytest.approx(
        true.p2_seconds_per_token, rel=0.05
    )
    assert found.heldout["prefill"].median < 0.03


@pytest.mark.asyncio
async def test_an_instance_that_dies_is_left_out_and_named():
    """The others carry the sweep on; what it had begun is measured elsewhere."""
    sweep, _, instruments = await calibrate(A40_QWEN, 15.0, dies_after={"decode-1": 6})

    assert sweep.lost == {"decode-1": "UNAVAILABLE: connection refused"}
    assert instruments["decode-1"].probes == 7
    assert set(sweep.found.measured) == set(A40_QWEN.constants.__slots__)


@pytest.mark.asyncio
async def test_the_last_instance_of_a_side_to_die_ends_the_sweep():
    """Nothing can be said of decode without a decode engine: the error names all of them."""
    with pytest.raises(InstanceLost, match="decode-0: UNAVAILABLE"):
        await calibrate(A40_QWEN, 30.0, decodes=1, dies_after={"decode-0": 3})


@pytest.mark.asyncio
async def test_a_hand_off_that_cannot_be_pulled_is_released():
    """A decode engine that dies at hand-offs leaves no KV held on the prefill engine."""
    sweep, _, instruments = await calibrate(
        A40_QWEN, 20.0, decodes=2, dies_after={"decode-0": 10_000}
    )
    pulls = len(sweep.seen.handoff)

    held = sum(instrument.held for instrument in instruments.values())

    assert held == pulls, "every prefill was pulled exactly once"


@pytest.mark.asyncio
async def test_a_tiny_budget_identifies_nothing_and_says_so():
    """With time for a handful of probes the fit does not pretend to know."""
    sweep, took_seconds, _ = await calibrate(A40_QWEN, 0.5)

    unknown = [
        name
        for name, c in (sweep.found.measured if sweep.found else {}).items()
        if not c.influence <= 0.1
    ]
    assert took_seconds < 3.0
    assert sweep.found is None or unknown or not sweep.seen.decode


@pytest.mark.asyncio
async def test_an_engine_without_noise_is_predicted_almost_exactly():
    """The whole chain, batching included, has no bias of its own."""
    sweep, _, _ = await calibrate(A40_QWEN, 12.0, jitter_sigma=0.0, stall_probability=0.0)

    predicted = predict_prefill(sweep.found, sweep.seen.prefill)
    for point, seconds in zip(sweep.seen.prefill, predicted, strict=True):
        assert seconds == pytest.approx(point.seconds, rel=0.01)
