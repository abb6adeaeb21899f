"""Seconds as the protocol's Duration and Timestamp, and back; to the nanosecond."""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

_PER_SECOND = 1_000_000_000


def duration(seconds: float) -> Duration:
    """Write seconds as a Duration."""
    message = Duration()
    message.FromNanoseconds(round(seconds * _PER_SECOND))
    return message


def timestamp(unix_seconds: float) -> Timestamp:
    """Write seconds since 1970 as a Timestamp."""
    message = Timestamp()
    message.FromNanoseconds(round(unix_seconds * _PER_SECOND))
    return message


def seconds_of(message: Duration | Timestamp) -> float:
    """Read either."""
    return message.ToNanoseconds() / _PER_SECOND


def seconds_if_set(message: Message, field: str) -> float | None:
    """Read a Duration or Timestamp of a message; None where it is absent."""
    return seconds_of(getattr(message, field)) if message.HasField(field) else None
