"""Who uses this machine: a run's own processes, or something else."""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from localcluster.pace_check import MachineLoad

_PROC = Path("/proc")
_PREFERRED_WEIGHT = -10
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def prefer(pid: int) -> None:
    """Give a process's session more of the machine than others, where the kernel and our rights allow.

    Engines that are paced do so themselves; services between them that wait for the processor
    would make the engines' pace irrelevant.
    """
    with contextlib.suppress(OSError):
        (_PROC / str(pid) / "autogroup").write_text(str(_PREFERRED_WEIGHT), "ascii")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of cores' time since the machine started, or since each process did.

    Attributes:
        working: User and system time of everybody, and what a hypervisor took. Interrupts belong
            to nobody and are left out.
        own: By process of the run, with its children that have ended.
    """

    working: float
    own: Mapping[int, float]


def load_between(before: CpuTimes, after: CpuTimes, seconds: float, cores: int) -> MachineLoad:
    """Return who used the machine between two readings.

    A process that is new in the second one counts whole; what one that has ended used stands with
    its parent there.
    """
    own = max(0.0, sum(after.own.values()) - sum(before.own.values()))
    available = max(seconds * cores, 1e-9)
    other = max(0.0, after.working - before.working - own)
    return MachineLoad(
        seconds=seconds, cores=cores, own_share=own / available, other_share=other / available
    )


class MachineWatch:
    """`async with MachineWatch() as watch:`; `watch.load` says what happened inside the block.

    Args:
        root_pid: The run is this process and all that descend from it; the caller by default.
    """

    def __init__(self, root_pid: int | None = None) -> None:
        self._root_pid = os.getpid() if root_pid is None else root_pid
        self._before = CpuTimes(0.0, {})
        self._began = 0.0
        self.load: MachineLoad | None = None

    async def __aenter__(self) -> Self:
        """Begin to watch."""
        self._before = await asyncio.to_thread(read_cpu_times, self._root_pid)
        self._began = time.monotonic()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Sum up."""
        self.load = await self.so_far()

    async def so_far(self) -> MachineLoad:
        """Return what has happened since the block began."""
        now = await asyncio.to_thread(read_cpu_times, self._root_pid)
        seconds = time.monotonic() - self._began
        return load_between(self._before, now, seconds, os.cpu_count() or 1)


def read_cpu_times(root_pid: int) -> CpuTimes:
    """Read /proc for the machine and for the processes that descend from `root_pid`."""
    user, nice, system, _idle, _wait, _irq, _softirq, steal = map(
        int, (_PROC / "stat").read_text("ascii").split(maxsplit=9)[1:9]
    )
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text("utf-8", errors="replace")
        except OSError:
            continue  # it has ended since
        fields = text.rpartition(")")[2].split()
        parents[int(entry.name)] = int(fields[1])
        spent[int(entry.name)] = sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
    own = descendants(parents, root_pid)
    return CpuTimes(
        working=(user + nice + system + steal) / _TICKS_PER_SECOND,
        own={pid: spent[pid] for pid in own if pid in spent},
    )


def descendants(parents: Mapping[int, int], root_pid: int) -> set[int]:
    """Return a process and all that descend from it, given everybody's parent."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [root_pid]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found
