"""An agent that owns its vLLM server: started, replaced when it dies, gone with the agent."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from steelyard.v1 import agent_pb2, agent_pb2_grpc

from dataplane.agent.app import AgentApp
from dataplane.agent.settings import AgentSettings
from servicekit.channel import open_channel
from servicekit.status import from_rpc_error
from tests.integration.agent.agents import Client, decode_request, drain, generate, new_prompt
from tests.real_vllm.engine_cluster import PYTHON, free_ports, make_tiny_model

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(420), pytest.mark.asyncio]


def pids_of(pattern: str) -> list[int]:
    """Processes whose command line holds a text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if pattern in words:
                found.append(int(entry.name))
    return found


async def epoch_of(client: Client) -> str:
    """The engine's boot, as the agent knows it."""
    return (await client.stub.GetEngine(agent_pb2.GetEngineRequest())).engine.epoch


async def test_a_spawned_server_is_replaced_under_a_new_epoch_and_ends_with_its_agent(tmp_path):
    """Tokens before and after the server's death are the same; its epoch is not."""
    model = make_tiny_model(tmp_path / "model", "--seed", "0")
    port, side = free_ports(2)
    mark = f"--side-channel-port {side}"
    settings = AgentSettings(
        engine="vllm",
        role="decode",
        spawn_vllm=True,
        vllm_url=f"http://127.0.0.1:{port}",
        vllm_command=[str(PYTHON), "-m", "steelyard_enginekit.serve", "--role", "decode"],
        vllm_flags=f"--port {port} {mark} -- --model {model} --served-model-name tiny",
        vllm_log_path=tmp_path / "engine.log",
        vllm_metrics_seconds=0.2,
    )
    async with AgentApp(settings) as running, open_channel(running.server.address) as channel:
        client = Client(running, agent_pb2_grpc.AgentServiceStub(channel))
        prompt = new_prompt()
        before, _ = await generate(client, decode_request(prompt))
        old_epoch = await epoch_of(client)
        cut = client.stub.Decode(decode_request(prompt, max_tokens=1500, request_id="cut"))
        await cut.read()

        for pid in pids_of(mark):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(Exception) as caught:
            await drain(cut)
        async with asyncio.timeout(200):
            while await epoch_of(client) == old_epoch:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        after, _ = await generate(client, decode_request(prompt, request_id="again"))

        assert from_rpc_error(caught.value).reason == "ENGINE_UNAVAILABLE"
        assert before == after
        assert len(before) == 20
        await client.until_empty()
    assert pids_of(mark) == []
