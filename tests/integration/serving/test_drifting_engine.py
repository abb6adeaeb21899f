"""A decode engine that slows while it serves: told, published, and priced with, through live parts."""

import asyncio
import itertools
from typing import Self

import pytest
from steelyard.v1 import control_pb2, control_pb2_grpc, router_pb2

from cli import ctl
from servicekit.embedded_redis import EmbeddedRedis
from tests.integration.controlplane.test_library import PROFILE, draft, publish
from tests.support.requests import ids_request
from tests.support.waiting import eventually
from tests.support.whole_cluster import WholeCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(150)]
FACTOR = 1.7
AT_ONCE, TOKENS = 6, 24
BASELINE_REQUESTS = 45


class Traffic:
    """Requests one after another, some at a time, until it is left."""

    def __init__(self, cluster: WholeCluster) -> None:
        self._cluster = cluster
        self._numbers = itertools.count()
        self.served = 0

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._one_after_another()) for _ in range(AT_ONCE)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one_after_another(self) -> None:
        while True:
            message = ids_request([next(self._numbers) % 300 + 10] * 120, TOKENS)
            message.sampling.ignore_eos = True
            heard = await self._cluster.generate(message, timeout=60)
            assert heard.error is None
            self.served += 1


async def test_a_decode_engine_that_slows_is_priced_as_it_is(capsys):
    """Its drift is an event and a line of ctl; then new constants are published, and a router uses them."""
    control = {"auto_publish": True, "publish_after_seconds": 3.0}
    with EmbeddedRedis() as server:
        async with WholeCluster(server.url, "1P1D", time_scale=1.0, control=control) as cluster:
            address = cluster.control.server.address
            stub = control_pb2_grpc.ControlServiceStub(await cluster.channel(address))
            await publish(stub, draft())
            before = await eventually(lambda: _priced(cluster, version=1))
            async with Traffic(cluster) as traffic:
                await eventually(
                    lambda: cluster.control.drift.outcomes >= BASELINE_REQUESTS, within_seconds=40
                )
                steady = await _drifting(stub)
                cluster.agents["decode-0"].agent.engine.slow(FACTOR)
                drift = await eventually(lambda: _drifting(stub), within_seconds=40)
                await asyncio.to_thread(ctl.list_constants, PROFILE, control_plane=address)
                shown = capsys.readouterr().out
                await eventually(lambda: _priced(cluster, version=2), within_seconds=60)
            await cluster.settled()
            after = await _priced(cluster, version=2)
            kinds = [
                fields[b"kind"] for _, fields in await cluster.redis.xrange("steelyard:events")
            ]
            listed = await stub.ListConstants(control_pb2.ListConstantsRequest(profile=PROFILE))

    assert steady == []
    assert [(d.instance_id, d.part) for d in drift] == [("decode-0", "decode")]
    assert "DRIFT decode-0: decode at 1." in shown
    assert b"drift" in kinds
    assert listed.current[PROFILE] == 2
    assert traffic.served > BASELINE_REQUESTS
    # The first constants after a shift are learned from requests before it as well.
    assert 1.1 * before < after < 1.1 * FACTOR * before


async def _drifting(stub) -> list[control_pb2.Drift]:
    answer = await stub.ListConstants(control_pb2.ListConstantsRequest(profile=PROFILE))
    return list(answer.drifting)


async def _priced(cluster: WholeCluster, *, version: int) -> float | None:
    """Return the TPOT that the router predicts by that version of constants, alone on the engine."""
    request = router_pb2.RouteRequest(request=ids_request([5] * 120, 8, policy="least_loaded"))
    receipt = (await cluster.stub.Route(request)).receipt
    if receipt.constants_version != version:
        return None
    return receipt.predicted_tpot.ToNanoseconds() / 1e9
