"""Late binding: what it learns of engines and hand-offs."""

import pytest

from dataplane.core.cluster import Instance
from dataplane.core.events import Cancelled, PrefillDone, TokensStreamed
from dataplane.core.late_binding import LateBinding, LateBindingSettings
from dataplane.core.late_binding.calibration import HandoffTime, Multiplier
from dataplane.core.late_binding.pace import Pace, mean_pace
from enginemodel.model import prefill_seconds
from enginemodel.profiles import REFERENCE
from tests.unit.core.builders import instance, pool, request, starts, wake_at

RTT = 0.003


def late(*engines: Instance | str, **changes: object) -> LateBinding:
    """Return a scheduler over these engines."""
    return LateBinding(pool(*engines), LateBindingSettings(**changes))


def serve(scheduler: LateBinding, count: int, slowness: float, prompt: int = 1000) -> None:
    """Prefill so many prompts one by one on an engine so many times slower than it is told."""
    taken = prefill_seconds(REFERENCE.constants, prompt, 2048) * slowness + RTT
    for i in range(count):
        at = 10.0 * i
        scheduler.submit(request(f"r{i}", prompt=prompt, at=at), at)
        scheduler.observe(PrefillDone(f"r{i}", at + 40.0), at + taken)
        scheduler.observe(Cancelled(f"r{i}"), at + taken + 0.1)


@pytest.mark.parametrize("slowness", [7.4, 1 / 7.4, 1.3])
def test_prefill_constants_are_corrected(slowness: float) -> None:
    """An engine slower or faster than its constants is known for what it is after some prompts."""
    scheduler = late("p0", "d0")

    serve(scheduler, 200, slowness)

    line = scheduler.engines.lines["p0"]
    assert line.multiplier.value == pytest.approx(slowness, rel=0.1)
    assert scheduler.engines.fleet.linear == pytest.approx(
        REFERENCE.constants.p2_seconds_per_token * slowness, rel=0.1
    )


def test_learning_is_a_setting() -> None:
    """Without learning the constants stay as told."""
    scheduler = late("p0", "d0", learn_constants=False)

    serve(scheduler, 20, 3.0)

    assert scheduler.engines.lines["p0"].multiplier.value == 1.0


def test_a_shared_step_is_not_taken_for_a_slow_one() -> None:
    """Prompts done together are compared with the step that they shared, not one by one."""
    scheduler = late("p0", "d0")
    for i in range(60):
        at = 10.0 * i
        names = [f"{i}.{n}" for n in range(4)]
        scheduler.submit(request("busy", prompt=2000, at=at), at)
        for name in names:
            scheduler.submit(request(name, prompt=400, at=at + 0.01), at + 0.01)
        first = at + RTT + prefill_seconds(REFERENCE.constants, 2000, 2048)
        scheduler.observe(PrefillDone("busy", at + 40.0), first)
        line = scheduler.engines.lines["p0"]
        assert len(line.batches) == 1
        batch = RTT + line.batches[0].seconds / line.multiplier.value
        for name in names:
            scheduler.observe(PrefillDone(name, at + 40.0), first + batch)
        for name in ("busy", *names):
            scheduler.observe(Cancelled(name), first + 1.0)

    assert scheduler.engines.lines["p0"].multiplier.value == pytest.approx(1.0, abs=0.02)


def test_cancelled_and_cached_prompts_teach_nothing() -> None:
    """A step that was cut short, or that found its prompt cached, says nothing about the pace."""
    scheduler = late("p0", "d0")
    for i in range(10):
        at = 10.0 * i
        scheduler.submit(request(f"a{i}", prompt=1000, at=at), at)
        scheduler.observe(Cancelled(f"a{i}"), at + 0.005)
        scheduler.submit(request(f"b{i}", prompt=1000, at=at + 1.0), at + 1.0)
        scheduler.observe(PrefillDone(f"b{i}", 40.0, cached_prompt_tokens=900), at + 1.02)
        scheduler.observe(Cancelled(f"b{i}"), at + 2.0)

    assert scheduler.engines.lines["p0"].multiplier.value == 1.0


