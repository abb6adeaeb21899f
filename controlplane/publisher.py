"""The loop that publishes: one replica at a time holds the lease, any takes over within ~150 ms.

Each tick reads all reports in one go, steps instances that changed or fell silent, and publishes
one snapshot. What changes seldom (members, constants, targets) is read again only when the store's
generation says so.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import islice

import structlog

from controlplane.core import constants as constants_rules
from controlplane.core import slo as slo_rules
from controlplane.core.liveness import State, Timing
from controlplane.core.registry import sweep
from controlplane.core.snapshot import columns
from controlplane.core.values import Constants, Member, Slo
from controlplane.lengths import LengthsFolder
from controlplane.metrics import ControlMetrics
from controlplane.store import SnapshotState, Store, Tick
from controlplane.wire_snapshot import roster_bytes, snapshot_bytes
from servicekit.clock import Clock
from servicekit.errors import RedisUnavailable

_MOST_CHANGES = 50
"""Steps taken in one tick; the rest wait for the next, so that snapshots keep coming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherOptions:
    """How often to publish, and when another replica may take over."""

    interval_seconds: float = 0.04
    """Between snapshots; with the way to the readers they stay below 50 ms of age."""
    lease_seconds: float = 0.12
    """Three intervals: as long as a dead publisher is waited for."""
    down_after_seconds: float = 0.5
    """Redis silent for that long makes the replica NOT_SERVING."""


@dataclass(slots=True)
class _Held:
    """What the holder of the lease remembers; read again by the next one."""

    generation: int = -1
    members: tuple[Member, ...] = ()
    roster: bytes = b""
    roster_version: int = 0
    roster_digest: str = ""
    sequence: int = 0
    listening_since_unix_seconds: float = 0.0


