"""Keeps a router's picture of the cluster: one blob from Redis, pushed on a channel."""

import asyncio
from collections.abc import Callable

import redis.asyncio
import structlog
from google.protobuf.message import DecodeError

from dataplane.router.snapshots import ClusterState, SnapshotReader
from servicekit.clock import Clock
from servicekit.redis_client import REDIS_ERRORS
from servicekit.redis_keys import SNAPSHOT, SNAPSHOTS_CHANNEL

_SILENCE_SECONDS = 2.0
OnState = Callable[[ClusterState], None]


class SnapshotFeed:
    """Calls its listeners with every new snapshot, and once more when they stop coming.

    Without Redis the last snapshot stays; it is marked stale after `stale_after_seconds`, and the
    router goes by its own ledger until there are snapshots again.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        reader: SnapshotReader,
        *,
        clock: Clock,
        stale_after_seconds: float,
    ) -> None:
        self._client = client
        self._reader = reader
        self._listeners: list[OnState] = []
        self._clock = clock
        self._stale_after_seconds = stale_after_seconds
        self._last: ClusterState | None = None
        self._arrived_at = -float("inf")
        self._stale = False
        self._log = structlog.get_logger("dataplane.router.feed")

    @property
    def age_seconds(self) -> float:
        """Time since the last snapshot arrived; infinite before the first."""
        return self._clock.monotonic() - self._arrived_at

    def listen(self, listener: OnState) -> None:
        """Have a listener called with every state from now on."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Follow the channel until cancelled; comes back by itself when Redis was away."""
        while True:
            try:
                await self._follow()
            except REDIS_ERRORS as error:
                self._log.warning("redis_lost", error=str(error) or type(error).__name__)
                self._check_age()
                await self._clock.sleep(0.2)

    async def _follow(self) -> None:
        async with self._client.pubsub(ignore_subscribe_messages=True) as channel:
            await channel.subscribe(SNAPSHOTS_CHANNEL)
            blob = await self._client.get(SNAPSHOT)
            if isinstance(blob, bytes):
                self._take(blob)
            heard_at = self._clock.monotonic()
            # A connection whose other end vanished says nothing, as a quiet channel does: after a
            # while of silence the channel is subscribed to anew.
            while self._clock.monotonic() - heard_at < _SILENCE_SECONDS:
                message = await channel.get_message(timeout=self._stale_after_seconds / 4)
                if message is not None:
                    heard_at = self._clock.monotonic()
                    self._take(message["data"])
                self._check_age()
                # Redis may be fast enough never to make us wait: others must run too.
                await asyncio.sleep(0)

    def _take(self, blob: bytes) -> None:
        try:
            state = self._reader.read(blob)
        except DecodeError:
            self._log.exception("snapshot_unreadable", size_bytes=len(blob))
            return
        if self._last is not None and state.sequence == self._last.sequence:
            return
        if self._stale:
            self._log.info("snapshots_back", sequence=state.sequence)
        self._last, self._stale = state, False
        self._arrived_at = self._clock.monotonic()
        self._tell(state)

    def _check_age(self) -> None:
        if self._last is None or self._stale or self.age_seconds < self._stale_after_seconds:
            return
        self._stale = True
        self._log.warning("snapshots_stale", age_seconds=round(self.age_seconds, 3))
        self._tell(self._last.aged())

    def _tell(self, state: ClusterState) -> None:
        for listener in self._listeners:
            listener(state)
