"""What the router answers when it cannot serve, each with the gRPC code it becomes."""

import grpc

from dataplane.core.errors import RejectReason
from servicekit.errors import ResourceExhausted, SteelyardError, Unavailable

_WORDS = {
    RejectReason.NO_PREFILL_INSTANCE: "no prefill instance is ready",
    RejectReason.NO_DECODE_INSTANCE: "no decode instance is ready",
    RejectReason.NO_PAIR: "no prefill instance shares its KV layout with a decode instance",
    RejectReason.RETRIES_EXHAUSTED: "every instance that was tried has failed",
    RejectReason.STREAM_BROKEN: "the decode instance failed after the first token",
    RejectReason.QUEUE_FULL: "the router's queue is full",
}


class RequestCancelled(SteelyardError):  # noqa: N818
    """Raised when a request was ended by `Cancel`; its caller wanted that."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


def rejection(reason: RejectReason, cause: str = "") -> SteelyardError:
    """Return the error for a request that will not be served; the caller retries later."""
    message = _WORDS[reason] + (f": {cause}" if cause else "")
    if reason is RejectReason.QUEUE_FULL:
        return ResourceExhausted(message, reason=reason.value, retry_after_seconds=1.0)
    return Unavailable(message, reason=reason.value, retry_after_seconds=1.0)
