"""Time as a dependency: what waits or measures takes a `Clock` and is tested with a `ManualClock`."""

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Where a service gets its time from."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start, never going back."""
        ...

    def unix(self) -> float:
        """Return seconds since 1970, as this machine believes."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; at once where they are not positive."""
        ...

    def call_later(self, seconds: float, work: Callable[[], object]) -> "Timer":
        """Have the running loop call `work` after `seconds`, unless it is cancelled before."""
        ...


class Timer(Protocol):
    """Work that is to be done later."""

    def cancel(self) -> None:
        """Leave it undone; nothing happens where it was done already."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start, never going back."""
        return time.monotonic()

    def unix(self) -> float:
        """Return seconds since 1970, as this machine believes."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; at once where they are not positive."""
        await asyncio.sleep(seconds)

    def call_later(self, seconds: float, work: Callable[[], object]) -> Timer:
        """Have the running loop call `work` after `seconds`, unless it is cancelled before."""
        return asyncio.get_running_loop().call_later(seconds, work)


class ScaledClock:
    """Counts `rate` seconds while one passes; the time of day stays what it is.

    For clusters whose engines are slowed (or quickened) by a factor: who lives by this clock sees
    engines at their own pace, so that targets, constants, intervals and limits need no change.

    Args:
        rate: > 0; a third where engines take three times as long.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def monotonic(self) -> float:
        """Return counted seconds since an arbitrary start, never going back."""
        return time.monotonic() * self.rate

    def unix(self) -> float:
        """Return seconds since 1970, as this machine believes; not scaled, for others read it."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds` by this clock; at once where they are not positive."""
        await asyncio.sleep(seconds / self.rate)

    def call_later(self, seconds: float, work: Callable[[], object]) -> Timer:
        """Have the running loop call `work` after `seconds` by this clock."""
        return asyncio.get_running_loop().call_later(seconds / self.rate, work)


def clock_at(rate: float) -> Clock:
    """Return a clock that counts `rate` seconds while one passes."""
    return SystemClock() if rate == 1.0 else ScaledClock(rate)


class ManualClock:
    """A clock that stands still until `advance` moves it; sleepers wake in order of their time."""

    def __init__(self, monotonic: float = 1_000.0, unix: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._unix_offset = unix - monotonic
        self._sequence = 0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def __repr__(self) -> str:
        """Show where the clock stands and who waits."""
        return f"ManualClock(monotonic={self._monotonic}, sleepers={len(self._sleepers)})"

    def monotonic(self) -> float:
        """Return where the clock stands, seconds."""
        return self._monotonic

    def unix(self) -> float:
        """Return the wall clock's time, seconds since 1970; moves with `advance`."""
        return self._monotonic + self._unix_offset

    def skew(self, seconds: float) -> None:
        """Move the wall clock alone, as a step of NTP does."""
        self._unix_offset += seconds

    @property
    def sleepers(self) -> int:
        """How many tasks wait in `sleep`."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has moved the clock by `seconds`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future = asyncio.get_running_loop().create_future()
        self._sequence += 1
        heapq.heappush(self._sleepers, (self._monotonic + seconds, self._sequence, future))
        await future

    def call_later(self, seconds: float, work: Callable[[], object]) -> Timer:
        """Call `work` once `advance` has moved the clock by `seconds`, unless cancelled before."""
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: None if done.cancelled() else work())
        self._sequence += 1
        heapq.heappush(self._sleepers, (self._monotonic + seconds, self._sequence, future))
        return _Pending(future)

    async def advance(self, seconds: float) -> None:
        """Move the clock; whoever's time has come runs before this returns to its caller."""
        end = self._monotonic + seconds
        while self._sleepers and self._sleepers[0][0] <= end:
            wake_time, _, future = heapq.heappop(self._sleepers)
            self._monotonic = max(self._monotonic, wake_time)
            if not future.done():
                future.set_result(None)
            await _settle()
        self._monotonic = end
        await _settle()


class _Pending:
    """A timer of a clock that is moved by hand."""

    def __init__(self, future: "asyncio.Future[None]") -> None:
        self._future = future

    def cancel(self) -> None:
        self._future.cancel()


async def _settle() -> None:
    """Let tasks that were woken run up to their next wait."""
    for _ in range(5):
        await asyncio.sleep(0)
