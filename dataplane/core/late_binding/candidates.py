"""Those on time, in the order in which they are to be sent, kept while a batch is put together."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import TypeAlias

from dataplane.core.late_binding.pace import Pace
from dataplane.core.late_binding.queue import WaitQueue
from dataplane.core.late_binding.waiting import Lane, Waiting

_LAST = 1e3
# Order, sequence, prefill time in seconds, whether it goes last, request, lane.
Entry: TypeAlias = tuple[float, int, float, bool, Waiting, Lane]


class Candidates:
    """One request a lane, the first that can still be on time, by laxity plus weighed cost.

    A batch is filled one prompt at a time; between two prompts only the lane of the one that was
    sent, and lanes whose head has become late by it, are looked at again.
    """

    def __init__(self, queue: WaitQueue, *, by_laxity: bool) -> None:
        self._queue = queue
        self._by_laxity = by_laxity
        self._entries: list[Entry] | None = None
        self._pace: Pace | None = None
        self._weight = 0.0

    def forget(self) -> None:
        """Forget the order: time has passed, or the queue has changed otherwise than by sending."""
        self._entries = None

    def ordered(
        self, pace: Pace, weight: float, start_by: float, urgent_seconds: float
    ) -> Iterator[tuple[float, float, Waiting]]:
        """Yield prefill time, laxity (seconds) and request, first to be sent first.

        Args:
            pace: Of the engine.
            weight: Of a prompt's own prefill time in the order.
            start_by: Now, and what passes before and after a prompt's own prefill.
            urgent_seconds: Those with less laxity go behind all others.
        """
        entries = self._entries
        if entries is None or pace is not self._pace or weight != self._weight:
            self._pace, self._weight = pace, weight
            found = [
                self._entry(lane, pace, start_by, urgent_seconds)
                for lane in self._queue.on_time.values()
            ]
            entries = self._entries = sorted(entry for entry in found if entry is not None)
        position = 0
        while position < len(entries):
            _, _, cost, last, item, lane = entries[position]
            laxity = item.deadline - cost - start_by
            if item.lane is lane and laxity >= (0.0 if last else urgent_seconds):
                yield cost, laxity, item
                position += 1
                continue
            del entries[position]
            entry = self._entry(lane, pace, start_by, urgent_seconds)
            if entry is not None:
                place = bisect_left(entries, entry)
                entries.insert(place, entry)
                position = min(position, place)

    def _entry(
        self, lane: Lane, pace: Pace, start_by: float, urgent_seconds: float
    ) -> Entry | None:
        last = False
        found = _in_time(lane, pace, start_by, urgent_seconds)
        if found is None and urgent_seconds > 0.0:
            found, last = _in_time(lane, pace, start_by, 0.0), True
        if found is None:
            return None
        cost, item = found
        if not self._by_laxity:
            order = item.request.arrived_at
        else:
            order = item.deadline + (self._weight - 1.0) * cost
        return (order + _LAST if last else order, item.sequence, cost, last, item, lane)


def _in_time(
    lane: Lane, pace: Pace, start_by: float, least_seconds: float
) -> tuple[float, Waiting] | None:
    """Return prefill time and request of the first in a lane with that much laxity."""
    item = lane.first_from(start_by + least_seconds)
    for _ in range(2):
        if item is None:
            return None
        cost = pace.prompt_seconds(item.request.prompt_tokens)
        missing = start_by + least_seconds - (item.deadline - cost)
        if missing <= 0.0:
            return cost, item
        # The engine is slower than was thought on submission.
        item = lane.first_from(item.latest_start + missing)
    return None
