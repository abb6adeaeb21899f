"""Holds hand-offs back until the modelled link would have moved them."""

from collections.abc import Iterable


def pulled_tokens(blocks: int, block_tokens: int, remote_tokens: int | None) -> int:
    """Return how many tokens' KV a pull moves.

    Args:
        blocks: It fills here.
        block_tokens: Of each.
        remote_tokens: Held for it at the other end; None where that is not told.
    """
    whole = blocks * block_tokens
    return whole if remote_tokens is None else min(whole, remote_tokens)


class PullHold:
    """Pulls that have begun, when each may be seen as finished, and which have finished already.

    The tiny model's KV is moved in milliseconds where a real one's takes tens; what is held back is
    the news of it. Times are real seconds on any one clock.
    """

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._arrived: set[str] = set()

    @property
    def held(self) -> int:
        """Pulls that have arrived and are held back."""
        return len(self._arrived)

    def begin(self, request_id: str, now: float, seconds: float) -> None:
        """A pull begins that is to take `seconds`; of one that is known already, nothing changes."""
        self._due.setdefault(request_id, now + seconds)

    def release(self, finished: Iterable[str], failed: Iterable[str], now: float) -> set[str]:
        """Return who counts as finished now: whose time has come, and whoever failed.

        Args:
            finished: Pulls that have ended since the last call, failed ones included.
            failed: Those of them that brought nothing.
            now: The time.
        """
        self._arrived.update(finished)
        at_once = set(failed)
        seen = {
            request_id
            for request_id in self._arrived
            if request_id in at_once or self._due.get(request_id, now) <= now
        }
        self._arrived -= seen
        for request_id in seen:
            self._due.pop(request_id, None)
        return seen
