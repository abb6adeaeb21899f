"""One router decides for all: real processes, and what happens when it is gone."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
from steelyard.v1 import router_pb2, router_pb2_grpc

from dataplane.router.dispatch.lease import Holder
from localcluster.cluster import LocalCluster
from localcluster.spec import ClusterSpec, Pools
from servicekit.channel import open_channel
from servicekit.redis_client import connect
from servicekit.redis_keys import dispatcher
from tests.support.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]
MODEL = "qwen2.5-3b"
TOKENS = 30
REQUESTS = 120


@dataclass
class Routers:
    """Three routers over one pool, and who of them decides."""

    cluster: LocalCluster

    async def holder(self) -> Holder | None:
        """Return who holds the pool's lease."""
        client = connect(self.cluster.addresses.redis_url)
        value = await client.get(dispatcher(MODEL))
        await client.aclose()
        return Holder.decode(value) if isinstance(value, bytes) else None

    async def settled(self) -> Holder:
        """Wait until somebody decides."""
        held: Holder = await eventually(self.holder, what="a dispatcher")
        return held

    async def load(self, half_way: Callable[[], object]) -> list[int | str]:
        """Send requests to all routers alike, with something happening half way.

        Returns:
            Of each request its number of tokens, or the code that it ended with.
        """
        channels = [open_channel(address) for address in self.cluster.addresses.routers]
        stubs = [router_pb2_grpc.RouterServiceStub(channel) for channel in channels]

        async def one(index: int) -> int | str:
            message = router_pb2.GenerateRequest(max_tokens=TOKENS)
            message.token_ids.ids.extend([10 + index % 50] * 200)
            message.sampling.ignore_eos = True
            tokens = 0
            try:
                async for response in stubs[index % 3].Generate(message, timeout=60.0):
                    tokens += len(response.token_ids)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return tokens

        running = []
        for index in range(REQUESTS):
            running.append(asyncio.create_task(one(index)))
            await asyncio.sleep(0.01)
            if index == REQUESTS // 2:
                happened = half_way()
                if asyncio.iscoroutine(happened):
                    await happened
        ends = await asyncio.gather(*running)
        for channel in channels:
            await channel.close()
        return list(ends)


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="routers")
async def _routers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Routers]:
    spec = ClusterSpec(
        pools=Pools(2, 4),
        routers=3,
        directory=tmp_path_factory.mktemp("cluster"),
        agent_settings={"time_scale": 2.0, "model": MODEL},
        router_settings={"policy": "late_binding"},
        control_settings={"stale_after_seconds": 3.0},
        log_level="WARNING",
    )
    async with LocalCluster(spec) as cluster:
        yield Routers(cluster)


async def test_one_router_decides_for_all(routers: Routers) -> None:
    """With three routers one holds the pool's lease, and all of them serve."""
    held = await routers.settled()

    ends = await routers.load(lambda: None)

    assert held.router_id in {"router-0", "router-1", "router-2"}
    assert ends == [TOKENS] * REQUESTS


async def test_killing_the_dispatcher_costs_only_its_own_clients(routers: Routers) -> None:
    """After kill -9 the others place what waited at once, and one of them takes over."""
    before = await routers.settled()

    ends = await routers.load(lambda: routers.cluster.processes.kill(before.router_id))

    lost = int(before.router_id[-1])
    after = await eventually(lambda: _another(routers, before), what="another dispatcher")
    await routers.cluster.start_router(lost)
    await routers.cluster.wait_serving()

    others = [end for index, end in enumerate(ends) if index % 3 != lost]
    assert [TOKENS] * len(others) == others
    assert {end for index, end in enumerate(ends) if index % 3 == lost} <= {TOKENS, "UNAVAILABLE"}
    assert after.token > before.token


async def test_a_frozen_dispatcher_decides_nothing_when_it_wakes(routers: Routers) -> None:
    """A dispatcher that stops for longer than its lease loses no request, its own included."""
    before = await routers.settled()

    async def freeze() -> None:
        routers.cluster.processes.signal(before.router_id, signal.SIGSTOP)
        after = await eventually(lambda: _another(routers, before), what="another dispatcher")
        routers.cluster.processes.signal(before.router_id, signal.SIGCONT)
        assert after.token > before.token

    ends = await routers.load(freeze)

    assert ends == [TOKENS] * REQUESTS


async def test_without_redis_everybody_serves_on_their_own(routers: Routers) -> None:
    """While Redis is gone there is no dispatcher and no request is lost; afterwards there is one."""
    before = await routers.settled()
    assert routers.cluster.redis is not None

    async def crash() -> None:
        redis = routers.cluster.redis
        assert redis is not None
        redis.kill()
        # Longer than a lease: whoever held it has given it up.
        await asyncio.sleep(1.5)
        redis.start()

    ends = await routers.load(crash)

    assert ends == [TOKENS] * REQUESTS
    after = await routers.settled()
    assert after.token > before.token


async def _another(routers: Routers, before: Holder) -> Holder | None:
    held = await routers.holder()
    return held if held is not None and held.router_id != before.router_id else None
