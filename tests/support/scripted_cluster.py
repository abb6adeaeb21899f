"""A real router over scripted agents and a real Redis; the snapshot is written by hand."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import redis.asyncio
from steelyard.v1 import router_pb2, router_pb2_grpc

from dataplane.router.app import Router, RouterApp
from dataplane.router.settings import RouterSettings
from servicekit.channel import open_channel
from servicekit.redis_client import connect
from servicekit.status import RemoteError, from_rpc_error
from tests.support.scripted_agents import Script, ScriptedAgent
from tests.support.snapshots import publish, roster, snapshot
from tests.support.waiting import eventually


@dataclass
class Heard:
    """All that a client heard of one request."""

    messages: list[router_pb2.GenerateResponse]
    error: RemoteError | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens, in order."""
        return [token for message in self.messages for token in message.token_ids]

    @property
    def code(self) -> grpc.StatusCode:
        """How it ended."""
        return grpc.StatusCode.OK if self.error is None else self.error.code

    @property
    def finishes(self) -> list[int]:
        """Positions of messages with a finish reason."""
        return [at for at, message in enumerate(self.messages) if message.finish_reason]


class ScriptedCluster:
    """`async with ScriptedCluster(redis_url) as cluster:` has a router that sees its agents."""

    def __init__(
        self,
        redis_url: str,
        names: Sequence[str] = ("p0", "p1", "d0", "d1"),
        changes: Mapping[str, Mapping[str, Any]] | None = None,
        **settings: Any,
    ) -> None:
        self.script = Script()
        changed = changes or {}
        self.agents = [ScriptedAgent(name, self.script, **changed.get(name, {})) for name in names]
        self.redis: redis.asyncio.Redis = connect(redis_url)
        values = {"policy": "least_loaded", "router_id": "router-0", "stale_after_seconds": 1e6}
        self._app = RouterApp(RouterSettings.load(redis_url=redis_url, **values | settings))
        self._sequence = 0
        self.router: Router
        self.stub: router_pb2_grpc.RouterServiceStub

    async def __aenter__(self) -> Self:
        for agent in self.agents:
            await agent.start()
        await self.publish()
        self.router = await self._app.__aenter__()
        await eventually(lambda: self.router.server.serving)
        self._channel = open_channel(self.router.server.address)
        self.stub = router_pb2_grpc.RouterServiceStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._app.__aexit__(None, None, None)
        for agent in self.agents:
            await agent.stop()
        await self.redis.aclose()

    async def publish(self, *without: str, states: dict[str, int] | None = None) -> None:
        """Publish a snapshot of all agents but some, with a new roster; routers see it soon."""
        self._sequence += 1
        there = [agent.info for agent in self.agents if agent.info.instance_id not in without]
        message = snapshot(
            roster(*there, states=states), sequence=self._sequence, version=self._sequence
        )
        await publish(self.redis, message)
        if hasattr(self, "router"):
            await eventually(lambda: self.router.fleet.sequence == self._sequence)

    def request(self, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, **fields: Any):
        """Return a request."""
        ids = router_pb2.TokenIds(ids=prompt)
        return router_pb2.GenerateRequest(token_ids=ids, max_tokens=max_tokens, **fields)

    async def generate(self, message=None, **call: Any) -> Heard:
        """Generate and return all that was heard."""
        return await listen(self.stub.Generate(message or self.request(), **call))

    def left(self) -> dict[str, Any]:
        """Return everything that is still kept of any request; empty after all have ended."""
        router, found = self.router, {}
        (driver,) = router.fleet
        columns = driver.pool.view.own
        found["tickets"] = dict(driver.tickets)
        found["sessions"] = dict(router.front._sessions)
        found["ledger"] = list(driver.pool.ledger.request_ids())
        found["charged"] = {
            name: getattr(columns, name).tolist()
            for name in columns.__slots__
            if any(getattr(columns, name))
        }
        found["leases"] = len(router.board)
        found["flights"] = {
            name: scheduler._flights
            for name, scheduler in driver._schedulers.items()
            if scheduler._flights
        }
        found["held by engines"] = dict(self.script.held)
        found["running on engines"] = set(self.script.running)
        return {name: value for name, value in found.items() if value}

    async def settled(self) -> None:
        """Wait until nothing is left of any request, in router, engines and Redis."""
        try:
            await eventually(lambda: not self.left())
        except AssertionError:
            raise AssertionError(f"left of requests that have ended: {self.left()}") from None
        await self.router.board.flush()
        assert await self.redis.keys("steelyard:inflight:*") == []


async def listen(call) -> Heard:
    """Read a stream to its end, whichever that is."""
    heard = Heard([])
    try:
        async for message in call:
            heard.messages.append(message)
    except grpc.aio.AioRpcError as error:
        heard.error = from_rpc_error(error)
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        heard.error = RemoteError(grpc.StatusCode.CANCELLED, "CANCELLED", "", (), {}, None)
    return heard
