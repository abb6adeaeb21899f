"""What the control plane asks of its store. All truth lies there; replicas keep none.

Times are the store's own clock, since 1970. Every method raises `RedisUnavailable` while the store
does not answer. `store_redis` is the real one, `store_memory` the one for tests and for trying out;
one contract suite runs on both.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from controlplane.core.drift import Drift
from controlplane.core.lengths import LengthTable
from controlplane.core.registry import Change, Sighting
from controlplane.core.values import Constants, Engine, Happening, Member, Outcome, Report, Slo


@dataclass(frozen=True, slots=True)
class Registration:
    """How a registration went."""

    kind: Literal["new", "renewed", "replaced"]
    """`renewed`: the same epoch again; `replaced`: another boot before."""
    replaced_epoch: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotState:
    """What is known of the last snapshot, whoever published it."""

    sequence: int = 0
    published_unix_seconds: float = 0.0
    roster_version: int = 0
    roster_digest: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """One look at the store by a replica."""

    now_unix_seconds: float
    holder: bool
    """Whether this replica publishes; the rest is empty where it does not."""
    state: SnapshotState = SnapshotState()
    generation: int = 0
    """Changes with members, constants and targets; not with reports."""
    sightings: Mapping[str, Sighting] = field(default_factory=dict)


class MemberStore(Protocol):
    """Who is registered, and what they report."""

    async def register(self, engine: Engine) -> Registration:
        """Begin a life, or renew one of the same epoch.

        Raises:
            EpochReplaced: a later epoch of this id was registered before.
        """
        ...

    async def member(self, instance_id: str) -> Member | None:
        """Return one instance; None where it is not registered or GONE."""
        ...

    async def members(self) -> list[Member]:
        """Return all instances that are not GONE, by id."""
        ...

    async def change(self, change: Change) -> bool:
        """Take a step, unless something happened since it was decided; GONE forgets the member.

        Returns:
            False where the epoch, the state or (for silence) the last sighting is another by now.
        """
        ...

    async def write_reports(self, reports: Sequence[Report]) -> set[tuple[str, str]]:
        """Store reports as of now.

        Returns:
            Id and epoch of those that are not registered; nothing of them is stored.
        """
        ...


class SnapshotStore(Protocol):
    """The snapshot, and who publishes it."""

    async def tick(self, replica_id: str, lease_seconds: float) -> Tick:
        """Take or extend the publisher's lease where it is free or ours, and look around."""
        ...

    async def publish(self, replica_id: str, state: SnapshotState, snapshot: bytes) -> bool:
        """Make a snapshot the current one and announce it.

        Returns:
            False where another replica has the lease, or has published that sequence or a later
            one; nothing is published.
        """
        ...

    async def release(self, replica_id: str) -> None:
        """Give the lease back, so that another replica takes over at once."""
        ...

    def snapshots(self) -> AsyncIterator[bytes]:
        """Yield the current snapshot if there is one, then each new one."""
        ...


class LibraryStore(Protocol):
    """Constants by profile and version, and the targets."""

    async def publish_constants(self, draft: Constants, expected_version: int) -> Constants:
        """Store a draft as the profile's next version and make it current.

        Raises:
            ChangedMeanwhile: the current version is not `expected_version` (0 for none).
        """
        ...

    async def current_versions(self) -> dict[str, int]:
        """Return the current version of each profile that has one."""
        ...

    async def constants(self, profile: str, version: int) -> Constants | None:
        """Return one version; None where there is none."""
        ...

    async def all_constants(self, profile: str) -> list[Constants]:
        """Return all versions of a profile, newest first."""
        ...

    async def point_constants(self, profile: str, version: int) -> bool:
        """Make a stored version current; False where there is none."""
        ...

    async def slo(self) -> Slo | None:
        """Return the targets; None where none were set."""
        ...

    async def set_slo(self, slo: Slo) -> None:
        """Replace the targets."""
        ...


class StreamStore(Protocol):
    """The capped streams, and what is folded from them."""

    async def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Append finished requests."""
        ...

    async def outcomes_after(self, cursor: str, count: int) -> tuple[str, list[Outcome]]:
        """Return outcomes that came after a cursor ("" for the beginning), and the new cursor."""
        ...

    async def outcomes_end(self) -> str:
        """Return the cursor behind the last outcome stored; "" where there is none."""
        ...

    async def recent_outcomes(self, count: int) -> list[tuple[float, Outcome]]:
        """Return the last outcomes, newest first, each with the time it was stored."""
        ...

    async def add_event(self, happening: Happening) -> None:
        """Append an event."""
        ...

    async def recent_events(self, count: int) -> list[Happening]:
        """Return the last events, newest first."""
        ...

    async def lengths(self, half_life_seconds: float) -> tuple[str, int, LengthTable]:
        """Return the folded lengths: the cursor they are folded up to, their version, the table."""
        ...

    async def write_lengths(
        self, replica_id: str, cursor: str, version: int, table: LengthTable
    ) -> bool:
        """Replace the folded lengths with their cursor; False where the lease is not ours."""
        ...


class DriftStore(Protocol):
    """Which instances left the pace of their constants, and what live traffic proposes."""

    async def write_drift(self, drifting: Sequence[Drift], proposals: Sequence[Constants]) -> None:
        """Replace all that is stored of drift."""
        ...

    async def drift(self) -> tuple[list[Drift], dict[str, Constants]]:
        """Return drifting instances by id, and proposed constants by profile."""
        ...


class LockStore(Protocol):
    """The cluster's one calibration lock."""

    async def hold_calibration(self, holder: str, lease_seconds: float) -> str:
        """Take the lock if it is free, or extend it if it is ours; returns who holds it now."""
        ...

    async def release_calibration(self, holder: str) -> None:
        """Free the lock if it is ours."""
        ...


class Store(MemberStore, SnapshotStore, LibraryStore, StreamStore, DriftStore, LockStore, Protocol):
    """All of it."""

    async def ping(self) -> None:
        """Make sure that the store answers."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