@pytest.mark.parametrize("slowness", [7.4, 1 / 7.4])
def test_decode_constants_are_corrected(slowness: float) -> None:
    """The gaps between streamed tokens show how long a decode step takes here."""
    scheduler = late("p0", "d0")
    scheduler.submit(request("r", at=0.0), 0.0)
    scheduler.observe(PrefillDone("r", 40.0), 0.02)
    at = 0.05
    for tokens in range(400):
        scheduler.observe(TokensStreamed("r", 1), at)
        constants = REFERENCE.constants
        kv = 101 + tokens
        at += slowness * (
            constants.d0_seconds
            + constants.d1_seconds_per_sequence
            + constants.d2_seconds_per_kv_token * kv
        )

    decoder = scheduler.engines.decoders["d0"]
    assert decoder.multiplier.value == pytest.approx(slowness, rel=0.7)
    assert scheduler.gate.factors[1] == decoder.multiplier.value


def test_one_stall_changes_little() -> None:
    """A single step far off moves a multiplier slowly, a second one to the same side fast."""
    multiplier = Multiplier(slow_gain=0.03, fast_gain=0.2)
    multiplier.observe(10.0, 1.0)
    after_one = multiplier.value
    multiplier.observe(10.0, 1.0)

    assert after_one < 1.05
    assert multiplier.value / after_one > 1.25


def test_the_hand_off_time_is_learned() -> None:
    """Hand-offs slower than assumed leave less time for prefill; without learning they do not."""
    for learn in (True, False):
        scheduler = late("p0", "d0", learn_handoff=learn)
        before = scheduler.handoff.seconds
        pull = scheduler.engines.transfer.seconds(100)
        for i in range(40):
            at = float(i)
            scheduler.submit(request(f"r{i}", at=at), at)
            scheduler.observe(PrefillDone(f"r{i}", at + 40.0), at + 0.02)
            scheduler.observe(TokensStreamed(f"r{i}", 1), at + 0.02 + pull + 0.055)
            scheduler.observe(Cancelled(f"r{i}"), at + 0.5)

        assert scheduler.handoff.seconds == pytest.approx(0.055 if learn else before)


def test_the_hand_off_time_is_a_high_percentile_and_bounded() -> None:
    """Most hand-offs are to be within it, and legs of seconds do not make everybody late."""
    handoff = HandoffTime(0.03)
    for i in range(100):
        handoff.observe(0.02 if i % 5 else 0.06)
    assert handoff.seconds == pytest.approx(0.06)
    for _ in range(128):
        handoff.observe(9.0)
    assert handoff.seconds == pytest.approx(0.18)


def test_a_faster_idle_engine_is_taken_first() -> None:
    """Of idle engines the fastest gets the prompt, by profile and by scale."""
    for slow in (instance("p0", scale=2.0), instance("p0", profile="a40-llama-7b")):
        scheduler = late(slow, "p1", "d0")

        assert starts(scheduler.submit(request("r"), 0.0)) == [("r", "p1")]


def test_each_engine_is_priced_by_its_own_constants() -> None:
    """A slow engine's batch is expected to take longer than the same on a fast one."""
    scheduler = late(instance("p0", scale=2.0), "p1", "d0")
    scheduler.submit(request("a", prompt=1000), 0.0)
    scheduler.submit(request("b", prompt=1000), 0.0)

    slow, fast = (scheduler.engines.lines[name].batches[0].seconds for name in ("p0", "p1"))
    assert slow == pytest.approx(2.0 * fast)


def test_mean_pace_shares_work_by_speed() -> None:
    """Two engines, one three times as slow, together do as much as two of the mean pace."""
    mean = mean_pace([Pace(1.0, 1.0, 1.0, 1.0), Pace(3.0, 3.0, 3.0, 3.0)])

    assert 2.0 / mean.linear == pytest.approx(1.0 + 1.0 / 3.0)


def test_work_is_sent_ahead_by_the_round_trip_that_was_seen() -> None:
    """Where dispatches take 40 ms, an engine gets its next work that much before it is idle."""
    wakes = []
    for learn in (True, False):
        scheduler = late("p0", "d0", learn_round_trip=learn, learn_constants=False)
        at = 0.0
        for i in range(64):
            at += 1.0
            scheduler.submit(request(f"r{i}", prompt=1024, at=at), at)
            done = PrefillDone(f"r{i}", at + 40.0, engine_seconds=0.063)
            scheduler.observe(done, at + 0.063 + 0.04)
            scheduler.observe(Cancelled(f"r{i}"), at + 0.2)
        at += 1.0
        scheduler.submit(request("first", prompt=1024, at=at), at)
        woken = wake_at(scheduler.submit(request("second", prompt=1024, at=at), at))
        assert woken is not None
        wakes.append(woken - at)

    learned, fixed = wakes
    assert 0.01 < fixed - learned < 0.04
