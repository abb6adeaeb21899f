"""Many legs on one stream: each is what its call would be, and none is in another's way."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from steelyard.v1 import agent_pb2

from dataplane.agent.exchange import MAX_UNREAD
from dataplane.router.agents import AgentChannels
from dataplane.router.link import Link
from servicekit.outbox import MAX_BATCH_BYTES
from servicekit.status import from_rpc_error
from tests.integration.agent.agents import (
    Client,
    agents,
    decode_request,
    drain,
    generate,
    new_prompt,
    prefill_request,
)
from tests.support.scripted_agents import DecodeScript, Script, ScriptedAgent, expected_tokens
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio

PREFILL, DECODE, MIXED = {"role": "prefill"}, {"role": "decode"}, {"role": "mixed"}
SLOW, FAST = {"time_scale": 1.0}, {"time_scale": 1e12}
UNBOUND = {"timeout": None, "metadata": ()}
_HANGS = DecodeScript(tokens=1, end="hang")
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@asynccontextmanager
async def link_to(client: Client):
    """Open a link to an agent."""
    channels = AgentChannels()
    try:
        link = channels.link(client.running.server.address)
        await link.ready(10)
        yield link
    finally:
        await channels.close()


def prefill_leg(prompt: list[int], request_id: str = "r") -> agent_pb2.ExchangeRequest:
    """Make what begins a prefill."""
    leg = agent_pb2.LegRequest(prefill=prefill_request(prompt, request_id))
    return agent_pb2.ExchangeRequest(legs=[leg])


def decode_leg(
    prompt: list[int], max_tokens: int = 20, request_id: str = "r", **more: object
) -> agent_pb2.ExchangeRequest:
    """Make what begins a decode."""
    decode = decode_request(prompt, max_tokens, request_id, **more)
    return agent_pb2.ExchangeRequest(legs=[agent_pb2.LegRequest(decode=decode)])


async def tokens_of(leg) -> list[int]:
    """Read a leg to its end."""
    return [token for message in await drain(leg) for token in message.token_ids]


async def error_of(leg) -> grpc.aio.AioRpcError:
    """Read a leg to its error."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(leg)
    return caught.value


def handled(client: Client, method: str, code: str) -> float:
    """Return how many calls the agent has counted."""
    counted = client.running.server._interceptor._handled
    return counted("steelyard.v1.AgentService", method, code)._value.get()


async def test_a_pair_says_on_two_streams_what_its_calls_say():
    """Forty requests at once, prefilled and decoded as legs, equal those of calls; nothing is left."""
    async with (
        agents(PREFILL, DECODE, MIXED) as (prefill, decode, solo),
        link_to(prefill) as first,
        link_to(decode) as second,
    ):

        async def one(number: int) -> None:
            prompt, name = new_prompt(), f"r{number}"
            held = await first.Prefill(prefill_leg(prompt, name), **UNBOUND)
            request = decode_leg(prompt, request_id=name, handoff=held.handoff)
            tokens = await tokens_of(second.Decode(request, **UNBOUND))
            alone, _ = await generate(solo, decode_request(prompt, request_id=name))
            assert tokens == alone

        await asyncio.gather(*(one(number) for number in range(40)))

        for client in (prefill, decode):
            await client.until_empty()


async def test_cancelling_one_leg_leaves_the_others():
    """The cancelled one leaves the engine; its neighbour goes on to its end."""
    async with agents({**MIXED, "time_scale": 5.0}) as (client,), link_to(client) as link:
        prompt = new_prompt()
        kept = link.Decode(decode_leg(prompt, 100, "kept"), **UNBOUND)
        cut = link.Decode(decode_leg(new_prompt(), 5000, "cut"), **UNBOUND)
        await cut.read()

        cut.cancel()

        assert (await error_of(cut)).code() is grpc.StatusCode.CANCELLED
        await eventually(lambda: handled(client, "Decode", "CANCELLED") == 1)
        assert len(await tokens_of(kept)) == 100
        await client.until_empty()


async def test_a_prefill_that_nobody_waits_for_is_not_held():
    """Cancelling who awaits a prefill cancels its leg."""
    async with agents({**PREFILL, **SLOW}) as (client,), link_to(client) as link:
        call = asyncio.create_task(link.Prefill(prefill_leg(new_prompt(4000)), **UNBOUND))
        await client.until_running(1)

        call.cancel()

        with pytest.raises(asyncio.CancelledError):
            await call
        await client.until_empty()


async def test_a_leg_whose_time_is_up_ends_alone():
    """It ends with DEADLINE_EXCEEDED and frees the engine; its neighbour has no deadline."""
    async with agents({**MIXED, "time_scale": 5.0}) as (client,), link_to(client) as link:
        kept = link.Decode(decode_leg(new_prompt(), 200, "kept"), **UNBOUND)
        late = link.Decode(decode_leg(new_prompt(), 5000, "late"), timeout=0.2, metadata=())

        error = await error_of(late)

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert len(await tokens_of(kept)) == 200
        await client.until_empty()


