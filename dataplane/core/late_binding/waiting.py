"""Requests that wait, and lanes that keep them in order at a cost that hardly grows with them."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from dataplane.core.request import Request

_COMPACT_FROM = 32
LaneName: TypeAlias = tuple[int, int, frozenset[str]] | tuple[str, frozenset[str]]


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits for prefill.

    Attributes:
        request: The request.
        sequence: Order of submission; breaks ties.
        deadline: When its prefill must be over to leave time for moving its KV; the rest of the
            hand-off is not in here, since what is known of it changes.
        ttft_seconds: Its TTFT target, finite.
        due_by: From when on it may overtake though it is late.
        latest_start: Deadline less its prefill time at the pace known on submission.
        doomed: True once it was given up as late; it is not taken back.
        lane: Where it waits; None once it does not.
        slot: Key of its sums in the overload test; None once it is doomed.
    """

    request: Request
    sequence: int
    deadline: float
    ttft_seconds: float
    due_by: float
    latest_start: float
    doomed: bool = False
    lane: "Lane | None" = None
    slot: float | None = None


class Lane:
    """A sorted list with marks for what has left.

    Newcomers mostly belong near the end and leavers near the head, so both are cheap at any
    length; marks are swept when they outnumber what is left.
    """

    __slots__ = ("_head", "_items", "_keys", "live", "low_tokens", "name")

    def __init__(self, name: LaneName, low_tokens: int = 0) -> None:
        self.name = name
        self.low_tokens = low_tokens
        self.live = 0
        self._keys: list[float] = []
        self._items: list[Waiting] = []
        self._head = 0

    def __len__(self) -> int:
        return self.live

    def __repr__(self) -> str:
        return f"<Lane {self.live} waiting, {len(self._items)} held>"

    def add(self, key: float, item: Waiting) -> None:
        """Put a request in its place; equals stay in order of arrival here."""
        position = bisect_right(self._keys, key, self._head)
        self._keys.insert(position, key)
        self._items.insert(position, item)
        item.lane = self
        self.live += 1

    def remove(self, item: Waiting) -> None:
        """Mark a request of this lane as gone."""
        item.lane = None
        self.live -= 1
        items = self._items
        head = self._head
        while head < len(items) and items[head].lane is not self:
            head += 1
        self._head = head
        if len(items) - self.live > self.live + _COMPACT_FROM:
            kept = [i for i in range(head, len(items)) if items[i].lane is self]
            self._keys = [self._keys[i] for i in kept]
            self._items = [items[i] for i in kept]
            self._head = 0

    def first(self) -> Waiting | None:
        """Return the request with the least key."""
        return self._items[self._head] if self.live else None

    def first_from(self, key: float) -> Waiting | None:
        """Return the first request with at least that key."""
        items = self._items
        position = bisect_left(self._keys, key, self._head)
        while position < len(items):
            if items[position].lane is self:
                return items[position]
            position += 1
        return None

    def heads(self, count: int) -> Iterator[Waiting]:
        """Yield the first `count` requests."""
        items = self._items
        position = self._head
        while count and position < len(items):
            if items[position].lane is self:
                yield items[position]
                count -= 1
            position += 1
