"""Child processes that never outlive us, even when we are killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_BIND = (
    "import ctypes, os, sys\n"
    "parent, number = int(sys.argv[1]), int(sys.argv[2])\n"
    "ctypes.CDLL(None).prctl(1, number)\n"
    "os.getppid() == parent or sys.exit(1)\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)
"""PR_SET_PDEATHSIG, then exec; exits where the parent died before the signal was armed."""


def bound_to_parent(command: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """Wrap a command so that the kernel signals it when the starting thread ends.

    A wrapper process rather than `preexec_fn`, which is not safe in a process with threads (gRPC
    has some). The signal comes when the *thread* that starts it ends: start from the main thread.
    The child keeps the wrapper's process id.
    """
    return [sys.executable, "-ISc", _BIND, str(os.getpid()), str(int(number)), *command]


def end_group(process: subprocess.Popen[bytes], grace_seconds: float = 5.0) -> int:
    """End a child started with `start_new_session=True`, and its own children; returns its code.

    SIGTERM first, SIGKILL for the whole group after the grace.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


async def end_group_async(process: asyncio.subprocess.Process, grace_seconds: float = 5.0) -> int:
    """As `end_group`, for a child of asyncio."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await process.wait()
    finally:  # also where we are cancelled: nobody else will end it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return await process.wait()
