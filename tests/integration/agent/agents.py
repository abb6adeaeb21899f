"""Agents on emulated engines, over real gRPC, for tests."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
from steelyard.v1 import agent_pb2, agent_pb2_grpc, types_pb2

from dataplane.agent.app import AgentApp, RunningAgent
from dataplane.agent.settings import AgentSettings
from servicekit.channel import open_channel

SETTLE_SECONDS = 10.0


@dataclass
class Client:
    """One running agent and a stub to it."""

    running: RunningAgent
    stub: agent_pb2_grpc.AgentServiceStub

    async def load(self) -> types_pb2.InstanceLoad:
        """What GetEngine says of its load."""
        return (await self.stub.GetEngine(agent_pb2.GetEngineRequest())).load

    async def until_empty(self) -> None:
        """Wait until neither engine nor agent knows of any request."""
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                load = await self.load()
                busy = (load.running, load.waiting, load.kv_used_tokens, len(load.by_router))
                if busy == (0, 0, 0, 0):
                    return
                await asyncio.sleep(0.01)

    async def until_running(self, running: int = 1) -> None:
        """Wait until the engine runs that many requests."""
        async with asyncio.timeout(SETTLE_SECONDS):
            while (await self.load()).running != running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def agents(*settings: dict[str, object]) -> AsyncIterator[list[Client]]:
    """Run an agent for each dictionary of settings."""
    async with AsyncExitStack() as stack:
        clients = []
        for fields in settings:
            app = AgentApp(AgentSettings(**{"time_scale": 20.0, **fields}))
            running = await stack.enter_async_context(app)
            channel = await stack.enter_async_context(open_channel(running.server.address))
            await channel.channel_ready()
            clients.append(Client(running, agent_pb2_grpc.AgentServiceStub(channel)))
        yield clients


def new_prompt(tokens: int = 200) -> list[int]:
    """Random token ids."""
    return [random.randrange(6, 250) for _ in range(tokens)]


def prefill_request(prompt: list[int], request_id: str = "r", **more: object):
    """A prefill of router `a`."""
    return agent_pb2.PrefillRequest(
        request_id=request_id, router_id="a", prompt_token_ids=prompt, **more
    )


def decode_request(prompt: list[int], max_tokens: int = 20, request_id: str = "r", **more: object):
    """A generation of router `a` that goes on to max_tokens."""
    return agent_pb2.DecodeRequest(
        request_id=request_id,
        router_id="a",
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=types_pb2.SamplingParams(ignore_eos=True, temperature=0.0),
        **more,
    )


async def generate(client: Client, request: agent_pb2.DecodeRequest):
    """Run a generation; returns its tokens and its messages."""
    messages = [message async for message in client.stub.Decode(request)]
    return [token for message in messages for token in message.token_ids], messages


async def drain(call: grpc.aio.UnaryStreamCall):
    """Read what is left of a stream."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def refusal_of(call) -> grpc.aio.AioRpcError:
    """Return the error that a call or stream ends with."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            await drain(call)
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")
