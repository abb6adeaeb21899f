"""What the core raises."""

from enum import Enum


class RejectReason(Enum):
    """Why a request will not be served."""

    NO_PREFILL_INSTANCE = "NO_PREFILL_INSTANCE"
    NO_DECODE_INSTANCE = "NO_DECODE_INSTANCE"
    NO_PAIR = "NO_PAIR"
    RETRIES_EXHAUSTED = "RETRIES_EXHAUSTED"
    STREAM_BROKEN = "STREAM_BROKEN"
    QUEUE_FULL = "QUEUE_FULL"


class NoCandidateError(Exception):
    """No instance can take the request; raised while placing it.

    The scheduler turns it into a Reject with `reason`; the router answers UNAVAILABLE.
    """

    def __init__(self, reason: RejectReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class UnknownPolicyError(ValueError):
    """A policy was asked for by a name that is not registered.

    The caller shows the names that are; the message holds them.
    """


class InvalidSettingError(ValueError):
    """A policy or predictor setting is outside its range; raised on construction.

    The message names the setting, its value and the range; the caller corrects the configuration.
    """
