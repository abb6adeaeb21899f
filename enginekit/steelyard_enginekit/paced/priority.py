"""The engine's thread comes first where the machine lets it; and how long it had to wait for a core."""

import contextlib
import os
import sys
from pathlib import Path
from typing import BinaryIO

from steelyard_enginekit.paced.settings import PaceSettings


def raise_priority(settings: PaceSettings) -> None:
    """Ask for it, for this thread and this session; whoever may not goes on as before."""
    sys.setswitchinterval(settings.switch_seconds)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, settings.niceness)
    # Niceness counts only inside a session where the kernel groups by session.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(settings.autogroup), encoding="ascii")


class QueueWait:
    """How long the thread that made it has been ready to run without a core."""

    def __init__(self) -> None:
        self._file = self._open()
        self._seen_seconds = self._total()

    @staticmethod
    def _open() -> BinaryIO | None:
        try:
            return Path("/proc/thread-self/schedstat").open("rb", buffering=0)
        except OSError:
            return None

    def _total(self) -> float:
        if self._file is None:
            return 0.0
        self._file.seek(0)
        return int(self._file.read().split()[1]) / 1e9

    def since_last(self) -> float:
        """Return seconds since the last call; 0 where the kernel does not tell."""
        before, self._seen_seconds = self._seen_seconds, self._total()
        return self._seen_seconds - before
