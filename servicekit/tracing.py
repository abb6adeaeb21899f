"""Who is asking: request id and W3C trace context, carried in metadata and in context variables."""

import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
MAX_REQUEST_ID_CHARACTERS = 128

_TRACEPARENT = re.compile(r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")
_REQUEST_ID = re.compile(r"^[\x21-\x7e]+$")


@dataclass(slots=True)
class CallContext:
    """The call being served; one object a call, so handlers may add to its log fields."""

    request_id: str
    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits: this hop's own span."""
    trace_flags: str
    """2 hex digits."""
    log_fields: dict[str, Any] = field(default_factory=dict)
    """What the handler adds to the call's one log line."""

    @property
    def traceparent(self) -> str:
        """The header that makes the next hop a child of this one."""
        return f"00-{self.trace_id}-{self.span_id}-{self.trace_flags}"


_current: ContextVar[CallContext | None] = ContextVar("steelyard_call", default=None)


def current_call() -> CallContext | None:
    """Return the call that this task serves; None outside of one."""
    return _current.get()


def enter_call(metadata: Iterable[tuple[str, str | bytes]]) -> CallContext:
    """Make the call's context from its metadata and bind it to the running task.

    A missing or malformed traceparent starts a new trace, as the W3C text asks; a request id that
    is too long or not printable is replaced.
    """
    values = {key: value for key, value in metadata if isinstance(value, str)}
    request_id = values.get(REQUEST_ID_KEY, "")
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS or not _REQUEST_ID.match(request_id):
        request_id = secrets.token_hex(8)
    match = _TRACEPARENT.match(values.get(TRACEPARENT_KEY, ""))
    if match and set(match[1]) != {"0"} and set(match[2]) != {"0"}:
        trace_id, flags = match[1], match[3]
    else:
        trace_id, flags = secrets.token_hex(16), "00"
    call = CallContext(request_id, trace_id, secrets.token_hex(8), flags)
    _current.set(call)
    return call


def add_log_fields(**fields: Any) -> None:
    """Add fields to the running call's one log line; does nothing outside of a call."""
    call = _current.get()
    if call is not None:
        call.log_fields.update(fields)


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata for a call made on behalf of the running one; empty outside of a call."""
    call = _current.get()
    if call is None:
        return ()
    return ((TRACEPARENT_KEY, call.traceparent), (REQUEST_ID_KEY, call.request_id))
