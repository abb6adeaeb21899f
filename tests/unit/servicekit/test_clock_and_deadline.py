"""The manual clock and deadlines on it."""

import asyncio
import math
import time

import pytest

from servicekit.clock import ManualClock, ScaledClock, SystemClock, clock_at
from servicekit.deadline import Deadline
from servicekit.errors import DeadlineExceeded
from servicekit.tasks import end_tasks


class Context:
    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def time_remaining(self) -> float | None:
        return self._seconds


@pytest.mark.asyncio
async def test_sleepers_wake_in_order_of_their_time():
    """Advancing wakes exactly those whose time has come, earliest first."""
    clock, woken = ManualClock(), []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((seconds, clock.monotonic()))

    async with asyncio.TaskGroup() as group:
        for seconds in (3.0, 1.0, 2.0):
            group.create_task(sleeper(seconds))
        await asyncio.sleep(0)
        start = clock.monotonic()
        await clock.advance(2.5)
        early = list(woken)
        waiting = clock.sleepers
        await clock.advance(1.0)

    assert early == [(1.0, start + 1.0), (2.0, start + 2.0)]
    assert waiting == 1
    assert woken[-1] == (3.0, start + 3.0)


@pytest.mark.asyncio
async def test_a_step_of_the_wall_clock_leaves_the_monotonic_one_alone():
    """Skewing moves unix time only."""
    clock = ManualClock()
    before = (clock.monotonic(), clock.unix())
    clock.skew(-50.0)

    assert (clock.monotonic(), clock.unix()) == (before[0], before[1] - 50.0)


@pytest.mark.asyncio
async def test_a_deadline_shrinks_and_keeps_a_margin_back():
    """The timeout for an outgoing call is what is left less the margin."""
    clock = ManualClock()
    deadline = Deadline.from_context(Context(2.0), clock)
    await clock.advance(0.5)

    assert deadline.timeout(margin_seconds=0.25) == pytest.approx(1.25)
    assert not deadline.passed
    with pytest.raises(DeadlineExceeded):
        deadline.timeout(margin_seconds=1.5)
    await clock.advance(2.0)
    with pytest.raises(DeadlineExceeded):
        deadline.check()


def test_no_deadline_is_no_timeout():
    """A caller without a deadline gives outgoing calls none either."""
    deadline = Deadline.from_context(Context(None), ManualClock())

    assert deadline.timeout() is None
    assert math.isinf(deadline.remaining_seconds())


def test_sooner_takes_the_earlier():
    """A stage's own limit shortens the caller's deadline and never extends it."""
    deadline = Deadline.after(2.0, ManualClock())

    assert deadline.sooner(1.0).remaining_seconds() == pytest.approx(1.0)
    assert deadline.sooner(5.0).remaining_seconds() == pytest.approx(2.0)
    assert deadline.sooner(None) == deadline


@pytest.mark.asyncio
async def test_tasks_end_even_if_one_cancellation_is_swallowed():
    """A task that survives a cancellation is cancelled again until it is done."""
    swallowed = []

    async def stubborn() -> None:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed.append(1)
                if len(swallowed) > 1:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks([task])

    assert task.cancelled()
    assert len(swallowed) == 2


@pytest.mark.asyncio
async def test_a_scaled_clock_counts_by_its_rate():
    """At a rate of 20 a second of the clock passes in a twentieth; the time of day is nobody's to scale."""
    clock = ScaledClock(20.0)
    began, began_real = clock.monotonic(), time.monotonic()
    rang = asyncio.Event()
    clock.call_later(1.0, rang.set)
    await clock.sleep(0.5)
    early = rang.is_set()
    await rang.wait()
    counted, real = clock.monotonic() - began, time.monotonic() - began_real

    assert not early
    assert counted >= 1.0
    assert counted == pytest.approx(20.0 * real, rel=0.02)
    assert clock.unix() == pytest.approx(time.time(), abs=1.0)


@pytest.mark.asyncio
async def test_a_manual_clock_calls_later_in_order_and_not_what_was_cancelled():
    """Work is done when the clock is moved past its time, and never once it was cancelled."""
    clock, done = ManualClock(), []
    clock.call_later(2.0, lambda: done.append("second"))
    clock.call_later(1.0, lambda: done.append("first"))
    clock.call_later(1.5, lambda: done.append("cancelled")).cancel()
    await clock.advance(1.0)
    after_one = list(done)
    await clock.advance(5.0)

    assert after_one == ["first"]
    assert done == ["first", "second"]


def test_a_clock_at_rate_one_is_the_machines():
    """Without a time scale nothing stands between a service and the machine's clock."""
    assert isinstance(clock_at(1.0), SystemClock)
