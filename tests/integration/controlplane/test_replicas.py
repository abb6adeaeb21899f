"""Several replicas, their restarts, and a Redis that dies."""

import asyncio

import grpc
import pytest
from steelyard.v1 import control_pb2, types_pb2

from servicekit import probe, redis_keys

pytestmark = pytest.mark.asyncio


async def test_two_replicas_tell_one_truth(cluster):
    """Agents of either replica are seen through both, in the same numbered snapshots."""
    _, first = await cluster.replica()
    _, second = await cluster.replica()
    cluster.agent(first, "d0").start()
    cluster.agent(second, "d1").start()
    both = {"d0": "READY", "d1": "READY"}
    seen: dict[str, list] = {"first": [], "second": []}

    def enough(name):
        return lambda _: len([v for v in seen[name] if v.states == both]) > 20

    await asyncio.gather(
        cluster.until(first, enough("first"), collect=seen["first"]),
        cluster.until(second, enough("second"), collect=seen["second"]),
    )
    by_number = [{v.snapshot.sequence: v.snapshot for v in views} for views in seen.values()]
    common = by_number[0].keys() & by_number[1].keys()

    assert len(common) > 5
    assert all(by_number[0][number] == by_number[1][number] for number in common)
    for views in seen.values():
        numbers = [view.snapshot.sequence for view in views]
        assert numbers == sorted(set(numbers))


async def test_another_replica_publishes_when_one_stops(cluster):
    """The lease passes on; numbers go on, the roster is the same, and nobody turns stale."""
    one, _ = await cluster.replica()
    two, second = await cluster.replica()
    cluster.agent(second, "d0").start()
    before = await cluster.until(second, lambda v: v.states == {"d0": "READY"})
    assert [one.publisher.holder, two.publisher.holder] == [True, False]
    seen = []
    watching = asyncio.create_task(
        cluster.until(
            second,
            lambda v: two.publisher.holder and v.snapshot.sequence > seen[0].snapshot.sequence + 20,
            collect=seen,
        )
    )
    await cluster.stop(one)
    after = await watching
    numbers = [view.snapshot.sequence for view in seen]

    assert numbers == sorted(set(numbers))
    assert after.snapshot.roster_version == before.snapshot.roster_version
    assert after.snapshot.roster == before.snapshot.roster


async def test_a_replica_that_dies_holding_the_lease_is_replaced(cluster):
    """A publisher that just stops loses its lease by time, and what it still sends is refused."""
    one, _ = await cluster.replica()
    two, second = await cluster.replica()
    await cluster.until(second, lambda v: v.snapshot.sequence)
    (publishing,) = [task for task in one._tasks if task.get_name() == "publisher"]
    one.publisher._release = _nothing
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    await cluster.until(second, lambda _: two.publisher.holder)

    assert await one.publisher.step() is False


async def test_a_restart_loses_nothing(cluster):
    """Members, drains, constants and targets are there after the only replica was replaced."""
    replica, stub = await cluster.replica()
    agents = [cluster.agent(stub, name) for name in ("d0", "d1")]
    for agent in agents:
        agent.start()
    await cluster.until(stub, lambda v: v.states == {"d0": "READY", "d1": "READY"})
    await stub.Drain(control_pb2.DrainRequest(instance_id="d1"))
    targets = types_pb2.SloPolicy(default_class="batch")
    targets.classes["batch"].tpot.FromMilliseconds(500)
    await stub.SetSlo(control_pb2.SetSloRequest(slo=targets))
    before = await cluster.until(
        stub, lambda v: v.states["d1"] == "DRAINING" and v.roster.slo.default_class == "batch"
    )
    for agent in agents:
        await agent.die()
    await cluster.stop(replica)
    _, stub = await cluster.replica()
    after = await cluster.until(stub, lambda v: v.snapshot.sequence > before.snapshot.sequence)

    assert after.roster == before.roster
    assert after.snapshot.roster_version == before.snapshot.roster_version
    assert after.states == {"d0": "READY", "d1": "DRAINING"}


async def test_redis_killed_and_back(own_redis_cluster):
    """While Redis is gone the replica says so and keeps its streams; it recovers by itself."""
    cluster = own_redis_cluster
    replica, stub = await cluster.replica()
    agent = cluster.agent(stub).start()
    before = await cluster.until(stub, lambda v: v.states == {"d0": "READY"})
    cluster.redis.kill()
    await cluster.eventually(lambda: _health(replica, "NOT_SERVING"))
    answered = len(agent.answers)
    error = await cluster.refused(cluster.agent(stub, "d1").register())
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "REDIS_UNAVAILABLE")
    assert error.retry_after_seconds == 1.0

    async def reports_go_on():
        return len(agent.answers) > answered + 5

    await cluster.eventually(reports_go_on)
    assert agent.registrations == 1
    agent.load.running = 42
    cluster.redis.start()
    after = await cluster.until(
        stub, lambda v: v.states == {"d0": "READY"} and v.load("d0", "running") == 42
    )

    assert after.snapshot.sequence > before.snapshot.sequence
    assert await _health(replica, "SERVING")
    # A Redis that kept its data needs nobody to register again; one that forgot makes agents do it.
    assert agent.registrations == (1 if cluster.persistent else 2)
    assert replica.failure is None


async def test_a_replica_starts_before_its_redis(own_redis_cluster):
    """Without Redis a replica is up and NOT_SERVING; it serves once Redis is there."""
    cluster = own_redis_cluster
    cluster.redis.kill()
    replica, stub = await cluster.replica()
    await cluster.eventually(lambda: _health(replica, "NOT_SERVING"))
    cluster.redis.start()
    await cluster.eventually(lambda: _health(replica, "SERVING"))
    cluster.agent(stub).start()

    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})


async def test_streams_survive_a_watch_through_the_outage(own_redis_cluster):
    """An open WatchCluster is silent while Redis is gone and goes on after it."""
    cluster = own_redis_cluster
    _, stub = await cluster.replica()
    watch = stub.WatchCluster(control_pb2.WatchClusterRequest())
    first = await watch.read()
    cluster.redis.kill()
    cluster.redis.start()
    async with asyncio.timeout(30):
        while (await watch.read()).snapshot.sequence < first.snapshot.sequence + 50:
            pass
    watch.cancel()
    assert await cluster.client.exists(redis_keys.SNAPSHOT)


async def _health(replica, expected: str) -> bool:
    return await asyncio.to_thread(probe.probe, replica.server.address) == expected


async def _nothing() -> None:
    """Stand for the release that a crash does not come to."""
