"""Errors that a caller over the network sees, each with the gRPC code it becomes.

A package's own `errors.py` derives from these; the interceptor turns whatever leaves a handler
into a google.rpc.Status, so handlers raise and never call `context.abort`.
"""
# ruff: noqa: N818  the names are those of the gRPC codes

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import grpc


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of a request."""

    field: str
    """Path of the field, as in the proto ("sampling.top_p")."""
    description: str
    """What is wrong, with the value met and the limit it broke."""


class SteelyardError(Exception):
    """Any failure that has a meaning for the caller; raised by its subclasses only."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        violations: Sequence[FieldViolation] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.violations = tuple(violations)
        self.metadata = dict(metadata or {})
        self.retry_after_seconds = retry_after_seconds

    def __repr__(self) -> str:
        """Show the code, the reason and the message."""
        return f"{type(self).__name__}({self.code.name}, {self.reason}: {self.message})"


class InvalidArgument(SteelyardError):
    """Raised when a request can never be served as it is; the caller corrects the named field."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"

    @classmethod
    def of(cls, field: str, description: str, *, reason: str | None = None) -> "InvalidArgument":
        """Make the error for one bad field; the message repeats the field and what is wrong."""
        violation = FieldViolation(field, description)
        return cls(f"{field}: {description}", reason=reason, violations=[violation])


class NotFound(SteelyardError):
    """Raised when what a request names does not exist; the caller names something else."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class FailedPrecondition(SteelyardError):
    """Raised when the state of the system forbids it; the caller changes that state first."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class Aborted(SteelyardError):
    """Raised when somebody else changed the same thing; the caller reads again and retries."""

    code = grpc.StatusCode.ABORTED
    default_reason = "ABORTED"


class Unavailable(SteelyardError):
    """Raised when a part needed now does not answer; the caller retries after the given time."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class ResourceExhausted(SteelyardError):
    """Raised when a limit is reached; the caller sends less, or later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(SteelyardError):
    """Raised when the caller's deadline has passed or cannot be met; the caller gives more time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Unimplemented(SteelyardError):
    """Raised when this build or engine cannot do it at all; the caller does without."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


class Internal(SteelyardError):
    """Raised when an invariant broke; the caller reports it, the log has the traceback."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


class RedisUnavailable(Unavailable):
    """Raised when Redis does not answer; the caller retries, the operator looks at Redis."""

    default_reason = "REDIS_UNAVAILABLE"


class ChildFailed(Exception):
    """Raised when a child process ends before it is ready; the caller shows its output and stops."""


class SettingsInvalid(Exception):
    """Raised when the environment does not make valid settings; the operator corrects it."""
