"""The latest snapshot in this process, whoever published it."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping

import structlog
from steelyard.v1 import types_pb2

from controlplane.core.liveness import State
from controlplane.metrics import ControlMetrics
from controlplane.store import SnapshotStore
from controlplane.wire_snapshot import states_of
from servicekit.clock import Clock
from servicekit.enums import short_name
from servicekit.errors import RedisUnavailable

_RETRY_SECONDS = 0.1
_BELIEVE_LOWER_AFTER_SECONDS = 1.0


class SnapshotFeed:
    """Follows the store's snapshots and hands them to any number of watchers."""

    def __init__(self, store: SnapshotStore, clock: Clock, metrics: ControlMetrics) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._log = structlog.get_logger("controlplane.feed")
        self._changed = asyncio.Event()
        self._closed = False
        self._received_monotonic = clock.monotonic()
        self._roster_version: int | None = None
        self.latest: types_pb2.ClusterSnapshot | None = None
        self.roster = types_pb2.Roster()
        self.states: Mapping[str, State] = {}
        """State of every instance in the latest roster."""
        metrics.snapshot_age.set_function(self.age_seconds)

    def age_seconds(self) -> float:
        """Seconds since a snapshot came in; since the start where none has."""
        return self._clock.monotonic() - self._received_monotonic

    async def run(self) -> None:
        """Follow the store until cancelled; a store that is away is asked again and again."""
        while True:
            try:
                async for raw in self._store.snapshots():
                    self._take(types_pb2.ClusterSnapshot.FromString(raw))
            except RedisUnavailable as error:
                self._log.debug("snapshots_interrupted", reason=error.message)
                await self._clock.sleep(_RETRY_SECONDS)

    async def watch(self) -> AsyncGenerator[types_pb2.ClusterSnapshot, None]:
        """Yield the latest snapshot, then each newer one; a slow reader skips some.

        Ends when the feed is closed.
        """
        while not self._closed:
            changed = self._changed
            if self.latest is not None:
                yield self.latest
            await changed.wait()

    def close(self) -> None:
        """End all watches."""
        self._closed = True
        self._wake()

    def _take(self, snapshot: types_pb2.ClusterSnapshot) -> None:
        """Make a snapshot the latest; one that was overtaken on its way is dropped."""
        last = self.latest.sequence if self.latest else 0
        overtaken = snapshot.sequence <= last and self.age_seconds() < _BELIEVE_LOWER_AFTER_SECONDS
        if overtaken or snapshot.sequence == last:
            return
        self.latest = snapshot
        self._received_monotonic = self._clock.monotonic()
        self._metrics.snapshot_bytes.set(snapshot.ByteSize())
        if snapshot.roster_version != self._roster_version:
            self._roster_version = snapshot.roster_version
            self.roster = types_pb2.Roster.FromString(snapshot.roster)
            self.states = states_of(snapshot.roster)
            self._show_roster()
        self._wake()

    def _show_roster(self) -> None:
        self._metrics.show_instances(
            Counter(
                (
                    short_name(types_pb2.Role, instance.engine.role),
                    self.states[instance.engine.instance_id].value,
                )
                for instance in self.roster.instances
            )
        )
        for constants in self.roster.constants:
            self._metrics.constants_version.labels(constants.profile).set(constants.version)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
