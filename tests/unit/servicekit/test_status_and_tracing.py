"""Statuses on the wire and trace context in metadata."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from steelyard.v1 import types_pb2

from servicekit.decoding import invalid_utf8_field
from servicekit.errors import FieldViolation, InvalidArgument, SteelyardError, Unavailable
from servicekit.status import from_rpc_error, to_grpc
from servicekit.tracing import add_log_fields, enter_call, outgoing_metadata

text = st.text(max_size=20)


def over_the_wire(error: SteelyardError, trailers=None):
    """Read an error as a client would."""
    status = to_grpc(error)
    trailing = status.trailing_metadata if trailers is None else trailers
    return from_rpc_error(
        grpc.aio.AioRpcError(
            status.code,
            initial_metadata=grpc.aio.Metadata(),
            trailing_metadata=grpc.aio.Metadata(*trailing),
            details=status.details,
        )
    )


@given(
    message=text,
    violations=st.lists(st.builds(FieldViolation, text, text), max_size=3),
    metadata=st.dictionaries(text, text, max_size=3),
    retry=st.none() | st.floats(0, 1e6),
)
def test_an_error_survives_the_wire(message, violations, metadata, retry):
    """Code, reason, message, violations, metadata and retry advice come back as they were."""
    sent = Unavailable(
        message,
        reason="NO_ENGINE",
        violations=violations,
        metadata=metadata,
        retry_after_seconds=retry,
    )
    got = over_the_wire(sent)

    assert (got.code, got.reason, got.message) == (sent.code, "NO_ENGINE", message)
    assert got.violations == tuple(violations)
    assert got.metadata == metadata
    assert got.retry_after_seconds == (None if retry is None else pytest.approx(retry, abs=1e-8))


@pytest.mark.parametrize("trailers", [(), (("grpc-status-details-bin", b"\xff\xff"),)])
def test_an_error_without_details_is_named_by_its_code(trailers):
    """A peer that sends no details, or rubbish, still makes a readable error."""
    got = over_the_wire(InvalidArgument("no"), trailers)

    assert (got.reason, got.message, got.violations) == ("INVALID_ARGUMENT", "no", ())


def test_the_field_that_is_not_utf8_is_found_below():
    """The path leads through messages to the string."""
    good = types_pb2.Instance(
        engine=types_pb2.EngineInfo(instance_id="a", model="m")
    ).SerializeToString()
    bad = good.replace(b"\x0a\x01a", b"\x0a\x01\xff")

    assert invalid_utf8_field(types_pb2.Instance.DESCRIPTOR, good) is None
    assert invalid_utf8_field(types_pb2.Instance.DESCRIPTOR, bad) == "engine.instance_id"


@pytest.mark.parametrize(
    "header",
    ["", "rubbish", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01"],
)
def test_a_bad_traceparent_starts_a_new_trace(header):
    """What is not a trace context is replaced, never passed on."""
    call = enter_call([("traceparent", header), ("x-request-id", "bad id\n")])

    assert call.trace_id not in header
    assert len(call.trace_id) == 32
    assert call.request_id != "bad id\n"
    assert outgoing_metadata() == (
        ("traceparent", call.traceparent),
        ("x-request-id", call.request_id),
    )


def test_log_fields_belong_to_the_call():
    """Fields added while a call runs are the call's own."""
    call = enter_call([("x-request-id", "r1")])
    add_log_fields(tokens=3)

    assert (call.request_id, call.log_fields) == ("r1", {"tokens": 3})