class Publisher:
    """Publishes while it holds the lease, and tries to get it while it does not."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        metrics: ControlMetrics,
        lengths: LengthsFolder,
        *,
        replica_id: str,
        timing: Timing,
        options: PublisherOptions,
    ) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._lengths = lengths
        self._replica_id = replica_id
        self._timing = timing
        self._options = options
        self._log = structlog.get_logger("controlplane.publisher")
        self._held: _Held | None = None
        self._answered_monotonic = clock.monotonic()
        self._interrupted = False
        self._last_sequence = 0
        self._last_roster_version = 0

    @property
    def holder(self) -> bool:
        """Whether this replica publishes."""
        return self._held is not None

    async def run(self, on_health: Callable[[bool], Awaitable[None]]) -> None:
        """Tick until cancelled, then give the lease back.

        Args:
            on_health: told True or False when Redis answers, or has not for too long; called on
                changes only.
        """
        healthy: bool | None = None
        try:
            while True:
                started = self._clock.monotonic()
                answered = await self._tick_or_wait()
                now = self._clock.monotonic()
                silent = now - self._answered_monotonic > self._options.down_after_seconds
                if (answered and healthy is not True) or (silent and healthy is not False):
                    healthy = answered
                    self._metrics.store_up.set(int(healthy))
                    await on_health(healthy)
                await self._clock.sleep(self._options.interval_seconds - (now - started))
        finally:
            await self._release()

    async def step(self) -> bool:
        """Do one tick; returns whether a snapshot was published.

        Raises:
            RedisUnavailable: the store does not answer.
        """
        tick = await self._store.tick(self._replica_id, self._options.lease_seconds)
        if not tick.holder:
            self._lose()
            return False
        started = self._clock.monotonic()
        held = self._take(tick)
        stale_after_seconds = self._timing.steered(len(held.members)).stale_after_seconds
        if tick.now_unix_seconds - tick.state.published_unix_seconds > stale_after_seconds:
            held.listening_since_unix_seconds = tick.now_unix_seconds
        if tick.generation != held.generation:
            await self._reload(held, tick)
        if await self._sweep(held, tick):
            await self._reload(held, tick)
        await self._lengths.fold(self._replica_id, tick.now_unix_seconds)
        snapshot = self._build(held, tick)
        self._metrics.build_seconds.observe(self._clock.monotonic() - started)
        state = SnapshotState(
            sequence=held.sequence,
            roster_version=held.roster_version,
            roster_digest=held.roster_digest,
        )
        if not await self._store.publish(self._replica_id, state, snapshot):
            self._lose()
            return False
        self._metrics.published.inc()
        return True

    async def _tick_or_wait(self) -> bool:
        try:
            await self.step()
        except RedisUnavailable as error:
            self._lose()
            if not self._interrupted:  # one line an outage, not one a tick
                self._log.warning("redis_lost", reason=error.message)
            self._interrupted = True
            return False
        now = self._clock.monotonic()
        if self._interrupted:
            self._log.info("redis_back", away_seconds=round(now - self._answered_monotonic, 3))
        self._interrupted = False
        self._answered_monotonic = now
        return True

    def _take(self, tick: Tick) -> _Held:
        """Begin to publish where another replica, or nobody, did so far."""
        if self._held is None:
            self._log.info("publishing_started", sequence=tick.state.sequence)
            self._metrics.publisher.set(1)
            self._held = _Held(
                roster_version=tick.state.roster_version,
                roster_digest=tick.state.roster_digest,
            )
            self._lengths.forget()
        # A store that lost everything starts counting again; readers must never see a number twice.
        fresh = int(tick.now_unix_seconds * 1000) if tick.state.sequence == 0 else 0
        self._held.sequence = max(tick.state.sequence, self._last_sequence, fresh) + 1
        self._last_sequence = self._held.sequence
        return self._held

    def _lose(self) -> None:
        if self._held is not None:
            self._log.info("publishing_stopped")
            self._metrics.publisher.set(0)
            self._held = None

    async def _release(self) -> None:
        try:
            await self._store.release(self._replica_id)
        except RedisUnavailable as error:
            self._log.warning("lease_not_released", reason=error.message)

    async def _sweep(self, held: _Held, tick: Tick) -> bool:
        """Step the instances that changed; returns whether any did."""
        timing = self._timing.steered(len(held.members))
        found = sweep(
            held.members,
            tick.sightings,
            tick.now_unix_seconds,
            timing,
            held.listening_since_unix_seconds,
        )
        changed = False
        for change in islice(found, _MOST_CHANGES):
            if not await self._store.change(change):
                continue
            changed = True
            happening = change.happening
            await self._store.add_event(happening)
            self._metrics.events.labels(happening.kind).inc()
            self._log.info(
                "instance_changed",
                instance_id=happening.subject,
                kind=happening.kind,
                state=change.after.state.value,
            )
        return changed

    async def _reload(self, held: _Held, tick: Tick) -> None:
        """Read what changes seldom, and give the roster a new version if it is another."""
        members = await self._store.members()
        current = await self._store.current_versions()
        profiles = {member.engine.profile for member in members} | current.keys()
        constants = {
            profile: await self._constants(profile, current.get(profile, 0))
            for profile in profiles
            if profile
        }
        slo = await self._store.slo() or slo_rules.DEFAULT
        held.members = tuple(m for m in members if m.liveness.state is not State.GONE)
        held.generation = tick.generation
        self._set_roster(held, constants, slo, tick)

    async def _constants(self, profile: str, version: int) -> Constants:
        stored = await self._store.constants(profile, version) if version else None
        return stored or constants_rules.reference(profile)

    def _set_roster(
        self, held: _Held, constants: Mapping[str, Constants], slo: Slo, tick: Tick
    ) -> None:
        held.roster = roster_bytes(held.members, constants, slo)
        digest = hashlib.sha256(held.roster).hexdigest()
        if digest == held.roster_digest:
            return
        fresh = int(tick.now_unix_seconds * 1000) if tick.state.roster_version == 0 else 0
        held.roster_version = max(held.roster_version, self._last_roster_version, fresh) + 1
        held.roster_digest = digest
        self._last_roster_version = held.roster_version

    def _build(self, held: _Held, tick: Tick) -> bytes:
        return snapshot_bytes(
            sequence=held.sequence,
            now_unix_seconds=tick.now_unix_seconds,
            roster_version=held.roster_version,
            roster=held.roster,
            columns=columns(held.members, tick.sightings, tick.now_unix_seconds),
            lengths_version=self._lengths.version,
            lengths=self._lengths.serialized,
        )
