"""Makes steps last as long as they are modelled to. All times here are real seconds.

Two things keep the mean exact on a machine that wakes threads late:

- *carry*: where the engine goes from one step straight to the next, the time between (it schedules,
  hands tokens out) counts as part of the step, because the model prices whole cycles. It does so
  when both steps share a request, or when the pause is short.
- *debt*: a step is due when the one before was due plus its own time, not when that one ended. So
  a late step is followed by a shorter wait, up to a limit beyond which lateness is not made up for.
"""

from dataclasses import dataclass
from typing import Protocol

from steelyard_enginekit.paced.shape import StepShape


class PaceClock(Protocol):
    """Real time, and waiting in it."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`; > 0."""
        ...


@dataclass(frozen=True, slots=True)
class PacedStep:
    """How a step went.

    Attributes:
        shape: What it computed.
        modelled_seconds: What it was to take.
        real_seconds: What it took, from the end of the step before where it was carried.
        late_seconds: How much later than due it ended; negative only by the clock's grain.
        busy_seconds: From its begin until its tokens were there: what the machine needed.
        carried: It followed the step before without a pause.
    """

    shape: StepShape
    modelled_seconds: float
    real_seconds: float
    late_seconds: float
    busy_seconds: float
    carried: bool


class Pacer:
    """Told when a step begins and when its tokens are there; waits for the rest.

    Args:
        clock: What to wait by.
        carry_seconds: Longest pause that counts as part of the step after it, where the two steps
            have no request in common.
        debt_seconds: Most lateness that is made up for.
    """

    def __init__(self, clock: PaceClock, *, carry_seconds: float, debt_seconds: float) -> None:
        self._clock = clock
        self._carry_seconds = carry_seconds
        self._debt_seconds = debt_seconds
        self._begin = 0.0
        self._ended: float | None = None
        self._late_seconds = 0.0
        self._shape = StepShape((), 0, 0, frozenset())
        self._modelled_seconds = 0.0
        self._carried = False

    def begin(self, shape: StepShape, modelled_seconds: float) -> None:
        """A step begins."""
        self._begin = self._clock.monotonic()
        self._carried = self._ended is not None and (
            self._begin - self._ended <= self._carry_seconds
            or not shape.requests.isdisjoint(self._shape.requests)
        )
        self._shape, self._modelled_seconds = shape, modelled_seconds

    def end(self) -> PacedStep:
        """Its tokens are there: wait until it is due."""
        since = self._begin
        due = self._begin + self._modelled_seconds
        if self._carried and self._ended is not None:
            since = self._ended
            made_up = min(max(self._late_seconds, 0.0), self._debt_seconds)
            due = self._ended - made_up + self._modelled_seconds
        computed = self._clock.monotonic()
        if due > computed:
            self._clock.sleep(due - computed)
        ended = self._clock.monotonic()
        self._ended, self._late_seconds = ended, ended - due
        return PacedStep(
            shape=self._shape,
            modelled_seconds=self._modelled_seconds,
            real_seconds=ended - since,
            late_seconds=ended - due,
            busy_seconds=computed - self._begin,
            carried=self._carried,
        )