async def test_an_agent_keeps_a_legs_time_by_itself():
    """Where the router does not end it, the agent does, and says so as it would of a call."""
    async with agents({**MIXED, **SLOW}) as (client,):
        stream = client.stub.Exchange()
        begin = agent_pb2.LegRequest(leg=7, decode=decode_request(new_prompt(), 5000))
        begin.timeout.FromMilliseconds(200)
        await stream.write(agent_pb2.ExchangeRequest(legs=[begin]))

        ends = []
        while not ends:
            message = await stream.read()
            ends += [leg for leg in message.legs if leg.WhichOneof("news") == "end"]

        assert (ends[0].leg, ends[0].end.code) == (7, grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
        assert handled(client, "Decode", "DEADLINE_EXCEEDED") == 1
        await client.until_empty()
        stream.cancel()


async def test_a_reader_that_is_away_holds_up_only_itself():
    """Unread answers are bounded; others run to their end; once it reads, no token is missing."""
    async with agents({**MIXED, "time_scale": 20.0}) as (client,), link_to(client) as link:
        prompt = new_prompt()
        away = link.Decode(decode_leg(prompt, 3000, "away"), **UNBOUND)
        await eventually(lambda: len(away._arrived) == MAX_UNREAD)

        others = [
            link.Decode(decode_leg(new_prompt(), 500, f"other{n}"), **UNBOUND) for n in range(8)
        ]
        for tokens in await asyncio.gather(*(tokens_of(leg) for leg in others)):
            assert len(tokens) == 500
        assert len(away._arrived) == MAX_UNREAD
        plain, _ = await generate(client, decode_request(prompt, 3000, "plain"))

        assert await tokens_of(away) == plain
        await client.until_empty()


async def test_a_refusal_of_a_leg_is_that_of_its_call():
    """Code, reason, message and details are the same, and the stream serves on."""
    async with agents(DECODE) as (client,), link_to(client) as link:
        bad = decode_leg(new_prompt(), 0)
        with pytest.raises(grpc.aio.AioRpcError) as call:
            await drain(client.stub.Decode(bad.legs[0].decode))

        leg = await error_of(link.Decode(bad, **UNBOUND))

        assert from_rpc_error(leg) == from_rpc_error(call.value)
        assert from_rpc_error(leg).violations
        assert len(await tokens_of(link.Decode(decode_leg(new_prompt()), **UNBOUND))) == 20


async def test_legs_are_counted_as_calls():
    """Whoever watches an agent sees its prefills and decodes, however they came."""
    async with agents(MIXED) as (client,), link_to(client) as link:
        await tokens_of(link.Decode(decode_leg(new_prompt()), **UNBOUND))

        await eventually(lambda: handled(client, "Decode", "OK") == 1)


async def test_an_agent_that_goes_breaks_every_leg():
    """Legs end with UNAVAILABLE, the link is of no use, and the next one speaks to its successor."""
    agent = ScriptedAgent("d0", Script())
    await agent.start()
    channels = AgentChannels()
    link = channels.link(agent.info.address)
    await link.ready(10)
    agent._script.decodes.extend([_HANGS, _HANGS])
    legs = [link.Decode(decode_leg([1, 2], request_id=n), **UNBOUND) for n in ("a", "b")]
    for leg in legs:
        await leg.read()

    await agent.stop()

    for leg in legs:
        assert (await error_of(leg)).code() in _GONE
    assert not link.usable
    late = await error_of(link.Decode(decode_leg([1, 2]), **UNBOUND))
    assert late.code() in _GONE
    await agent.start()
    link = channels.link(agent.info.address)
    assert await tokens_of(link.Decode(decode_leg([1, 2], 3), **UNBOUND)) == expected_tokens(
        [1, 2], 3
    )
    await channels.close()
    await agent.stop()


async def test_a_stopping_agent_ends_the_stream_with_its_last_leg():
    """What runs goes on within the grace, what comes is refused, and an idle stream holds nobody up."""
    async with agents({**MIXED, "time_scale": 5.0}) as (client,), link_to(client) as link:
        running = link.Decode(decode_leg(new_prompt(), 50), **UNBOUND)
        await running.read()
        stop = asyncio.create_task(client.running.server.stop(grace_seconds=30))
        await client.running.server.stopping.wait()

        refused = await error_of(link.Decode(decode_leg(new_prompt(), 5, "new"), **UNBOUND))

        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert len(await tokens_of(running)) == 49
        async with asyncio.timeout(10):
            await stop
        await eventually(lambda: not link.usable)


async def test_what_is_too_large_to_share_a_stream_goes_as_a_call():
    """A prompt beyond a batch's size is refused or served as ever, and no leg of it begins."""
    async with agents({**MIXED, **FAST}) as (client,), link_to(client) as link:
        request = decode_leg(new_prompt(), 3, "large")
        request.legs[0].decode.sampling.extra_json = '{"x": "%s"}' % ("y" * 2 * MAX_BATCH_BYTES)

        call = link.Decode(request, **UNBOUND)

        assert isinstance(call, grpc.aio.UnaryStreamCall)
        await drain(call)
        assert not link._legs


async def test_agents_that_know_no_exchange_are_called():
    """A router that is newer than an agent serves through it all the same."""
    agent = ScriptedAgent("d0", Script())
    agent.knows_exchange = False
    await agent.start()
    channels = AgentChannels()
    link = channels.link(agent.info.address)
    await link.ready(10)

    calls = [link.Decode(decode_leg([1, 2], 3, name), **UNBOUND) for name in ("a", "b")]

    for call in calls:
        assert await tokens_of(call) == expected_tokens([1, 2], 3)
    assert (await link.Prefill(prefill_leg([1, 2]), **UNBOUND)).prompt_tokens == 2
    assert channels.link(agent.info.address) is link
    await channels.close()
    await agent.stop()


async def test_an_agent_that_does_not_answer_takes_no_more_than_a_legs_time():
    """Where nobody accepts the stream, a leg ends at its deadline."""
    async with _deaf() as address:
        channels = AgentChannels()
        link: Link = channels.link(address)
        await link.ready(0.05)
        leg = link.Decode(decode_leg([1, 2]), timeout=0.1, metadata=())

        assert (await error_of(leg)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await channels.close()


@asynccontextmanager
async def _deaf():
    """Listen without a word."""
    held = []
    server = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        for writer in held:
            writer.close()
        server.close()
        await server.wait_closed()
