"""Waiting to a fraction of a millisecond.

asyncio on Linux waits with epoll, in whole milliseconds, rounded up: an emulated step of 12 ms would
take 12 or 13. A timerfd wakes the loop where it should, for the price of one system call.
"""

import asyncio
import ctypes
import os
import sys

_TFD_NONBLOCK = 0o4000
_TFD_CLOEXEC = 0o2000000
_CLOCK_MONOTONIC = 1
_SHORTEST_SECONDS = 1e-6
"""A timerfd set to zero is disarmed."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class FineTimer:
    """Sleeps for one task at a time; elsewhere than on Linux it is `asyncio.sleep`."""

    def __init__(self) -> None:
        self._fd = -1
        self._waiter: asyncio.Future[None] | None = None
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._fired)

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`.

        Raises:
            RuntimeError: another task is sleeping on this timer.
        """
        if self._fd < 0:
            await asyncio.sleep(seconds)
            return
        if self._waiter is not None:
            raise RuntimeError("a task is sleeping on this timer already")
        self._set(max(seconds, _SHORTEST_SECONDS))
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        """Give the timer back."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _set(self, seconds: float) -> None:
        nanoseconds = round(seconds * 1e9)
        spec = _TimerSpec()
        spec.value.seconds, spec.value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        if self._libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
