"""/metrics of an agent."""

import re
from pathlib import Path

import aiohttp
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.integration.agent.agents import (
    agents,
    decode_request,
    new_prompt,
    prefill_request,
    refusal_of,
)

pytestmark = pytest.mark.asyncio
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
HTTP = {"http_listen": "127.0.0.1:0"}


async def metrics(client) -> str:
    """The page of an agent, after a measurement."""
    await client.load()
    url = f"http://127.0.0.1:{client.running.server.http_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.text()


async def test_what_is_held_and_what_was_refused_is_shown():
    """Held KV and refused hand-offs appear with the engine's load."""
    async with agents({"role": "prefill", **HTTP}, {"role": "decode", **HTTP}) as (prefill, decode):
        prompt = new_prompt()
        held = await prefill.stub.Prefill(prefill_request(prompt))
        late = decode_request(prompt, handoff=held.handoff, handoff_valid_for=Duration())
        await refusal_of(decode.stub.Decode(late))

        at_prefill, at_decode = await metrics(prefill), await metrics(decode)

        assert "steelyard_agent_held_kv_tokens 200.0" in at_prefill
        assert "steelyard_agent_kv_used_tokens 208.0" in at_prefill
        refused = 'steelyard_agent_handoffs_refused_total{reason="HANDOFF_EXPIRED"} 1.0'
        assert refused in at_decode
        assert "steelyard_agent_control_plane_connected 0.0" in at_decode


async def test_every_metric_is_documented_and_every_documented_one_is_served():
    """The agent's part of docs/metrics.md names what is there, no more and no less."""
    async with agents({**HTTP}) as (client,):
        text = await metrics(client)
    served = {
        f"{name}_total" if kind == "counter" and not name.endswith("_total") else name
        for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
        if name.startswith("steelyard_agent_")
    }
    section = PAGE.read_text().partition("\n## Agent\n")[2].partition("\n## ")[0]

    assert served == set(re.findall(r"^### `(\S+)`$", section, re.MULTILINE))
