"""A whole cluster as real processes, to be killed part by part."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import grpc
import redis.asyncio
from steelyard.v1 import (
    agent_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    types_pb2,
)

from localcluster.cluster import LocalCluster
from localcluster.spec import ClusterSpec, Pools
from servicekit.channel import open_channel
from servicekit.redis_client import REDIS_ERRORS, connect
from servicekit.status import from_rpc_error
from tests.support.requests import ids_request
from tests.support.scripted_cluster import Heard
from tests.support.waiting import eventually

MODEL = "tiny"


class ProcessCluster:
    """2P2D that pair, one decode engine of another block size, one of another model, two routers."""

    def __init__(self, directory: Path) -> None:
        spec = ClusterSpec(
            pools=Pools.parse("2P4D"),
            routers=2,
            directory=directory,
            agent_settings={"model": MODEL, "time_scale": 3.0, "drain_grace_seconds": 1.0},
            instance_settings={"decode-2": {"block_tokens": 32}, "decode-3": {"model": "other"}},
            router_settings={
                "policy": "least_loaded",
                "stale_after_seconds": 1.0,
                "drain_grace_seconds": 30.0,
            },
            # Short enough to see an agent die, long enough that a busy machine kills none.
            control_settings={"stale_after_seconds": 2.0, "gone_after_seconds": 2.0},
            log_level="WARNING",
        )
        self.local = LocalCluster(spec)
        self._stack = AsyncExitStack()
        self.stubs: list[router_pb2_grpc.RouterServiceStub] = []
        self.redis: redis.asyncio.Redis

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.local)
        for address in self.local.addresses.routers:
            channel = await self._stack.enter_async_context(open_channel(address))
            self.stubs.append(router_pb2_grpc.RouterServiceStub(channel))
        self.redis = connect(self.local.addresses.redis_url)
        self._stack.push_async_callback(self.redis.aclose)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def agent(self, name: str) -> agent_pb2_grpc.AgentServiceStub:
        """Return a stub of one agent."""
        channel = open_channel(self.local.addresses.agents[name])
        return agent_pb2_grpc.AgentServiceStub(await self._stack.enter_async_context(channel))

    async def snapshots(self) -> AsyncIterator[types_pb2.ClusterSnapshot]:
        """Yield snapshots as the control plane publishes them."""
        async with open_channel(self.local.addresses.control[0]) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            async for message in stub.WatchCluster(control_pb2.WatchClusterRequest()):
                yield message.snapshot

    async def life(self, name: str, until: str, lives: list[str]) -> None:
        """Add the states that an instance goes through to `lives`, until one; GONE is absent."""
        async with contextlib.aclosing(self.snapshots()) as snapshots, asyncio.timeout(20):
            async for snapshot in snapshots:
                roster = types_pb2.Roster.FromString(snapshot.roster)
                states = {
                    i.engine.instance_id: types_pb2.InstanceState.Name(i.state).removeprefix(
                        "INSTANCE_STATE_"
                    )
                    for i in roster.instances
                }
                state = states.get(name, "GONE")
                if not lives or lives[-1] != state:
                    lives.append(state)
                if state == until:
                    return

    async def epoch(self, name: str) -> str:
        """Return the boot of an instance in the next snapshot; empty where it is GONE."""
        async with contextlib.aclosing(self.snapshots()) as snapshots:
            async for snapshot in snapshots:
                roster = types_pb2.Roster.FromString(snapshot.roster)
                boots = {i.engine.instance_id: i.engine.epoch for i in roster.instances}
                return boots.get(name, "")
        return ""

    async def loads(self, router_id: str, column: str) -> int:
        """Return what one router has in flight by the last snapshot, summed over instances."""
        blob = await self.redis.get("steelyard:snapshot")
        snapshot = types_pb2.ClusterSnapshot.FromString(blob)
        return sum(
            sum(getattr(row, column)) for row in snapshot.by_router if row.router_id == router_id
        )

    async def leases(self) -> dict[str, set[str]]:
        """Return the requests that are in flight by Redis, by instance and boot."""
        found: dict[str, set[str]] = {}
        for key in await self.redis.keys("steelyard:inflight:*"):
            members = await self.redis.zrange(key, 0, -1)
            name = key.decode().removeprefix("steelyard:inflight:")
            found[name] = {member.decode() for member in members}
        return found

    async def seen_whole(self) -> None:
        """Wait until every router would use all engines that pair."""

        async def whole(stub: router_pb2_grpc.RouterServiceStub) -> bool:
            request = ids_request([5], 4, model=MODEL, policy="least_loaded")
            try:
                answer = await stub.Explain(router_pb2.ExplainRequest(request=request))
            except grpc.aio.AioRpcError:
                return False
            rows = (*answer.prefill, *answer.decode)
            usable = {row.instance_id for row in rows if not row.excluded}
            return usable == {"prefill-0", "prefill-1", "decode-0", "decode-1"}

        for stub in self.stubs:
            await eventually(lambda stub=stub: whole(stub), within_seconds=20)

    async def settled(self) -> None:
        """Wait until agents and Redis know of no request."""

        async def nothing() -> bool:
            try:
                blob = await self.redis.get("steelyard:snapshot")
                snapshot = types_pb2.ClusterSnapshot.FromString(blob)
                loads = snapshot.loads
                busy = [*loads.running, *loads.waiting, *loads.kv_used_tokens]
                return not any(busy) and not snapshot.by_router and not await self.leases()
            except REDIS_ERRORS:
                return False

        await eventually(nothing, within_seconds=20, what="an idle cluster")


async def listen_into(heard: Heard, call: Any) -> Heard:
    """Read a stream to its end, writing down as it comes."""
    try:
        async for message in call:
            heard.messages.append(message)
    except grpc.aio.AioRpcError as error:
        heard.error = from_rpc_error(error)
    return heard


def begin(
    stub: router_pb2_grpc.RouterServiceStub, messages: Sequence[router_pb2.GenerateRequest]
) -> tuple[list[Heard], "asyncio.Future[list[Heard]]"]:
    """Send requests at once; returns what is heard so far, and their common end."""
    heards = [Heard([]) for _ in messages]
    ends = asyncio.gather(
        *(
            listen_into(heard, stub.Generate(message, timeout=60))
            for heard, message in zip(heards, messages, strict=True)
        )
    )
    return heards, ends
