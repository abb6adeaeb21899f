"""A store in this process: for tests, and for a single replica that may forget."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from controlplane.core.drift import Drift
from controlplane.core.lengths import LengthTable
from controlplane.core.liveness import Liveness, Signal, State
from controlplane.core.registry import Change, Sighting
from controlplane.core.values import Constants, Engine, Happening, Member, Outcome, Report, Slo
from controlplane.errors import ChangedMeanwhile, EpochReplaced
from controlplane.store import Registration, SnapshotState, Tick
from servicekit.clock import Clock


class MemoryStore:
    """Keeps everything in dictionaries; times are the given clock's."""

    def __init__(
        self, clock: Clock, *, max_outcomes: int = 100_000, max_events: int = 10_000
    ) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._sightings: dict[str, Sighting] = {}
        self._replaced: set[tuple[str, str]] = set()
        self._generation = 0
        self._lease: tuple[str, float] = ("", 0.0)
        self._calibration: tuple[str, float] = ("", 0.0)
        self._drifting: list[Drift] = []
        self._proposed: dict[str, Constants] = {}
        self._state = SnapshotState()
        self._snapshot = b""
        self._published = asyncio.Event()
        self._constants: dict[str, list[Constants]] = {}
        self._current: dict[str, int] = {}
        self._slo: Slo | None = None
        self._outcomes: deque[tuple[int, float, Outcome]] = deque(maxlen=max_outcomes)
        self._outcome_count = 0
        self._events: deque[Happening] = deque(maxlen=max_events)
        self._lengths: tuple[str, int, LengthTable] | None = None

    async def ping(self) -> None:
        """It always answers."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def register(self, engine: Engine) -> Registration:
        """See `MemberStore`."""
        if (engine.instance_id, engine.epoch) in self._replaced:
            raise EpochReplaced(f"{engine.instance_id} has booted again since {engine.epoch}")
        now = self._clock.unix()
        before = self._members.get(engine.instance_id)
        self._generation += 1
        if before is not None and before.engine.epoch == engine.epoch:
            self._members[engine.instance_id] = replace(before, engine=engine)
            seen = self._sightings[engine.instance_id]
            self._sightings[engine.instance_id] = Sighting(now, seen.report)
            return Registration("renewed")
        self._members[engine.instance_id] = Member(engine, Liveness(), now)
        self._sightings[engine.instance_id] = Sighting(now, None)
        if before is None:
            return Registration("new")
        self._replaced.add((engine.instance_id, before.engine.epoch))
        return Registration("replaced", before.engine.epoch)

    async def member(self, instance_id: str) -> Member | None:
        """See `MemberStore`."""
        return self._members.get(instance_id)

    async def members(self) -> list[Member]:
        """See `MemberStore`."""
        return [self._members[instance_id] for instance_id in sorted(self._members)]

    async def change(self, change: Change) -> bool:
        """See `MemberStore`."""
        instance_id = change.member.engine.instance_id
        now = self._members.get(instance_id)
        if now is None or (now.engine.epoch, now.liveness) != (
            change.member.engine.epoch,
            change.member.liveness,
        ):
            return False
        by_silence = change.signal in (Signal.SILENT, Signal.LOST)
        if by_silence and self._sightings[instance_id].seen_unix_seconds > change.seen_unix_seconds:
            return False
        self._generation += 1
        if change.after.state is State.GONE:
            del self._members[instance_id], self._sightings[instance_id]
        else:
            self._members[instance_id] = replace(now, liveness=change.after)
        return True

    async def write_reports(self, reports: Sequence[Report]) -> set[tuple[str, str]]:
        """See `MemberStore`."""
        rejected = set()
        for report in reports:
            member = self._members.get(report.instance_id)
            if member is None or member.engine.epoch != report.epoch:
                rejected.add((report.instance_id, report.epoch))
            else:
                self._sightings[report.instance_id] = Sighting(self._clock.unix(), report)
        return rejected

    async def tick(self, replica_id: str, lease_seconds: float) -> Tick:
        """See `SnapshotStore`."""
        now = self._clock.unix()
        owner, until = self._lease
        if owner not in ("", replica_id) and until > now:
            return Tick(now, holder=False)
        self._lease = (replica_id, now + lease_seconds)
        return Tick(
            now,
            holder=True,
            state=self._state,
            generation=self._generation,
            sightings=dict(self._sightings),
        )

    async def publish(self, replica_id: str, state: SnapshotState, snapshot: bytes) -> bool:
        """See `SnapshotStore`."""
        owner, until = self._lease
        if (owner not in ("", replica_id) and until > self._clock.unix()) or (
            self._state.sequence >= state.sequence
        ):
            return False
        self._state = replace(state, published_unix_seconds=self._clock.unix())
        self._snapshot = snapshot
        published, self._published = self._published, asyncio.Event()
        published.set()
        return True

    async def release(self, replica_id: str) -> None:
        """See `SnapshotStore`."""
        if self._lease[0] == replica_id:
            self._lease = ("", 0.0)

    async def snapshots(self) -> AsyncIterator[bytes]:
        """See `SnapshotStore`."""
        while True:
            published = self._published
            if self._snapshot:
                yield self._snapshot
            await published.wait()

    async def publish_constants(self, draft: Constants, expected_version: int) -> Constants:
        """See `LibraryStore`."""
        if self._current.get(draft.profile, 0) != expected_version:
            raise ChangedMeanwhile(f"{draft.profile} is not at version {expected_version} any more")
        versions = self._constants.setdefault(draft.profile, [])
        stored = replace(
            draft, version=len(versions) + 1, published_unix_seconds=self._clock.unix()
        )
        versions.append(stored)
        self._current[draft.profile] = stored.version
        self._generation += 1
        return stored

    async def current_versions(self) -> dict[str, int]:
        """See `LibraryStore`."""
        return dict(self._current)

    async def constants(self, profile: str, version: int) -> Constants | None:
        """See `LibraryStore`."""
        versions = self._constants.get(profile, [])
        return versions[version - 1] if 1 <= version <= len(versions) else None

    async def all_constants(self, profile: str) -> list[Constants]:
        """See `LibraryStore`."""
        return self._constants.get(profile, [])[::-1]

    async def point_constants(self, profile: str, version: int) -> bool:
        """See `LibraryStore`."""
        if await self.constants(profile, version) is None:
            return False
        self._current[profile] = version
        self._generation += 1
        return True

    async def slo(self) -> Slo | None:
        """See `LibraryStore`."""
        return self._slo

    async def set_slo(self, slo: Slo) -> None:
        """See `LibraryStore`."""
        self._slo = slo
        self._generation += 1

    async def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """See `StreamStore`."""
        for outcome in outcomes:
            self._outcome_count += 1
            self._outcomes.append((self._outcome_count, self._clock.unix(), outcome))

    async def outcomes_after(self, cursor: str, count: int) -> tuple[str, list[Outcome]]:
        """See `StreamStore`."""
        after = int(cursor or 0)
        rows = [(number, o) for number, _, o in self._outcomes if number > after][:count]
        return (str(rows[-1][0]) if rows else cursor), [outcome for _, outcome in rows]

    async def outcomes_end(self) -> str:
        """See `StreamStore`."""
        return str(self._outcomes[-1][0]) if self._outcomes else ""

    async def recent_outcomes(self, count: int) -> list[tuple[float, Outcome]]:
        """See `StreamStore`."""
        return [(stored, outcome) for _, stored, outcome in reversed(self._outcomes)][:count]

    async def add_event(self, happening: Happening) -> None:
        """See `StreamStore`."""
        self._events.append(replace(happening, unix_seconds=self._clock.unix()))

    async def recent_events(self, count: int) -> list[Happening]:
        """See `StreamStore`."""
        return list(reversed(self._events))[:count]

    async def lengths(self, half_life_seconds: float) -> tuple[str, int, LengthTable]:
        """See `StreamStore`."""
        if self._lengths is None:
            return "", 0, LengthTable(half_life_seconds)
        cursor, version, table = self._lengths
        copied = {key: list(weights) for key, weights in table.weights.items()}
        return cursor, version, LengthTable(half_life_seconds, table.counted_unix_seconds, copied)

    async def write_lengths(
        self, replica_id: str, cursor: str, version: int, table: LengthTable
    ) -> bool:
        """See `StreamStore`."""
        if not self._holds(replica_id):
            return False
        copied = {key: list(weights) for key, weights in table.weights.items()}
        self._lengths = (
            cursor,
            version,
            LengthTable(table.half_life_seconds, table.counted_unix_seconds, copied),
        )
        return True

    async def write_drift(self, drifting: Sequence[Drift], proposals: Sequence[Constants]) -> None:
        """See `DriftStore`."""
        self._drifting = sorted(drifting, key=lambda drift: (drift.instance_id, drift.part))
        self._proposed = {proposal.profile: proposal for proposal in proposals}

    async def drift(self) -> tuple[list[Drift], dict[str, Constants]]:
        """See `DriftStore`."""
        return list(self._drifting), dict(self._proposed)

    async def hold_calibration(self, holder: str, lease_seconds: float) -> str:
        """See `LockStore`."""
        owner, until = self._calibration
        if owner not in ("", holder) and until > self._clock.unix():
            return owner
        self._calibration = (holder, self._clock.unix() + lease_seconds)
        return holder

    async def release_calibration(self, holder: str) -> None:
        """See `LockStore`."""
        if self._calibration[0] == holder:
            self._calibration = ("", 0.0)

    def _holds(self, replica_id: str) -> bool:
        return self._lease[0] == replica_id and self._lease[1] > self._clock.unix()
