"""The time a caller gives, as a value that is passed on to every outgoing call.

grpc.aio does not propagate deadlines: a handler makes one `Deadline` and gives `timeout()` to each
call that it makes itself.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from servicekit.clock import Clock
from servicekit.errors import DeadlineExceeded


class HasTimeRemaining(Protocol):
    """The part of a servicer context that is read here."""

    def time_remaining(self) -> float | None:
        """Return the seconds left; None where the caller set no deadline."""
        ...


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on the monotonic clock; infinitely far where the caller set none."""

    clock: Clock
    at_monotonic_seconds: float = math.inf

    @classmethod
    def after(cls, seconds: float | None, clock: Clock) -> "Deadline":
        """Make the deadline `seconds` from now; None for no deadline."""
        return cls(clock, math.inf if seconds is None else clock.monotonic() + seconds)

    @classmethod
    def from_context(cls, context: HasTimeRemaining, clock: Clock) -> "Deadline":
        """Take over the deadline of a gRPC call."""
        return cls.after(context.time_remaining(), clock)

    def remaining_seconds(self) -> float:
        """Seconds left, negative once it has passed, infinite where there is none."""
        return self.at_monotonic_seconds - self.clock.monotonic()

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining_seconds() <= 0

    def timeout(self, margin_seconds: float = 0.0) -> float | None:
        """Seconds to give to an outgoing call, None where there is no deadline.

        Args:
            margin_seconds: kept back, so that the answer still gets to our own caller.

        Raises:
            DeadlineExceeded: less than the margin is left.
        """
        if math.isinf(self.at_monotonic_seconds):
            return None
        left_seconds = self.remaining_seconds() - margin_seconds
        if left_seconds <= 0:
            raise DeadlineExceeded(
                f"{self.remaining_seconds():.3f} s are left of the deadline, "
                f"{margin_seconds:.3f} s are needed for the answer"
            )
        return left_seconds

    def check(self) -> None:
        """Raise `DeadlineExceeded` once the deadline has passed."""
        if self.passed:
            raise DeadlineExceeded(f"the deadline passed {-self.remaining_seconds():.3f} s ago")

    def sooner(self, seconds: float | None) -> "Deadline":
        """Return the earlier of this deadline and one `seconds` from now."""
        other = Deadline.after(seconds, self.clock)
        return min(self, other, key=lambda deadline: deadline.at_monotonic_seconds)
