"""The pacer on a clock that a test moves."""

from dataclasses import dataclass, field

import pytest
from steelyard_enginekit.paced.pacer import Pacer
from steelyard_enginekit.paced.shape import StepShape

STEP = 0.040
EVERY_GRAIN = 1e-9


@dataclass
class FakeClock:
    """Stands still but for `advance` and `sleep`; `late` is added to the next sleeps, in turn."""

    now: float = 100.0
    late: list[float] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        """The time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move on, and by how late the machine is."""
        self.slept.append(seconds)
        self.now += seconds + (self.late.pop(0) if self.late else 0.0)

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds


def shape(*requests: str) -> StepShape:
    """A decode step of these requests."""
    return StepShape((), len(requests), 100, frozenset(requests))


def pacer(clock: FakeClock) -> Pacer:
    """A pacer as servers have it."""
    return Pacer(clock, carry_seconds=0.003, debt_seconds=0.008)


def step(subject: Pacer, clock: FakeClock, *requests: str, busy: float = 0.002):
    """One step that the machine computes in `busy`."""
    subject.begin(shape(*requests), STEP)
    clock.advance(busy)
    return subject.end()


def test_a_step_lasts_as_long_as_modelled():
    """What computing did not take is waited for."""
    clock = FakeClock()

    done = step(pacer(clock), clock, "a")

    assert clock.slept == [pytest.approx(STEP - 0.002)]
    assert done.real_seconds == pytest.approx(STEP)
    assert done.late_seconds == pytest.approx(0.0, abs=EVERY_GRAIN)
    assert done.busy_seconds == pytest.approx(0.002)
    assert not done.carried


def test_engine_time_between_two_steps_counts_inside_the_second():
    """Steps that follow one another end a modelled time apart, whatever scheduling took."""
    clock = FakeClock()
    subject = pacer(clock)
    step(subject, clock, "a")
    first_end = clock.now

    clock.advance(0.0007)
    done = step(subject, clock, "a")

    assert done.carried
    assert clock.now - first_end == pytest.approx(STEP)
    assert done.real_seconds == pytest.approx(STEP)


def test_a_long_pause_is_carried_only_with_a_request_in_common():
    """A request that was in the last step has been waiting; one that is new came to an idle engine."""
    clock = FakeClock()
    subject = pacer(clock)
    step(subject, clock, "a")
    clock.advance(0.010)
    same = step(subject, clock, "a", "b")
    clock.advance(0.010)
    begun = clock.now
    other = step(subject, clock, "c")

    assert same.carried
    assert not other.carried
    assert clock.now - begun == pytest.approx(STEP)


def test_a_late_step_is_followed_by_a_shorter_wait():
    """Lateness does not add up: the second step is due when it would have been anyway."""
    clock = FakeClock(late=[0.005])
    subject = pacer(clock)
    begun = clock.now
    late = step(subject, clock, "a")
    done = step(subject, clock, "a")

    assert late.late_seconds == pytest.approx(0.005)
    assert clock.now - begun == pytest.approx(2 * STEP)
    assert done.late_seconds == pytest.approx(0.0, abs=EVERY_GRAIN)
    assert done.real_seconds == pytest.approx(STEP - 0.005)


def test_lateness_beyond_the_limit_is_not_made_up_for():
    """After a stall the engine goes on at its pace instead of racing to catch up."""
    clock = FakeClock(late=[0.100])
    subject = pacer(clock)
    step(subject, clock, "a")
    stalled_until = clock.now
    step(subject, clock, "a")

    assert clock.now - stalled_until == pytest.approx(STEP - 0.008)


def test_lateness_is_forgotten_by_an_idle_engine():
    """A request that comes to an idle engine gets no part of an older step's lateness."""
    clock = FakeClock(late=[0.005])
    subject = pacer(clock)
    step(subject, clock, "a")
    clock.advance(1.0)
    begun = clock.now
    step(subject, clock, "b")

    assert clock.now - begun == pytest.approx(STEP)


def test_a_step_that_took_too_long_is_late_and_not_waited_for():
    """Where the machine needs more than the model allows, the record says by how much."""
    clock = FakeClock()

    done = step(pacer(clock), clock, "a", busy=STEP + 0.010)

    assert clock.slept == []
    assert done.late_seconds == pytest.approx(0.010)
    assert done.real_seconds == pytest.approx(STEP + 0.010)
