"""Folding registrations and reports: which instances change state, and what the sweep saw."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from controlplane.core.liveness import Liveness, Signal, State, Timing, silence, step
from controlplane.core.values import Happening, Member, Report


@dataclass(frozen=True, slots=True)
class Sighting:
    """The last that was heard of an instance."""

    seen_unix_seconds: float
    """When its last report or registration came in, by the store's clock."""
    report: Report | None
    """None before the first report of its epoch."""


@dataclass(frozen=True, slots=True)
class Change:
    """One instance's step to another state."""

    member: Member
    after: Liveness
    signal: Signal
    seen_unix_seconds: float
    """What the decision rests on; it is void if something was heard since."""

    @property
    def happening(self) -> Happening:
        """The event that tells of it."""
        engine = self.member.engine
        return Happening(_kind(self.member.liveness.state, self), engine.instance_id, engine.epoch)


def sweep(
    members: Iterable[Member],
    sightings: Mapping[str, Sighting],
    now_unix_seconds: float,
    timing: Timing,
    listening_since_unix_seconds: float = 0.0,
) -> Iterator[Change]:
    """Yield the changes that reports and silence ask for.

    Args:
        members: who is registered.
        sightings: by instance id; those of other epochs count for nothing.
        now_unix_seconds: by the store's clock, as are all times here.
        timing: when silence counts.
        listening_since_unix_seconds: since when reports could come in at all. While the control
            plane or its store was away nobody could report, and that is held against nobody.
    """
    for member in members:
        sighting = sightings.get(member.engine.instance_id)
        report = _own_report(member, sighting)
        seen = max(
            sighting.seen_unix_seconds if sighting else member.registered_unix_seconds,
            listening_since_unix_seconds,
        )
        signal = _signal(report, silence(now_unix_seconds - seen, timing))
        if signal is None:
            continue
        after = step(member.liveness, signal)
        if after != member.liveness:
            actual = sighting.seen_unix_seconds if sighting else member.registered_unix_seconds
            yield Change(member, after, signal, actual)


def _own_report(member: Member, sighting: Sighting | None) -> Report | None:
    """The member's last report, unless it is another boot's."""
    if sighting is None or sighting.report is None:
        return None
    return sighting.report if sighting.report.epoch == member.engine.epoch else None


def _signal(report: Report | None, silent: Signal | None) -> Signal | None:
    if report is not None and report.leaving:
        return Signal.LEFT
    if silent is not None:
        return silent
    if report is None:
        return None
    return Signal.HEALTHY if report.load.engine_healthy else Signal.UNHEALTHY


def _kind(before: State, change: Change) -> str:
    """Name the event of a change."""
    if change.signal is Signal.LEFT:
        return "left"
    if change.signal is Signal.DRAIN:
        return "drained"
    if change.signal is Signal.UNDRAIN:
        return "undrained"
    after = change.after.state
    if before is State.STALE and after is not State.GONE:
        return "returned"
    return {State.JOINING: "not_ready"}.get(after, after.value.lower())
