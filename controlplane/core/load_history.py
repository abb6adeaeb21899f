"""What instances had in hand lately: means over the life of a request."""

from collections import deque
from dataclasses import dataclass

_KEPT_SECONDS = 300.0
_FINEST_SECONDS = 0.09
_STRETCH_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class MeanLoad:
    """Mean batch and KV of an instance over some time."""

    running: float
    kv_tokens: float


class LoadHistory:
    """Reports of the last minutes, by instance."""

    def __init__(self) -> None:
        self._rows: dict[str, deque[tuple[float, float, float]]] = {}

    def __repr__(self) -> str:
        """Show how much is kept."""
        return f"LoadHistory({ {name: len(rows) for name, rows in self._rows.items()} })"

    def add(self, instance_id: str, now: float, running: float, kv_tokens: float) -> None:
        """Remember a report; those in quick succession are thinned out."""
        rows = self._rows.setdefault(instance_id, deque())
        if rows and now - rows[-1][0] < _FINEST_SECONDS:
            return
        rows.append((now, running, kv_tokens))
        while now - rows[0][0] > _KEPT_SECONDS:
            rows.popleft()

    def mean(self, instance_id: str, begin: float, end: float) -> MeanLoad | None:
        """Return the mean over a time; None where nothing with work was reported about then.

        Where no report falls into the time, the last one before it speaks for it, if it is recent.
        """
        window: list[tuple[float, float, float]] = []
        for row in reversed(self._rows.get(instance_id, ())):
            if row[0] > end or row[1] <= 0:
                continue
            if row[0] < begin - _STRETCH_SECONDS or (row[0] < begin and window):
                break
            window.append(row)
        if not window:
            return None
        count = len(window)
        return MeanLoad(sum(r[1] for r in window) / count, sum(r[2] for r in window) / count)

    def forget(self, instance_id: str) -> None:
        """Drop an instance."""
        self._rows.pop(instance_id, None)
