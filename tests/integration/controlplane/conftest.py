"""Replicas of the control plane on a real Redis, and agents that talk to them."""

import asyncio
import contextlib

import grpc
import pytest
import pytest_asyncio
from steelyard.v1 import control_pb2, control_pb2_grpc, types_pb2

from controlplane.app import ControlPlane
from controlplane.settings import ControlPlaneSettings
from servicekit.channel import open_channel
from servicekit.embedded_redis import EmbeddedRedis
from servicekit.redis_client import connect
from servicekit.status import from_rpc_error

PATIENCE_SECONDS = 30.0
QUICK = {"stale_after_seconds": 0.6, "gone_after_seconds": 0.6}
"""For tests in which somebody does fall silent."""


class View:
    """One snapshot, read."""

    def __init__(self, snapshot) -> None:
        self.snapshot = snapshot
        self.roster = types_pb2.Roster.FromString(snapshot.roster)
        self.states = {
            instance.engine.instance_id: types_pb2.InstanceState.Name(instance.state)[15:]
            for instance in self.roster.instances
        }
        self.epochs = {i.engine.instance_id: i.engine.epoch for i in self.roster.instances}
        self.constants = {c.profile: c.version for c in self.roster.constants}

    def load(self, instance_id: str, column: str):
        """Read one number of one instance."""
        at = [i.engine.instance_id for i in self.roster.instances].index(instance_id)
        return getattr(self.snapshot.loads, column)[at]


class Agent:
    """Registers and reports as an agent does: registers again when told to."""

    def __init__(self, stub, instance_id: str, epoch: str, role: int) -> None:
        self.stub = stub
        self.engine = types_pb2.EngineInfo(
            instance_id=instance_id,
            epoch=epoch,
            role=role,
            model="org/model",
            address="127.0.0.1:7201",
            profile="a40-qwen2.5-3b",
            kv_total_tokens=60_000,
            engine_kind="emulated",
        )
        self.load = types_pb2.InstanceLoad(running=1, engine_healthy=True)
        self.answers: list[control_pb2.ReportResponse] = []
        self.registrations = 0
        self.leaving = False
        self._task: asyncio.Task | None = None

    async def register(self) -> None:
        await self.stub.Register(control_pb2.RegisterRequest(engine=self.engine))
        self.registrations += 1

    def start(self) -> "Agent":
        self._task = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        while not self.leaving:
            try:
                await self.register()
                async for answer in self.stub.Report(self._reports()):
                    self.answers.append(answer)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)

    async def _reports(self):
        sequence = 0
        while True:
            sequence += 1
            yield control_pb2.ReportRequest(
                instance_id=self.engine.instance_id,
                epoch=self.engine.epoch,
                sequence=sequence,
                load=self.load,
                leaving=self.leaving,
            )
            if self.leaving:
                return
            await asyncio.sleep(0.05)

    async def leave(self) -> None:
        self.leaving = True
        await self._task

    async def die(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Cluster:
    """What a test runs; everything is ended with it."""

    def __init__(self, redis: EmbeddedRedis) -> None:
        self.redis = redis
        self.client = connect(redis.url)
        self.replicas: dict[ControlPlane, grpc.aio.Channel] = {}
        self.agents: list[Agent] = []
        self._channels: list[grpc.aio.Channel] = []

    async def replica(self, **overrides):
        """Start a replica; returns it and a stub that talks to it."""
        settings = ControlPlaneSettings.load(
            **{
                "listen": "127.0.0.1:0",
                "http_listen": "127.0.0.1:0",
                "redis_url": self.redis.url,
                "stale_after_seconds": 5.0,  # nobody falls silent because the machine is busy
                "gone_after_seconds": 5.0,
                "drain_grace_seconds": 2.0,
            }
            | overrides
        )
        replica = ControlPlane(settings)
        await replica.start()
        channel = open_channel(replica.server.address)
        self.replicas[replica] = channel
        return replica, control_pb2_grpc.ControlServiceStub(channel)

    async def stop(self, replica: ControlPlane) -> None:
        """Stop one replica gracefully."""
        await replica.stop()
        await self.replicas.pop(replica).close()

    def agent(self, stub, instance_id="d0", epoch="e1", role=types_pb2.ROLE_DECODE) -> Agent:
        """Make an agent; start it with `.start()`."""
        agent = Agent(stub, instance_id, epoch, role)
        self.agents.append(agent)
        return agent

    async def until(self, stub, condition, *, collect: list | None = None) -> View:
        """Watch until a snapshot meets the condition; returns it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for message in stub.WatchCluster(control_pb2.WatchClusterRequest()):
                        view = View(message.snapshot)
                        if collect is not None:
                            collect.append(view)
                        if condition(view):
                            return view
                await asyncio.sleep(0.02)

    async def eventually(self, condition) -> None:
        """Wait for something that has no event of its own."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await condition():  # noqa: ASYNC110  no event to wait for
                await asyncio.sleep(0.02)

    async def refused(self, call):
        """Await a call that must fail; returns what it said."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return from_rpc_error(caught.value)

    async def end(self) -> None:
        for agent in self.agents:
            await agent.die()
        for replica in list(self.replicas):
            await self.stop(replica)
        await self.client.aclose()


@pytest.fixture(scope="session")
def shared_redis():
    """Yield one real redis-server for the whole session."""
    with EmbeddedRedis() as server:
        yield server


@pytest_asyncio.fixture
async def cluster(shared_redis):
    """Yield a cluster on an empty Redis."""
    made = Cluster(shared_redis)
    await made.client.flushall()
    yield made
    await made.end()


@pytest_asyncio.fixture(params=[False, True], ids=["forgetting", "persistent"])
async def own_redis_cluster(request):
    """Yield a cluster on a Redis of its own, which the test may kill."""
    with EmbeddedRedis(persist=request.param) as server:
        made = Cluster(server)
        made.persistent = request.param
        yield made
        await made.end()
