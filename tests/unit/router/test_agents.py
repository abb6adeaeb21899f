"""Channels to agents: opened once, closed when idle and gone, kept under a running call."""

import pytest

from dataplane.router.agents import AgentChannels
from tests.support.scripted_agents import DecodeScript, expected_tokens
from tests.support.scripted_cluster import ScriptedCluster


@pytest.mark.asyncio
async def test_channels_are_shared_and_closed_when_their_agent_left():
    """One stub an address; `keep` closes what is idle and not named, and opens it anew when asked."""
    channels = AgentChannels()
    here, gone = channels.stub("127.0.0.1:1"), channels.stub("127.0.0.1:2")
    assert channels.stub("127.0.0.1:1") is here
    with channels.calling("127.0.0.1:2") as busy:
        await channels.keep({"127.0.0.1:1"})
        assert channels.stub("127.0.0.1:2") is gone is busy
    await channels.keep({"127.0.0.1:1"})

    assert channels.stub("127.0.0.1:1") is here
    assert channels.stub("127.0.0.1:2") is not gone
    await channels.close()


@pytest.mark.asyncio
async def test_a_stream_outlives_its_agents_place_in_the_cluster(redis_url):
    """An agent that is given up while it still serves finishes what it has; its channel stays."""
    async with ScriptedCluster(redis_url) as cluster:
        cluster.script.decodes.append(DecodeScript(pause_at=2))
        stream = aiter(cluster.stub.Generate(cluster.request(), timeout=10))
        tokens = [token for _ in range(2) for token in (await anext(stream)).token_ids]
        (at,) = [agent for what, agent in cluster.script.calls if what == "decode"]
        await cluster.publish(at)
        channels = cluster.router.front._legs._agents
        addresses = cluster.router.fleet.addresses()
        await channels.keep(addresses)
        cluster.script.resume.set()
        tokens += [token async for message in stream for token in message.token_ids]
        await cluster.settled()
        await channels.keep(addresses)

        assert tokens == expected_tokens((1, 2, 3), 4)
        assert set(channels._channels) <= addresses
