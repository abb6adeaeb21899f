"""The queue of a pool: who is on time by lanes of equals, who is late by class, in order of age.

A decision looks at the head of each lane, not at each request: a lane holds prompts of one half
octave of length and TPOT targets of one quarter octave, and what may go to the same instances, so
that those behind its head would neither be much cheaper nor find room where the head does not.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import ceil, floor, isfinite, log2

from dataplane.core.late_binding.pace import Pace
from dataplane.core.late_binding.waiting import Lane, LaneName, Waiting
from dataplane.core.request import Request

_LATE_HEADS = 9
_SLOTS_PER_OCTAVE = 32
_OVERHEAD_SECONDS = 0.002
_MOST_MOVES = 256


class WaitQueue:
    """Requests waiting for prefill."""

    def __init__(self) -> None:
        self.on_time: dict[LaneName, Lane] = {}
        self.late: dict[LaneName, Lane] = {}
        self.size = 0
        self.on_time_count = 0
        self._tokens = 0
        self._squares = 0
        self._slots: dict[float, list[int]] = {}
        self._order: list[float] = []

    def __len__(self) -> int:
        return self.size

    @property
    def late_count(self) -> int:
        """Those given up as late."""
        return self.size - self.on_time_count

    def __repr__(self) -> str:
        return f"<WaitQueue {self.on_time_count} on time, {self.late_count} late>"

    def add(self, item: Waiting) -> None:
        """Take in a request as on time."""
        tokens = item.request.prompt_tokens
        key = _key(item.request)
        lane = self.on_time.get(key)
        if lane is None:
            lane = self.on_time[key] = Lane(key, ceil(2.0 ** (key[0] / 2.0)))
        lane.add(item.latest_start, item)
        self.size += 1
        self.on_time_count += 1
        self._count(item, tokens)

    def waits_behind(self, request: Request, *, late: bool) -> bool:
        """Tell whether a request would come in behind others whom a decision looks at first."""
        if late:
            lane = self.late.get(_late_key(request))
            return lane is not None and lane.live >= _LATE_HEADS
        return _key(request) in self.on_time

    def add_late(self, item: Waiting) -> None:
        """Take in a request as late, or move one there that was on time."""
        if item.lane is not None:
            self.remove(item)
        item.doomed = True
        name = _late_key(item.request)
        lane = self.late.get(name)
        if lane is None:
            lane = self.late[name] = Lane(name)
        lane.add(item.request.arrived_at, item)
        self.size += 1

    def remove(self, item: Waiting) -> None:
        """Take a request out; one that is not in here is ignored."""
        lane = item.lane
        if lane is None:
            return
        lane.remove(item)
        self.size -= 1
        if item.doomed:
            if not lane.live:
                del self.late[lane.name]
            return
        self.on_time_count -= 1
        if not lane.live:
            del self.on_time[lane.name]
        self._discount(item, item.request.prompt_tokens)

    def give_up(self, before: float) -> None:
        """Move to the late those whose latest start lies before a time; some, where it is many."""
        left = _MOST_MOVES
        for lane in list(self.on_time.values()):
            item = lane.first()
            while item is not None and item.latest_start < before and left:
                self.add_late(item)
                left -= 1
                item = lane.first()

    def behind(self, start_by: float) -> Iterator[Waiting]:
        """Yield lane heads that are behind but not given up, then the oldest of the late."""
        for lane in self.on_time.values():
            item = lane.first()
            if item is not None and item.latest_start < start_by:
                yield item
        for lane in self.late.values():
            yield from lane.heads(_LATE_HEADS)

    def most_overdue(self, now: float) -> Waiting | None:
        """Return who waits longest beyond the time it may overtake from, in shares of that time."""
        chosen, most = None, 1.0
        for lane in self.late.values():
            item = lane.first()
            if item is None:
                continue
            arrived = item.request.arrived_at
            overdue = (now - arrived) / max(1e-9, item.due_by - arrived)
            if overdue > most:
                chosen, most = item, overdue
        return chosen

    def items(self) -> Iterator[Waiting]:
        """Yield every request waiting."""
        for lane in (*self.on_time.values(), *self.late.values()):
            yield from lane.heads(lane.live)

    def mean_prompt_seconds(self, pace: Pace) -> float:
        """Return the mean prefill time of those on time; 0 where there are none."""
        if not self.on_time_count:
            return 0.0
        return pace.work_seconds(self._tokens, self._squares) / self.on_time_count

    def overloaded(self, pace: Pace, lines: int, start_at: float) -> bool:
        """Tell whether prefill cannot make all deadlines of those on time.

        In order of deadline, some prefix holds more work than the engines do until its end.

        Args:
            pace: Mean pace of an engine.
            lines: Engines.
            start_at: Now, and what passes of a prefill and a hand-off beside the prompt's own work.
        """
        tokens = squares = count = 0
        for slot in self._order:
            sums = self._slots[slot]
            tokens += sums[0]
            squares += sums[1]
            count += sums[2]
            left = slot - start_at
            if left <= 0.0:
                continue
            if pace.work_seconds(tokens, squares) + _OVERHEAD_SECONDS * count > left * lines:
                return True
        return False

    def _count(self, item: Waiting, tokens: int) -> None:
        width = 2.0 ** floor(log2(item.ttft_seconds)) / _SLOTS_PER_OCTAVE
        slot = ceil(item.deadline / width) * width
        item.slot = slot
        sums = self._slots.get(slot)
        if sums is None:
            sums = self._slots[slot] = [0, 0, 0]
            insort(self._order, slot)
        sums[0] += tokens
        sums[1] += tokens * tokens
        sums[2] += 1
        self._tokens += tokens
        self._squares += tokens * tokens

    def _discount(self, item: Waiting, tokens: int) -> None:
        slot = item.slot
        if slot is None:
            return
        item.slot = None
        sums = self._slots[slot]
        sums[0] -= tokens
        sums[1] -= tokens * tokens
        sums[2] -= 1
        if not sums[2]:
            del self._slots[slot]
            del self._order[bisect_left(self._order, slot)]
        self._tokens -= tokens
        self._squares -= tokens * tokens


def _key(request: Request) -> tuple[int, int, frozenset[str]]:
    """Return the name of the lane of a request on time."""
    size = floor(2.0 * log2(request.prompt_tokens))
    tpot = request.targets.tpot_seconds
    pace = floor(4.0 * log2(tpot)) if tpot > 0.0 and isfinite(tpot) else 0
    return (size, pace, request.excluded)


def _late_key(request: Request) -> tuple[str, frozenset[str]]:
    """Return the name of the lane of a late request."""
    return (request.slo_class, request.excluded)
