"""The simulation kernel: callbacks in order of virtual time.

Events at the same time run by priority, then in the order they were asked for, so a run repeats
exactly. There is no cancelling: who changes a plan lets the old callback find out that it is stale.
"""

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any, TypeAlias

from simulator.errors import PastEventError

Callback: TypeAlias = Callable[[Any], object]


class Priority(IntEnum):
    """Who goes first at the same moment."""

    ENGINE = 0
    """Step boundaries: what an engine did is known before anybody acts on it."""
    WIRE = 1
    """What arrives over a connection."""
    TIMER = 2
    """What a scheduler asked to be woken for."""
    ARRIVAL = 3
    """New requests."""
    TELEMETRY = 4
    """Snapshots of what is."""


class Kernel:
    """A clock and a heap of (time, priority, sequence, callback, argument)."""

    __slots__ = ("_heap", "_sequence", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._sequence = 0
        self._heap: list[tuple[float, int, int, Callback, Any]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __repr__(self) -> str:
        return f"<Kernel at {self.now:.6f} s, {len(self._heap)} pending, {self.events} done>"

    def at(self, time: float, priority: int, callback: Callback, argument: Any = None) -> None:
        """Call `callback(argument)` at a time, seconds.

        Raises:
            PastEventError: The time is before now.
        """
        if time < self.now:
            raise PastEventError(f"asked for {time} s at {self.now} s")
        self._sequence = sequence = self._sequence + 1
        heappush(self._heap, (time, priority, sequence, callback, argument))

    def run(self, until: float = float("inf")) -> None:
        """Run all events up to and at `until`, or until none is left."""
        heap = self._heap
        done = 0
        while heap and heap[0][0] <= until:
            self.now, _, _, callback, argument = heappop(heap)
            done += 1
            callback(argument)
        self.events += done
        if until != float("inf"):
            self.now = max(self.now, until)
