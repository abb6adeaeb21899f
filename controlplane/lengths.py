"""Keeps the output-length statistics: folded from the outcomes stream by whoever publishes.

Table and cursor are stored together, so each outcome counts once, whichever replica folds it.
"""

from controlplane.core.lengths import LengthTable
from controlplane.store import StreamStore
from controlplane.wire_snapshot import lengths_bytes

_MOST_OUTCOMES = 2_000


class LengthsFolder:
    """Folds at most once a second.

    Args:
        store: where outcomes and statistics lie.
        half_life_seconds: after that long an outcome counts half.
        interval_seconds: between folds, at least.
    """

    def __init__(
        self, store: StreamStore, *, half_life_seconds: float, interval_seconds: float = 1.0
    ) -> None:
        self._store = store
        self._half_life_seconds = half_life_seconds
        self._interval_seconds = interval_seconds
        self._table: LengthTable | None = None
        self._cursor = ""
        self._folded_unix_seconds = 0.0
        self.version = 0
        """Of `serialized`; changes when and only when that does."""
        self.serialized = b""
        """A LengthTable message."""

    def forget(self) -> None:
        """Read the stored table again before the next fold: another replica may have written it."""
        self._table = None

    async def fold(self, replica_id: str, now_unix_seconds: float) -> None:
        """Count the outcomes that came since the last fold, if that is long enough ago.

        Args:
            replica_id: holder of the publisher's lease.
            now_unix_seconds: by the store's clock.

        Raises:
            RedisUnavailable: nothing was counted.
        """
        if self._table is None:
            await self._load()
        elif abs(now_unix_seconds - self._folded_unix_seconds) < self._interval_seconds:
            return
        self._folded_unix_seconds = now_unix_seconds
        if self._table is None:
            return
        cursor, outcomes = await self._store.outcomes_after(self._cursor, _MOST_OUTCOMES)
        if not outcomes:
            return
        table = self._table
        # Until it is stored the table in memory is not the truth: a failure reads it again.
        self._table = None
        counted = table.fold(outcomes, now_unix_seconds)
        version = self.version + 1 if self.version else int(now_unix_seconds * 1000)
        version = version if counted else self.version
        if await self._store.write_lengths(replica_id, cursor, version, table):
            self._table, self._cursor = table, cursor
            if counted:
                self.version, self.serialized = version, lengths_bytes(table)

    async def _load(self) -> None:
        self._cursor, self.version, self._table = await self._store.lengths(self._half_life_seconds)
        self.serialized = lengths_bytes(self._table) if self.version else b""
