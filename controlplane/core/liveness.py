"""The life of an instance as a table of transitions.

Rules of this module: no clock, no I/O; whoever sweeps gives ages. One life belongs to one boot of an
engine: GONE is final, and a return (a new epoch, or the same one registering again) begins a new
life. An operator's drain outlasts silence: an instance that was drained, went STALE and reports
again is DRAINING, not READY.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    """Where an instance stands; the names are those of the protocol."""

    JOINING = "JOINING"
    """Registered, engine not serving yet, or not serving any more while its agent reports."""
    READY = "READY"
    """Takes new requests."""
    DRAINING = "DRAINING"
    """Finishes what it has, takes nothing new."""
    STALE = "STALE"
    """Its reports have stopped; not used until it reports again."""
    GONE = "GONE"
    """Given up."""


class Signal(StrEnum):
    """What happens to an instance."""

    HEALTHY = "HEALTHY"
    """It reported, and its engine answers."""
    UNHEALTHY = "UNHEALTHY"
    """It reported that its engine does not answer."""
    SILENT = "SILENT"
    """Nothing was heard for longer than `stale_after_seconds`."""
    LOST = "LOST"
    """Nothing was heard for `gone_after_seconds` more."""
    LEFT = "LEFT"
    """It said that it shuts down."""
    REPLACED = "REPLACED"
    """A later boot registered under its id."""
    DRAIN = "DRAIN"
    """An operator takes it out of service."""
    UNDRAIN = "UNDRAIN"
    """An operator puts it back."""


_J, _R, _D, _S, _G = State.JOINING, State.READY, State.DRAINING, State.STALE, State.GONE

_COLUMNS = (_J, _R, _D, _S, _G)
_ROWS: Mapping[Signal, tuple[State, ...]] = {
    # signal            from JOINING, READY, DRAINING, STALE, GONE
    Signal.HEALTHY: (_R, _R, _D, _R, _G),
    Signal.UNHEALTHY: (_J, _J, _D, _J, _G),
    Signal.SILENT: (_S, _S, _S, _S, _G),
    Signal.LOST: (_G, _G, _G, _G, _G),
    Signal.LEFT: (_G, _G, _G, _G, _G),
    Signal.REPLACED: (_G, _G, _G, _G, _G),
    Signal.DRAIN: (_D, _D, _D, _S, _G),
    Signal.UNDRAIN: (_J, _R, _R, _S, _G),
}

TRANSITIONS: Mapping[tuple[State, Signal], State] = MappingProxyType(
    {
        (before, signal): after
        for signal, row in _ROWS.items()
        for before, after in zip(_COLUMNS, row, strict=True)
    }
)
"""Every state with every signal; what a drain adds to it is in `step`."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """Where one life stands. A new one: `Liveness()`."""

    state: State = State.JOINING
    drained: bool = False
    """Whether an operator wants it out of service, in whatever state it is."""


def step(before: Liveness, signal: Signal) -> Liveness:
    """Return where a life stands after a signal; equal to `before` where nothing changes."""
    if before.state is State.GONE:
        return before
    drained = signal is Signal.DRAIN or (before.drained and signal is not Signal.UNDRAIN)
    after = TRANSITIONS[before.state, signal]
    if drained and after in (State.JOINING, State.READY):
        after = State.DRAINING
    return Liveness(after, drained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How often instances report and when silence counts."""

    report_interval_seconds: float = 0.1
    stale_after_seconds: float = 0.3
    """Three reports missed."""
    gone_after_seconds: float = 5.0
    """Counted from when it turned stale."""
    max_reports_per_second: float = 2_000.0
    """Over all instances; above it, the interval grows."""

    def steered(self, instances: int) -> "Timing":
        """Return the timing for that many instances: never more often than the limit allows."""
        interval_seconds = max(
            self.report_interval_seconds, instances / self.max_reports_per_second
        )
        return Timing(
            report_interval_seconds=interval_seconds,
            stale_after_seconds=max(self.stale_after_seconds, 3.0 * interval_seconds),
            gone_after_seconds=self.gone_after_seconds,
            max_reports_per_second=self.max_reports_per_second,
        )


def silence(age_seconds: float, timing: Timing) -> Signal | None:
    """Return what a silence of that length means; None while it means nothing."""
    if age_seconds > timing.stale_after_seconds + timing.gone_after_seconds:
        return Signal.LOST
    if age_seconds > timing.stale_after_seconds:
        return Signal.SILENT
    return None
