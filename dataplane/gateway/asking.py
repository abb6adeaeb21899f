"""Who asks, and what for: everything that comes in headers."""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steelyard.v1 import types_pb2

from dataplane.gateway.errors import HttpFault
from dataplane.gateway.values import HttpRequest
from servicekit.tracing import REQUEST_ID_KEY, TRACEPARENT_KEY, CallContext, enter_call

CLASS_HEADER = b"x-steelyard-slo-class"
POLICY_HEADER = b"x-steelyard-policy"
DECISION_HEADER = b"x-steelyard-decision"
SESSION_HEADER = b"x-session-id"
_TTFT_HEADERS = (b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")
_TPOT_HEADERS = (b"x-llm-d-slo-tpot-ms", b"x-slo-tpot-ms")
_MAX_MILLISECONDS = 1e9
_MAX_SESSION_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Asker:
    """One caller's wishes.

    Attributes:
        call: Request id and trace, bound to the running task.
        tenant: By API key; empty where none are set.
        slo_class: Its name; empty is the default.
        slo: Targets of this request alone; empty fields take the class's.
        policy: For experiments; empty is the router's own.
        session_id: Kept in the log line.
        wants_decision: Whether the answer tells where it ran and why.
    """

    call: CallContext
    tenant: str
    slo_class: str
    slo: types_pb2.SloTargets
    policy: str
    session_id: str
    wants_decision: bool


class ApiKeys:
    """Tenants by their keys; with no keys at all everybody is let in.

    Args:
        keys: Keys by tenant.
    """

    def __init__(self, keys: Mapping[str, Sequence[str]]) -> None:
        self._keys = [(key.encode(), tenant) for tenant, many in keys.items() for key in many]

    def tenant_of(self, request: HttpRequest) -> str:
        """Return who asks.

        Raises:
            HttpFault: The key is missing or nobody's.
        """
        if not self._keys:
            return ""
        scheme, _, key = request.header(b"authorization").partition(" ")
        given = key.strip().encode() if scheme.lower() == "bearer" else b""
        # All are compared, in constant time each: the time says nothing about which is close.
        found = [tenant for known, tenant in self._keys if hmac.compare_digest(known, given)]
        if not found:
            raise HttpFault(401, "the API key is missing or unknown")
        return found[0]


def asker_of(request: HttpRequest, keys: ApiKeys) -> Asker:
    """Read a request's headers and bind its call to the running task.

    Raises:
        HttpFault: The key is wrong, or a header has a value that it cannot have.
    """
    call = enter_call(
        (
            (REQUEST_ID_KEY, request.header(b"x-request-id")),
            (TRACEPARENT_KEY, request.header(b"traceparent")),
        )
    )
    slo = types_pb2.SloTargets()
    ttft, tpot = _milliseconds(request, _TTFT_HEADERS), _milliseconds(request, _TPOT_HEADERS)
    if ttft is not None:
        slo.ttft.FromNanoseconds(round(ttft * 1e6))
    if tpot is not None:
        slo.tpot.FromNanoseconds(round(tpot * 1e6))
    return Asker(
        call=call,
        tenant=keys.tenant_of(request),
        slo_class=request.header(CLASS_HEADER),
        slo=slo,
        policy=request.header(POLICY_HEADER),
        session_id=request.header(SESSION_HEADER)[:_MAX_SESSION_CHARACTERS],
        wants_decision=request.header(DECISION_HEADER).lower() not in ("", "0", "false", "no"),
    )


def _milliseconds(request: HttpRequest, names: Sequence[bytes]) -> float | None:
    """Return the value of the first of these headers that is there."""
    for name in names:
        text = request.header(name)
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.0 < value <= _MAX_MILLISECONDS:
            header = name.decode()
            raise HttpFault(400, f"{header}: is {text!r}, not a time in milliseconds", param=header)
        return value
    return None
