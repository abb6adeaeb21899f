"""A whole cluster in one process: Redis, control plane, agents on emulated engines, router."""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Any, Self

import redis.asyncio
from steelyard.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
)

from controlplane.app import ControlPlane
from controlplane.settings import ControlPlaneSettings
from dataplane.agent.accounting import ChargePhase
from dataplane.agent.app import AgentApp, RunningAgent
from dataplane.agent.settings import AgentSettings
from dataplane.core.cluster import State
from dataplane.router.app import Router, RouterApp
from dataplane.router.settings import RouterSettings
from localcluster.spec import Pools
from servicekit.channel import open_channel
from servicekit.redis_client import connect
from tests.support.scripted_cluster import Heard, listen
from tests.support.waiting import eventually

MODEL = "tiny"
MAX_MODEL_TOKENS = 4_096


class WholeCluster:
    """`async with WholeCluster(redis_url) as cluster:` serves once all instances are READY.

    Args:
        redis_url: An empty Redis.
        pools: As in "2P4D".
        time_scale: Engine seconds a real second.
        agents: Settings of every agent.
        router: Settings of the router.
        control: Settings of the control plane.
    """

    def __init__(
        self,
        redis_url: str,
        pools: str = "2P4D",
        *,
        time_scale: float = float("inf"),
        agents: dict[str, Any] | None = None,
        router: dict[str, Any] | None = None,
        control: dict[str, Any] | None = None,
    ) -> None:
        self._url = redis_url
        self._pools = Pools.parse(pools)
        self._agent_settings = {
            "model": MODEL,
            "max_model_tokens": MAX_MODEL_TOKENS,
            "time_scale": time_scale,
            **(agents or {}),
        }
        self._router_settings = {"router_id": "router-0", **(router or {})}
        self._control_settings = control or {}
        self._stack = AsyncExitStack()
        self.redis: redis.asyncio.Redis = connect(redis_url)
        self.agents: dict[str, RunningAgent] = {}
        self.control: ControlPlane
        self.router: Router
        self.stub: router_pb2_grpc.RouterServiceStub

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        self._stack.push_async_callback(self.redis.aclose)
        settings = ControlPlaneSettings.load(
            listen="127.0.0.1:0", http_listen="", redis_url=self._url, drain_grace_seconds=0.0,
            # A loaded test machine must not make instances stale.
            stale_after_seconds=3.0, **self._control_settings,
        )  # fmt: skip
        self.control = ControlPlane(settings)
        await self.control.start()
        self._stack.push_async_callback(self.control.stop)
        for instance_id, role in self._pools.names():
            self.agents[instance_id] = await self.start_agent(instance_id, role)
        app = RouterApp(
            RouterSettings.load(
                **{
                    "redis_url": self._url,
                    "control_planes": [self.control.server.address],
                    "stale_after_seconds": 5.0,
                    "drain_grace_seconds": 0.0,
                    **self._router_settings,
                }
            )
        )
        self.router = await self._stack.enter_async_context(app)
        await self.see_ready(len(self.agents))
        self.stub = router_pb2_grpc.RouterServiceStub(
            await self.channel(self.router.server.address)
        )

    async def start_agent(self, instance_id: str, role: str, **changes: Any) -> RunningAgent:
        """Start an agent that reports to this cluster."""
        values = {
            "instance_id": instance_id,
            "role": role,
            "control_planes": [self.control.server.address],
            "drain_grace_seconds": 0.0,
        }
        settings = AgentSettings.load(**values | self._agent_settings | changes)
        return await self._stack.enter_async_context(AgentApp(settings))

    async def channel(self, address: str):
        """Return a channel that closes with the cluster."""
        return await self._stack.enter_async_context(open_channel(address))

    async def see_ready(self, count: int) -> None:
        """Wait until the router sees that many READY instances."""
        await eventually(
            lambda: (
                sum(
                    instance.state.value == "ready"
                    for driver in self.router.fleet
                    for instance in driver.pool.roster.instances
                )
                >= count
            ),
            within_seconds=20,
        )

    async def drain(self, *names: str, undo: bool = False) -> None:
        """Take instances out of service, or back in; returns once the router knows."""
        stub = control_pb2_grpc.ControlServiceStub(await self.channel(self.control.server.address))
        for name in names:
            await stub.Drain(control_pb2.DrainRequest(instance_id=name, undo=undo))
        wanted = State.READY if undo else State.DRAINING
        await eventually(
            lambda: all(
                driver.pool.instance(name).state is wanted
                for driver in self.router.fleet
                for name in names
            )
        )

    async def generate(self, message: router_pb2.GenerateRequest, **call: Any) -> Heard:
        """Generate and return all that was heard."""
        return await listen(self.stub.Generate(message, **call))

    def left(self) -> dict[str, Any]:
        """Return everything that is still kept of any request; empty after all have ended."""
        found: dict[str, Any] = {"leases": len(self.router.board)}
        for driver in self.router.fleet:
            columns = driver.pool.view.own
            found[f"{driver.name} tickets"] = dict(driver.tickets)
            found[f"{driver.name} ledger"] = list(driver.pool.ledger.request_ids())
            for name in columns.__slots__:
                values = getattr(columns, name).tolist()
                found[f"{driver.name} {name}"] = values if any(values) else []
        for name, running in self.agents.items():
            agent = running.agent
            for phase in ChargePhase:
                found[f"{name} {phase.name}"] = agent.accounting.requests(phase)
            found[f"{name} generations"] = dict(agent._generations)
            core = agent.engine._core
            found[f"{name} kv"] = core.kv_used_tokens
            found[f"{name} engine"] = core.running + core.waiting
        return {name: value for name, value in found.items() if value}

    async def settled(self) -> None:
        """Wait until nothing is left of any request: router, agents, engines, Redis."""

        async def nothing() -> bool:
            for running in self.agents.values():
                await running.agent.load()
            return not self.left()

        try:
            await eventually(nothing)
        except AssertionError:
            raise AssertionError(f"left of requests that have ended: {self.left()}") from None
        await self.router.board.flush()
        assert await self.redis.keys("steelyard:inflight:*") == []


class SoloEngine:
    """One emulated engine that no router knows: what tokens are right."""

    def __init__(self, **settings: Any) -> None:
        values = {"instance_id": "solo", "role": "mixed", "model": MODEL}
        self._app = AgentApp(AgentSettings.load(**values | {"time_scale": float("inf")} | settings))
        self._stack = AsyncExitStack()
        self._count = 0

    async def __aenter__(self) -> Self:
        running = await self._stack.enter_async_context(self._app)
        channel = await self._stack.enter_async_context(open_channel(running.server.address))
        self._stub = agent_pb2_grpc.AgentServiceStub(channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def tokens(self, message: router_pb2.GenerateRequest) -> list[int]:
        """Return what this engine makes of a request with ids."""
        self._count += 1
        call = self._stub.Decode(
            agent_pb2.DecodeRequest(
                request_id=f"solo-{self._count}",
                prompt_token_ids=message.token_ids.ids,
                max_tokens=message.max_tokens,
                sampling=message.sampling,
            )
        )
        return [token async for chunk in call for token in chunk.token_ids]

    async def all_tokens(
        self, messages: Iterable[router_pb2.GenerateRequest], at_once: int = 24
    ) -> list[list[int]]:
        """Return the tokens of each, some at a time."""
        gate = asyncio.Semaphore(at_once)

        async def one(message: router_pb2.GenerateRequest) -> list[int]:
            async with gate:
                return await self.tokens(message)

        return await asyncio.gather(*(one(message) for message in messages))
