"""Finding stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopScanner:
    """Passes text on, except what may yet turn out to be the beginning of a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._hold = max((len(s) for s in self._stop), default=1) - 1
        self._pending = ""
        self.found = ""

    def __repr__(self) -> str:
        """Show what is held back."""
        return f"StopScanner(pending={self._pending!r}, found={self.found!r})"

    def feed(self, text: str) -> str:
        """Return the text that is safe to show; sets `found` at the first stop string.

        The text before a stop string is shown, the stop string is not.
        """
        self._pending += text
        hits = [(self._pending.find(s), s) for s in self._stop if s in self._pending]
        if hits:
            position, self.found = min(hits)
            shown, self._pending = self._pending[:position], ""
            return shown
        keep = min(self._hold, len(self._pending))
        shown = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(self._pending) - keep :]
        return shown

    def flush(self) -> str:
        """Return what is still held back: the text has ended without a stop string."""
        shown, self._pending = self._pending, ""
        return shown
