"""What an agent notes of requests and hand-offs while its engine works on them."""

import asyncio

import pytest
from steelyard.v1 import agent_pb2

from servicekit.status import from_rpc_error
from tests.integration.agent.agents import (
    agents,
    decode_request,
    generate,
    new_prompt,
    prefill_request,
    refusal_of,
)

pytestmark = pytest.mark.asyncio


async def test_a_released_handoff_is_out_of_the_table_at_once():
    """There is nothing left to abort, before the engine was measured again."""
    async with agents({"role": "prefill"}) as (prefill,):
        held = await prefill.stub.Prefill(prefill_request(new_prompt()))

        await prefill.stub.Release(agent_pb2.ReleaseRequest(handoff=held.handoff))
        aborted = await prefill.stub.Abort(agent_pb2.AbortRequest(request_id="r"))

        assert not aborted.found


async def test_a_request_id_is_taken_while_its_engine_has_not_answered_yet(monkeypatch):
    """The second of two generations of one id is refused though the first has not begun."""
    async with agents({"role": "mixed"}) as (client,):
        engine, asked, go_on = client.running.agent.engine, asyncio.Event(), asyncio.Event()
        start = engine.decode

        async def decode(job):
            asked.set()
            await go_on.wait()
            return await start(job)

        monkeypatch.setattr(engine, "decode", decode)
        first = asyncio.create_task(generate(client, decode_request(new_prompt())))
        await asked.wait()
        async with asyncio.timeout(10):
            error = await refusal_of(client.stub.Decode(decode_request(new_prompt())))
        go_on.set()

        assert from_rpc_error(error).reason == "DUPLICATE_REQUEST"
        tokens, _ = await first
        assert len(tokens) == 20
