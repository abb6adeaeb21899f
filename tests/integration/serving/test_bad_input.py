"""Bad requests, over gRPC: each is refused by name and limit, and none leaves anything behind."""

import math

import grpc
import pytest
from steelyard.v1 import router_pb2, types_pb2

from servicekit.channel import open_channel
from servicekit.status import RemoteError, from_rpc_error
from tests.support.requests import ids_request
from tests.support.whole_cluster import WholeCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

GENERATE = "/steelyard.v1.RouterService/Generate"


def sampled(**values) -> router_pb2.GenerateRequest:
    """Return a request with these sampling parameters."""
    return ids_request([5], 8, sampling=types_pb2.SamplingParams(**values))


def both() -> router_pb2.GenerateRequest:
    """Return a request with text and ids."""
    message = ids_request([5], 8)
    message.text = "x"
    return message


BAD = [
    ("prompt", "empty", router_pb2.GenerateRequest(max_tokens=8)),
    ("prompt", "empty", router_pb2.GenerateRequest(max_tokens=8, text="")),
    ("prompt", "both", both()),
    ("max_tokens", "at least 1", ids_request([5], 0)),
    ("max_tokens", "4096", ids_request([5] * 4_000, 97)),
    ("max_tokens", "4096", ids_request([5], 2**32 - 1)),
    ("max_tokens", "4096", router_pb2.GenerateRequest(text="x" * 4_096, max_tokens=1)),
    ("policy", "there are", ids_request([5], 8, policy="alphabetical")),
    ("slo_class", "loose, tight", ids_request([5], 8, slo_class="platinum")),
    ("sampling.temperature", "at least 0", sampled(temperature=-1.0)),
    ("sampling.temperature", "at least 0", sampled(temperature=math.nan)),
    ("sampling.top_p", "at most 1", sampled(top_p=1.5)),
    ("sampling.top_k", "at least 1", sampled(top_k=0)),
    ("sampling.stop", "empty", sampled(stop=[""])),
    ("sampling.min_tokens", "at most", sampled(min_tokens=9)),
    ("sampling.extra_json", "JSON", sampled(extra_json="{")),
    ("token_ids.ids", "below 384", ids_request([5, 384], 8)),
    ("token_ids.ids", "below 384", ids_request([2**32 - 1], 8)),
]


async def refused(cluster: WholeCluster, message, **call) -> RemoteError:
    """Return how a request was refused; nothing came before the refusal."""
    heard = await cluster.generate(message, **call)
    assert heard.messages == []
    assert heard.error is not None
    return heard.error


@pytest.mark.parametrize(("field", "limit", "message"), BAD)
async def test_bad_fields_are_named_with_their_limit(cluster, field, limit, message):
    """INVALID_ARGUMENT carries a BadRequest that names the field and says the limit."""
    error = await refused(cluster, message)

    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in error.violations] == [field]
    assert limit in error.violations[0].description
    assert cluster.left() == {}


@pytest.mark.parametrize(("field", "limit", "message"), BAD[:3] + BAD[-2:])
@pytest.mark.parametrize("method", ["Route", "Explain"])
async def test_decisions_refuse_the_same(cluster, method, field, limit, message):
    """Route and Explain refuse what Generate refuses, in the same words."""
    make = {"Route": router_pb2.RouteRequest, "Explain": router_pb2.ExplainRequest}[method]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(cluster.stub, method)(make(request=message))
    error = from_rpc_error(caught.value)

    assert [violation.field for violation in error.violations] == [field]
    assert limit in error.violations[0].description


async def test_an_unknown_model_is_not_found_and_told_what_there_is(cluster):
    """NOT_FOUND (UNKNOWN_MODEL) names the field and the models served."""
    error = await refused(cluster, ids_request([5], 8, model="gpt-0"))

    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL")
    assert error.metadata == {"field": "model", "known": "tiny"}
    assert cluster.left() == {}


async def test_a_policy_in_metadata_is_checked_as_well(cluster):
    """An unknown policy is refused wherever it comes from."""
    metadata = (("x-steelyard-policy", "alphabetical"),)
    error = await refused(cluster, ids_request([5], 8), metadata=metadata)

    assert error.reason == "UNKNOWN_POLICY"
    assert [violation.field for violation in error.violations] == ["policy"]


@pytest.mark.parametrize("seconds", [-1, 0, 61])
async def test_a_reservations_time_has_limits(cluster, seconds):
    """Longer than a minute, or below nothing, is refused; nothing is no reservation."""
    request = router_pb2.RouteRequest(request=ids_request([5], 8))
    request.reserve.FromSeconds(seconds)
    if seconds == 0:
        assert (await cluster.stub.Route(request)).reservation_id == ""
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub.Route(request)

    assert [v.field for v in from_rpc_error(caught.value).violations] == ["reserve"]


@pytest.mark.parametrize("size", [5_000_000, 10_000_000])
async def test_a_message_of_many_megabytes_is_refused_with_sizes(cluster, size):
    """RESOURCE_EXHAUSTED tells the message's size and the limit."""
    error = await refused(cluster, router_pb2.GenerateRequest(text="x" * size, max_tokens=1))

    assert (error.code, error.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "MESSAGE_TOO_LARGE",
    )
    assert int(error.metadata["message_bytes"]) > size
    assert error.metadata["max_message_bytes"] == str(4 * 1024 * 1024)
    assert cluster.left() == {}


async def test_text_that_is_not_utf8_is_refused_by_field(cluster):
    """Raw bytes in the text field are INVALID_ARGUMENT naming it, not a dropped connection."""
    body = (
        b"\x12\x04\xff\xfe\xfd\xfc" + router_pb2.GenerateRequest(max_tokens=4).SerializeToString()
    )
    async with open_channel(cluster.router.server.address) as channel:
        method = channel.unary_stream(
            GENERATE, request_serializer=bytes, response_deserializer=bytes
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in method(body):
                pass
    error = from_rpc_error(caught.value)

    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_UTF8")
    assert [violation.field for violation in error.violations] == ["text"]


@pytest.mark.parametrize("seconds", [0.0, 1e-6, -1.0])
async def test_a_deadline_that_has_passed_is_refused(cluster, seconds):
    """DEADLINE_EXCEEDED, and nothing was charged or sent."""
    error = await refused(cluster, ids_request([5] * 100, 8), timeout=seconds)

    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert cluster.left() == {}


@pytest.mark.parametrize(
    ("role", "reason"), [("prefill", "NO_PREFILL_INSTANCE"), ("decode", "NO_DECODE_INSTANCE")]
)
async def test_without_an_instance_of_a_role_it_is_unavailable(slow_cluster, role, reason):
    """With all instances of a role drained, UNAVAILABLE says which role is missing."""
    names = [name for name in slow_cluster.agents if name.startswith(role)]
    await slow_cluster.drain(*names)
    try:
        error = await refused(slow_cluster, ids_request([5], 8))
    finally:
        await slow_cluster.drain(*names, undo=True)

    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, reason)
    assert error.retry_after_seconds == 1.0
    assert slow_cluster.left() == {}


async def test_a_drained_instance_is_passed_over(slow_cluster):
    """New requests go to the instances that are not drained."""
    await slow_cluster.drain("decode-0")
    try:
        message = ids_request([5], 8, want_receipt=True, policy="round_robin")
        heard = [await slow_cluster.generate(message) for _ in range(4)]
    finally:
        await slow_cluster.drain("decode-0", undo=True)

    assert {h.messages[0].receipt.decode_instance_id for h in heard} == {"decode-1"}
