"""What happens to a scheduler, and what it wants done."""

from dataclasses import dataclass
from enum import Enum

from dataplane.core.cluster import Snapshot
from dataplane.core.errors import RejectReason


class Leg(Enum):
    """The two halves of a request's way."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """A prompt is prefilled; its KV is held until `handoff_expires_at` (scheduler clock).

    `engine_seconds` is what the agent measured between its arrival and the engine's answer, 0 where
    it did not: the rest of the time was spent on the way.
    """

    request_id: str
    handoff_expires_at: float
    cached_prompt_tokens: int = 0
    engine_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TokensStreamed:
    """`count` more tokens came from the decode engine."""

    request_id: str
    count: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation is complete."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A leg failed on its instance.

    Attributes:
        retryable: False when another instance would fail as well.
        at_fault: False when the instance may be tried again: a hand-off that has run out or was
            used says nothing against the engine that refused it.
    """

    request_id: str
    leg: Leg
    retryable: bool = True
    at_fault: bool = True


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client is gone, or its deadline passed."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SnapshotArrived:
    """The cluster was reported anew."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Tick:
    """The time a scheduler asked to be woken at has come."""


Event = PrefillDone | TokensStreamed | Finished | Failed | Cancelled | SnapshotArrived | Tick


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Send the prefill leg there."""

    request_id: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Send the decode leg there; without a prefill before it, the engine computes the prompt."""

    request_id: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell the client no."""

    request_id: str
    reason: RejectReason


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at that time of the scheduler's clock; replaces an earlier wish."""

    at: float


Action = StartPrefill | StartDecode | Reject | WakeAt
