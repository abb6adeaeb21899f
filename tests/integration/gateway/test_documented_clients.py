"""Every block of docs/clients.md runs against a router as it stands there."""

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from google.protobuf import json_format
from steelyard.client import Client, RouterError, request
from steelyard.v1 import router_pb2

from tests.support.gateway_cluster import gateway_cluster
from tests.support.scripted_agents import DecodeScript
from tests.support.scripted_cluster import ScriptedCluster

PAGE = Path(__file__).resolve().parents[3] / "docs" / "clients.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest_asyncio.fixture(name="cluster")
async def _cluster(redis_url):
    async with gateway_cluster(redis_url) as cluster:
        yield cluster
        await cluster.settled()


def test_the_page_has_blocks_of_each_kind():
    """There is something to run."""
    assert [kind for kind, _ in BLOCKS] == ["python", "python", "grpcurl", "python", "bash"]


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [n for n, (kind, _) in enumerate(BLOCKS) if kind != "grpcurl"])
async def test_a_documented_block_runs(cluster, number):
    """Python and shell blocks end well and print something, addresses aside as they are."""
    kind, text = BLOCKS[number]
    text = text.replace("127.0.0.1:7400", cluster.router.server.address)
    text = text.replace("127.0.0.1:8080", cluster.gateway.server.address)
    command = [sys.executable, "-c", text] if kind == "python" else ["bash", "-ec", text]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if "proxy" not in k.lower()},
    )
    output, errors = await process.communicate()

    assert process.returncode == 0, errors.decode()
    assert len(output) >= 8
    assert b'"error"' not in output


@pytest.mark.asyncio
async def test_documented_grpcurl_calls_are_the_services_own(cluster):
    """Each grpcurl line names a method that there is, and its JSON is that method's request."""
    (text,) = [text for kind, text in BLOCKS if kind == "grpcurl"]
    service = router_pb2.DESCRIPTOR.services_by_name["RouterService"]
    for line in text.splitlines():
        words = shlex.split(line)
        data, name = words[words.index("-d") + 1], words[-1]
        method = service.methods_by_name[name.rpartition("/")[2]]
        assert name.startswith(service.full_name)
        message = getattr(router_pb2, method.input_type.name)()
        json_format.Parse(data, message)


@pytest_asyncio.fixture(name="scripted")
async def _scripted(redis_url):
    async with ScriptedCluster(redis_url) as cluster:
        yield cluster


@pytest.mark.asyncio
async def test_nothing_is_retried_after_the_first_token(scripted):
    """A stream that breaks after a token raises; the engine saw the request once."""
    scripted.script.decodes += [DecodeScript(tokens=2, end="vanish")] * 3
    async with Client(scripted.router.server.address) as client:
        seen = []
        with pytest.raises(RouterError) as caught:  # noqa: PT012
            async for message in client.stream([1, 2, 3], max_tokens=8):
                seen += message.token_ids
    assert len(seen) == 2
    assert caught.value.code.name == "UNAVAILABLE"
    assert [what for what, _ in scripted.script.calls].count("decode") == 1
    await scripted.settled()


@pytest.mark.asyncio
async def test_a_dead_router_is_passed_by(scripted):
    """Of several routers one that lives answers, as long as no token has come."""
    async with Client("127.0.0.1:1", scripted.router.server.address, tries=2) as client:
        for _ in range(2):
            answer = await client.generate([1, 2, 3], max_tokens=4)
            assert len(answer.token_ids) == 4
            assert answer.finish_reason == "length"
    await scripted.settled()


@pytest.mark.asyncio
async def test_leaving_a_stream_ends_the_request(scripted):
    """Breaking out of the loop frees both legs."""
    scripted.script.decodes.append(DecodeScript(tokens=1, end="hang"))
    async with Client(scripted.router.server.address) as client:
        stream = client.stream([1, 2, 3], max_tokens=8)
        async for _ in stream:
            break
        await stream.aclose()
        await scripted.settled()


@pytest.mark.asyncio
async def test_refusals_say_which_field(scripted):
    """A refused request raises at once, with the field."""
    async with Client(scripted.router.server.address) as client:
        with pytest.raises(RouterError) as caught:
            await client.generate([1], max_tokens=4, top_p=7.0)
        assert caught.value.field == "sampling.top_p"
        with pytest.raises(RouterError) as caught:
            await client.explain("nobody's")
        assert caught.value.reason == "UNKNOWN_REQUEST"
        explained = await client.explain(request([1, 2], max_tokens=4))
        assert {row.instance_id for row in explained.decode} >= {"d0", "d1"}
        routed = await client.route([1, 2], reserve_seconds=5.0, max_tokens=4)
        assert await client.cancel(routed.reservation_id)
        assert not await client.cancel(routed.reservation_id)
