"""Scripted exchanges of Envoy's external processor: buffered and full duplex, subsets, refusals."""

import json

import grpc
import pytest
import pytest_asyncio
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.channel import open_channel
from tests.support.gateway_cluster import gateway_cluster
from tests.support.waiting import eventually

ENDPOINTS = {"p0": "10.0.0.1:8000", "d0": "10.0.0.2:8000", "d1": "10.0.0.3:8000"}
MODES = processing_mode_pb2.ProcessingMode
DESTINATION, PREFILLER = "x-gateway-destination-endpoint", "x-prefiller-host-port"


class Envoy:
    """Plays Envoy's part of one exchange."""

    def __init__(self, stub, *, duplex=False, subset=None) -> None:
        self.call = stub.Process()
        self.duplex = duplex
        self.subset = subset

    async def say(self, **fields) -> None:
        """Send one message."""
        await self.call.write(ext_proc.ProcessingRequest(**fields))

    async def headers(self, path="/v1/completions", *, end_of_stream=False, **headers) -> None:
        """Send the request's headers, with what Envoy says beside them."""
        message = ext_proc.ProcessingRequest()
        listed = {":method": "POST", ":path": path} | {
            k.replace("_", "-"): v for k, v in headers.items()
        }
        for name, value in listed.items():
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        message.request_headers.end_of_stream = end_of_stream
        mode = MODES.FULL_DUPLEX_STREAMED if self.duplex else MODES.BUFFERED
        message.protocol_config.request_body_mode = mode
        if self.subset is not None:
            hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            hint.update({"x-gateway-destination-endpoint-subset": self.subset})
        await self.call.write(message)

    async def body(self, data: bytes, *, end_of_stream=True) -> None:
        """Send a piece of the body."""
        await self.say(request_body=ext_proc.HttpBody(body=data, end_of_stream=end_of_stream))

    async def hear(self) -> ext_proc.ProcessingResponse:
        """Read one answer."""
        answer = await self.call.read()
        assert answer is not grpc.aio.EOF
        return answer

    async def done(self) -> None:
        """End the exchange."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF


def set_headers(response: ext_proc.CommonResponse) -> dict[str, str]:
    """The headers that a mutation sets."""
    return {o.header.key: o.header.raw_value.decode() for o in response.header_mutation.set_headers}


def body(**fields) -> bytes:
    """A completion."""
    return json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4} | fields).encode()


@pytest_asyncio.fixture(name="cluster")
async def _cluster(redis_url):
    async with gateway_cluster(redis_url, gateway_picker_endpoints=ENDPOINTS) as cluster:
        yield cluster
        await eventually(lambda: not cluster.left())


@pytest_asyncio.fixture(name="stub")
async def _stub(cluster):
    async with open_channel(cluster.router.server.address) as channel:
        yield external_processor_pb2_grpc.ExternalProcessorStub(channel)


@pytest.mark.asyncio
async def test_a_buffered_body_is_given_both_engines(cluster, stub):
    """Headers pass; the body's answer sets the destination in header and metadata, and the prefill."""
    envoy = Envoy(stub)
    await envoy.headers()
    first = await envoy.hear()
    assert first.WhichOneof("response") == "request_headers"
    await envoy.body(body())
    answer = await envoy.hear()
    headers = set_headers(answer.request_body.response)
    assert headers[DESTINATION] in (ENDPOINTS["d0"], ENDPOINTS["d1"])
    assert headers[PREFILLER] == ENDPOINTS["p0"]
    assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == headers[DESTINATION]
    assert answer.request_body.response.clear_route_cache
    (driver,) = cluster.router.fleet
    assert len(list(driver.pool.ledger.request_ids())) == 1
    await envoy.say(response_headers=ext_proc.HttpHeaders())
    assert (await envoy.hear()).WhichOneof("response") == "response_headers"
    await envoy.done()


