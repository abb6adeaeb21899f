"""What a router's error becomes over HTTP."""

import pytest

from dataplane.core.errors import RejectReason
from dataplane.gateway.errors import error_body, error_object, fault_of, refused
from dataplane.router.errors import RequestCancelled, rejection
from servicekit.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SteelyardError,
    Unimplemented,
)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidArgument.of("sampling.top_p", "is 7"), 400, "BadRequestError"),
        (FailedPrecondition("no tokenizer", reason="NO_TOKENIZER"), 400, "BadRequestError"),
        (Unimplemented("no"), 400, "BadRequestError"),
        (NotFound("model", reason="UNKNOWN_MODEL"), 404, "NotFoundError"),
        (DeadlineExceeded("late"), 504, "TimeoutError"),
        (RequestCancelled("gone"), 503, "ServiceUnavailableError"),
        (rejection(RejectReason.QUEUE_FULL), 429, "RateLimitError"),
        (rejection(RejectReason.NO_DECODE_INSTANCE), 503, "ServiceUnavailableError"),
        (rejection(RejectReason.RETRIES_EXHAUSTED, "d0: x"), 503, "ServiceUnavailableError"),
    ],
)
def test_each_error_has_its_status_and_kind(error: SteelyardError, status, kind):
    """GRPC codes become HTTP statuses, and the body names them as vLLM does."""
    fault = fault_of(error, "prompt")

    assert fault.status == status
    assert error_object(fault)["error"]["type"] == kind
    assert error_object(fault)["error"]["code"] == status
    assert error.message in error_body(fault).decode()


@pytest.mark.parametrize("status", [429, 503])
def test_who_should_come_back_is_told_when(status):
    """Retry-After is whole seconds, rounded up, and there without being asked for."""
    error = {429: ResourceExhausted("full"), 503: rejection(RejectReason.NO_PAIR)}[status]
    assert fault_of(error, "prompt").headers() == [(b"retry-after", b"1")]
    error.retry_after_seconds = 2.2
    assert fault_of(error, "prompt").headers() == [(b"retry-after", b"3")]
    assert refused("n", "is 0").headers() == []


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.top_p", "top_p"),
        ("token_ids.ids", "messages"),
        ("prompt_token_ids", "messages"),
        ("max_tokens", "max_tokens"),
        ("slo_class", "slo_class"),
    ],
)
def test_a_field_has_the_clients_name_for_it(field, param):
    """Names of the protocol are translated to those of the body."""
    assert fault_of(InvalidArgument.of(field, "is wrong"), "messages").param == param
