"""Reading requests so that a bad one is refused by name rather than by a bare gRPC error.

gRPC's own answers to a message that is too long or does not parse carry no details; here both
become a `SteelyardError`, which the interceptor sends as any other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from servicekit.errors import InvalidArgument, ResourceExhausted, SteelyardError

_LENGTH_DELIMITED = 2


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands for a request that could not be read; the interceptor raises its error."""

    error: SteelyardError


def guarded(decode: Callable[[bytes], Any], max_message_bytes: int) -> Callable[[bytes], Any]:
    """Wrap a request deserializer: it returns the message, or `Refused` where it cannot."""

    def read(data: bytes) -> Any:
        if len(data) > max_message_bytes:
            return Refused(
                ResourceExhausted(
                    f"the message has {len(data)} bytes, at most {max_message_bytes} are read",
                    reason="MESSAGE_TOO_LARGE",
                    metadata={
                        "message_bytes": str(len(data)),
                        "max_message_bytes": str(max_message_bytes),
                    },
                )
            )
        try:
            return decode(data)
        except (DecodeError, UnicodeDecodeError, ValueError):
            return Refused(_undecodable(decode, data))

    return read


def _undecodable(decode: Callable[[bytes], Any], data: bytes) -> InvalidArgument:
    """Name the string field that is not UTF-8; the message as a whole where it is something else."""
    owner = getattr(decode, "__self__", None)
    descriptor = getattr(owner, "DESCRIPTOR", None)
    path = invalid_utf8_field(descriptor, data) if isinstance(descriptor, Descriptor) else None
    if path is not None:
        return InvalidArgument.of(path, "is not valid UTF-8", reason="INVALID_UTF8")
    name = descriptor.full_name if isinstance(descriptor, Descriptor) else "message"
    return InvalidArgument.of(
        "request", f"{len(data)} bytes do not parse as {name}", reason="UNPARSABLE_MESSAGE"
    )


def invalid_utf8_field(descriptor: Descriptor, data: bytes) -> str | None:
    """Return the path of the first string field whose bytes are not UTF-8; None without one."""
    raw: Message = Empty()
    try:
        raw.ParseFromString(data)
    except DecodeError:
        return None
    fields: Any = UnknownFieldSet(raw)
    for field in fields:
        known = descriptor.fields_by_number.get(field.field_number)
        if known is None or field.wire_type != _LENGTH_DELIMITED:
            continue
        if known.type == FieldDescriptor.TYPE_STRING and not _is_utf8(field.data):
            return known.name
        if known.type == FieldDescriptor.TYPE_MESSAGE and known.message_type is not None:
            below = invalid_utf8_field(known.message_type, field.data)
            if below is not None:
                return f"{known.name}.{below}"
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
