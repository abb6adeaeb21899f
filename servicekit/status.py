"""Our errors as google.rpc.Status on the wire, and back."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from servicekit.errors import FieldViolation, SteelyardError

DOMAIN = "steelyard"
DETAILS_KEY = "grpc-status-details-bin"


def to_proto(error: SteelyardError) -> status_pb2.Status:
    """Describe an error: ErrorInfo always, BadRequest and RetryInfo where it says something."""
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status.details.add().Pack(info)
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for violation in error.violations:
            bad.field_violations.add(field=violation.field, description=violation.description)
        status.details.add().Pack(bad)
    if error.retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(math.ceil(error.retry_after_seconds * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def to_grpc(error: SteelyardError) -> grpc.Status:
    """Make what `context.abort_with_status` takes."""
    status: grpc.Status = rpc_status.to_status(  # type: ignore[no-untyped-call]
        to_proto(error)
    )
    return status


@dataclass(frozen=True, slots=True)
class RemoteError:
    """What a failed call said."""

    code: grpc.StatusCode
    reason: str
    """UPPER_SNAKE reason of its ErrorInfo; the code's name where there is none."""
    message: str
    violations: tuple[FieldViolation, ...]
    metadata: dict[str, str]
    retry_after_seconds: float | None


def from_rpc_error(error: grpc.aio.AioRpcError) -> RemoteError:
    """Read an error of a grpc.aio call; never raises, whatever the peer has sent."""
    reason, metadata, retry_after_seconds = error.code().name, dict[str, str](), None
    violations: list[FieldViolation] = []
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    for detail in _details(error).details:
        if _unpacked(detail, info):
            reason, metadata = info.reason, dict(info.metadata)
        elif _unpacked(detail, bad):
            violations += [FieldViolation(v.field, v.description) for v in bad.field_violations]
        elif _unpacked(detail, retry):
            retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    return RemoteError(
        code=error.code(),
        reason=reason,
        message=error.details() or "",
        violations=tuple(violations),
        metadata=metadata,
        retry_after_seconds=retry_after_seconds,
    )


def _unpacked(detail: Any, into: Message) -> bool:
    """Read one detail if it is of that type and parses."""
    try:
        return bool(detail.Unpack(into))
    except DecodeError:
        return False


def _details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """Find the rich status in the trailers; an empty one where it is missing or unreadable."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):
                return status_pb2.Status.FromString(value)
    return status_pb2.Status()