@pytest.mark.asyncio
async def test_a_full_duplex_body_comes_back_after_the_headers(stub):
    """In pieces of at most 62 KB that together are the body; a conversation's prompt is counted."""
    text = "x" * 1500
    data = json.dumps(
        {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "pad": "y" * 130_000}
    ).encode()
    envoy = Envoy(stub, duplex=True)
    await envoy.headers("/v1/chat/completions")
    for start in range(0, len(data), 40_000):
        piece = data[start : start + 40_000]
        await envoy.body(piece, end_of_stream=start + 40_000 >= len(data))
    first = await envoy.hear()
    assert set_headers(first.request_headers.response)[PREFILLER] == ENDPOINTS["p0"]
    echoed, ended = b"", False
    while not ended:
        streamed = (await envoy.hear()).request_body.response.body_mutation.streamed_response
        assert len(streamed.body) <= 62_000
        echoed, ended = echoed + streamed.body, streamed.end_of_stream
    assert echoed == data
    await envoy.say(response_body=ext_proc.HttpBody(body=b"abc", end_of_stream=True))
    streamed = (await envoy.hear()).response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"abc", True)
    await envoy.done()


@pytest.mark.asyncio
async def test_only_endpoints_of_the_subset_are_picked(stub):
    """As a list and as text; without a decode engine in it Envoy is told 503."""
    for subset in ([ENDPOINTS["p0"], ENDPOINTS["d1"]], f"{ENDPOINTS['p0']}, {ENDPOINTS['d1']}"):
        for _ in range(4):
            envoy = Envoy(stub, subset=subset)
            await envoy.headers()
            await envoy.hear()
            await envoy.body(body())
            answer = await envoy.hear()
            assert set_headers(answer.request_body.response)[DESTINATION] == ENDPOINTS["d1"]
            await envoy.done()
    envoy = Envoy(stub, subset=[ENDPOINTS["p0"], "10.9.9.9:1"])
    await envoy.headers()
    await envoy.hear()
    await envoy.body(body())
    refused = (await envoy.hear()).immediate_response
    assert refused.status.code == 503
    assert {o.header.key for o in refused.headers.set_headers} == {"content-type", "retry-after"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("data", "headers", "status", "param"),
    [
        (b"{", {}, 400, None),
        (body(prompt=""), {}, 400, "prompt"),
        (body(model="nope"), {}, 404, "model"),
        (body(max_tokens=9999), {}, 400, "max_tokens"),
        (body(), {"x_slo_ttft_ms": "soon"}, 400, "x-slo-ttft-ms"),
        (body(), {"x_steelyard_slo_class": "golden"}, 400, "slo_class"),
    ],
)
async def test_bad_requests_are_answered_by_envoy_itself(stub, data, headers, status, param):
    """An immediate response with an OpenAI error body, and the exchange ends."""
    envoy = Envoy(stub)
    await envoy.headers(**headers)
    await envoy.hear()
    await envoy.body(data)
    refused = (await envoy.hear()).immediate_response
    assert refused.status.code == status
    assert json.loads(refused.body)["error"]["param"] == param
    assert await envoy.call.read() is grpc.aio.EOF


@pytest.mark.asyncio
async def test_requests_without_a_body_are_refused(stub):
    """There is nothing to count."""
    envoy = Envoy(stub)
    await envoy.headers("/v1/models", end_of_stream=True)
    assert (await envoy.hear()).immediate_response.status.code == 400


@pytest.mark.asyncio
async def test_an_exchange_that_breaks_off_frees_its_place(cluster, stub):
    """Envoy cancels: the placement is not charged any more."""
    envoy = Envoy(stub)
    await envoy.headers()
    await envoy.hear()
    await envoy.body(body())
    await envoy.hear()
    (driver,) = cluster.router.fleet
    assert list(driver.pool.ledger.request_ids())
    envoy.call.cancel()
    await eventually(lambda: not list(driver.pool.ledger.request_ids()))


@pytest.mark.asyncio
async def test_its_health_is_asked_by_the_protocols_names(cluster):
    """liveness, readiness and the service's own name are SERVING."""
    async with open_channel(cluster.router.server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
