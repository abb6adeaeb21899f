"""What operators see: the page, metrics, health, reflection, the process itself."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from steelyard.v1 import control_pb2

from servicekit import probe

pytestmark = pytest.mark.asyncio

METRICS_PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


async def get(replica, path: str) -> tuple[int, str]:
    """Get a page."""
    url = f"http://127.0.0.1:{replica.server.http_port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def one_outcome():
    """Yield one finished request."""
    outcome = control_pb2.Outcome(
        request_id="r", slo_class="tight", policy="<script>", completion_tokens=7, slo_met=True
    )
    outcome.ttft.FromMilliseconds(123)
    yield control_pb2.ReportOutcomesRequest(outcome=outcome)


async def test_the_page_shows_the_cluster(cluster):
    """Instances, targets, constants, outcomes and events are on it; names are escaped."""
    replica, stub = await cluster.replica()
    status, empty = await get(replica, "/")
    assert status == 200
    assert "No instance is registered." in empty
    agent = cluster.agent(stub, "decode-7")
    agent.load.kv_used_tokens = 12_345
    agent.start()
    await cluster.until(
        stub, lambda v: v.states == {"decode-7": "READY"} and v.load("decode-7", "running")
    )
    await stub.ReportOutcomes(one_outcome())
    _, page = await get(replica, "/")

    for shown in (
        "decode-7",
        "READY",
        "12,345 / 60,000",
        "org/model",
        "joined",
        "reference values",
    ):
        assert shown in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert re.search(r"tight</td>\s*<td class=.n.>175</td>\s*<td class=.n.>39.7</td>", page)
    assert '<td class="n">1.000</td>' in page


async def test_the_page_tells_of_an_outage(own_redis_cluster):
    """Without Redis the page still shows what was known, and says that it is old."""
    cluster = own_redis_cluster
    replica, stub = await cluster.replica()
    cluster.agent(stub).start()
    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})
    cluster.redis.kill()
    status, page = await get(replica, "/")

    assert status == 200
    assert "Redis does not answer" in page
    assert "READY" in page


async def test_metrics_are_documented_and_documented_ones_exist(cluster):
    """Every metric of ours is a heading of docs/metrics.md, and every heading there is served."""
    replica, stub = await cluster.replica()
    cluster.agent(stub).start()
    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})
    await stub.ReportOutcomes(one_outcome())
    _, text = await get(replica, "/metrics")
    served = {
        name if kind != "counter" or name.endswith("_total") else f"{name}_total"
        for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
        if name.startswith(("steelyard_", "grpc_")) and not name.endswith("_created")
    }
    page = METRICS_PAGE.read_text()
    ours = page.partition("## Every service")[2].partition("## Control plane")
    sections = ours[0] + ours[2].partition("\n## ")[0]
    documented = set(re.findall(r"^### `(\S+)`$", sections, re.MULTILINE))

    assert served == documented
    assert 'steelyard_instances{role="DECODE",state="READY"} 1.0' in text
    assert "steelyard_redis_up 1.0" in text
    assert 'steelyard_outcomes_total{slo_class="tight",slo_met="true",status="ok"} 1.0' in text


async def test_reflection_knows_the_service(cluster):
    """Grpcurl finds ControlService and its messages without the proto files."""
    replica, _ = await cluster.replica()
    stub = reflection_pb2_grpc.ServerReflectionStub(cluster.replicas[replica])
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="steelyard.v1.ControlService"
        ),
    ]
    listed, described = [a async for a in stub.ServerReflectionInfo(iter(requests))]

    assert "steelyard.v1.ControlService" in {
        service.name for service in listed.list_services_response.service
    }
    assert described.file_descriptor_response.file_descriptor_proto


async def test_health_knows_the_service(cluster):
    """Health answers for the service by name once Redis has answered."""
    replica, _ = await cluster.replica()

    async def serving():
        name = "steelyard.v1.ControlService"
        return await asyncio.to_thread(probe.probe, replica.server.address, name) == "SERVING"

    await cluster.eventually(serving)
    assert (await get(replica, "/healthz"))[0] == 200


async def test_the_process_serves_until_sigterm(shared_redis):
    """`python -m controlplane.app` serves, and SIGTERM ends it with code 0."""
    process = await _start({"REDIS_URL": shared_redis.url, "LOG_LEVEL": "INFO"})
    line = ""
    while "publishing_started" not in line:
        line = (await process.stdout.readline()).decode()
        assert line, "the process ended"
    process.send_signal(signal.SIGTERM)
    rest = (await process.stdout.read()).decode()

    assert await process.wait() == 0
    assert "server_stopped" in rest


async def test_bad_settings_are_explained(shared_redis):
    """A setting that cannot be is named by its variable, with exit code 2."""
    process = await _start({"STALE_AFTER_SECONDS": "-1"})
    _, errors = await process.communicate()

    assert process.returncode == 2
    assert b"STEELYARD_CONTROLPLANE_STALE_AFTER_SECONDS" in errors


async def test_the_settings_can_be_printed():
    """--print-config shows what would hold, secrets masked, and serves nothing."""
    process = await _start({"REDIS_PASSWORD": "hunter2"}, "--print-config")
    printed, _ = await process.communicate()

    assert process.returncode == 0
    assert b"STEELYARD_CONTROLPLANE_REDIS_PASSWORD=********" in printed
    assert b"hunter2" not in printed


async def _start(settings: dict[str, str], *arguments: str) -> asyncio.subprocess.Process:
    ours = {f"STEELYARD_CONTROLPLANE_{name}": value for name, value in settings.items()}
    ports = {
        "STEELYARD_CONTROLPLANE_LISTEN": "127.0.0.1:0",
        "STEELYARD_CONTROLPLANE_HTTP_LISTEN": "127.0.0.1:0",
    }
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "controlplane.app",
        *arguments,
        env=os.environ | ports | ours,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
