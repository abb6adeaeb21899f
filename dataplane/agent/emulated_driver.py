"""Runs the clock-free batching engine in real time, faster or slower by a factor."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from dataplane.core.emulation.batching import BatchingEngine
from dataplane.core.emulation.values import Idle, PullNews, Step, StepOutcome
from servicekit.clock import Clock

MAX_TIME_SCALE = 1e9
"""Stands for "as fast as the machine can": a step lasts picoseconds then."""
_MAX_STEPS_PER_WAKE = 16
_MAX_DEBT_SECONDS = 0.02
"""How late, in real time, the driver may be and still catch up with shorter waits. Every wake-up is
a little late; without catching up, every step would be that much longer."""


class Driver:
    """One task that begins and completes steps; everybody else calls in between.

    At high time scales it is always behind: it then takes up to 16 steps before it lets others run,
    so that their tokens travel together and no timer is spent on a token.
    """

    def __init__(
        self,
        engine: BatchingEngine,
        clock: Clock,
        *,
        time_scale: float,
        sleep: Callable[[float], Awaitable[None]],
        on_outcome: Callable[[StepOutcome, Step], None],
        on_news: Callable[[PullNews], None],
    ) -> None:
        """Take over an engine.

        Args:
            engine: Driven by this alone.
            clock: Real time.
            time_scale: Engine seconds a real second; > 0, at most MAX_TIME_SCALE is used.
            sleep: Waits that many real seconds.
            on_outcome: Called after every step.
            on_news: Called when pulls start or are done.
        """
        self._engine = engine
        self._clock = clock
        self._scale = min(time_scale, MAX_TIME_SCALE)
        self._sleep = sleep
        self._on_outcome = on_outcome
        self._on_news = on_news
        self._start_seconds = clock.monotonic()
        self._wake = asyncio.Event()

    @property
    def time_scale(self) -> float:
        """Engine seconds a real second."""
        return self._scale

    def now(self) -> float:
        """Return the engine's time, seconds since the driver was made."""
        return (self._clock.monotonic() - self._start_seconds) * self._scale

    def wake(self) -> None:
        """Make an idle driver look again: something was submitted, freed or has arrived."""
        self._wake.set()

    async def run(self) -> None:
        """Drive until cancelled."""
        begin_seconds = self.now()
        steps_since_wait = 0
        while True:
            self._wake.clear()
            step = self._engine.begin_step(begin_seconds)
            self._pass_news_on()
            if isinstance(step, Idle):
                await self._idle(step)
                begin_seconds, steps_since_wait = self.now(), 0
                continue
            wait_seconds = (step.end_seconds - self.now()) / self._scale
            steps_since_wait += 1
            if wait_seconds > 0:
                await self._sleep(wait_seconds)
                steps_since_wait = 0
            elif steps_since_wait >= _MAX_STEPS_PER_WAKE:
                await asyncio.sleep(0)
                steps_since_wait = 0
            self._on_outcome(self._engine.complete_step(), step)
            self._pass_news_on()
            behind_seconds = self.now() - _MAX_DEBT_SECONDS * self._scale
            begin_seconds = max(step.end_seconds, behind_seconds)

    def _pass_news_on(self) -> None:
        news = self._engine.take_news()
        if news:
            self._on_news(news)

    async def _idle(self, idle: Idle) -> None:
        """Wait until somebody wakes us, at the longest until the engine's next event."""
        if idle.until_seconds is None:
            await self._wake.wait()
            return
        timeout_seconds = max((idle.until_seconds - self.now()) / self._scale, 0.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._wake.wait()
