"""Registrations, reports, liveness and snapshots over real gRPC and real Redis."""

import asyncio

import grpc
import pytest
from steelyard.v1 import control_pb2, types_pb2

from controlplane.settings import ControlPlaneSettings
from servicekit import redis_keys

pytestmark = pytest.mark.asyncio


async def test_an_agent_joins_reports_and_leaves(cluster):
    """What an agent reports is in the snapshot; an orderly leave takes it out at once."""
    _, stub = await cluster.replica()
    agent = cluster.agent(stub)
    agent.load = types_pb2.InstanceLoad(
        running=3,
        kv_used_tokens=777,
        engine_healthy=True,
        by_router=[types_pb2.RouterLoad(router_id="r1", decode_requests=2, decode_kv_tokens=55)],
    )
    agent.start()
    view = await cluster.until(
        stub, lambda v: v.states == {"d0": "READY"} and list(v.snapshot.by_router)
    )

    assert (view.load("d0", "running"), view.load("d0", "kv_used_tokens")) == (3, 777)
    assert [(r.router_id, list(r.decode_kv_tokens)) for r in view.snapshot.by_router] == [
        ("r1", [55])
    ]
    assert {a.state for a in agent.answers} <= {1, 2}
    assert [a.accepted_sequence for a in agent.answers] == list(range(1, len(agent.answers) + 1))
    assert agent.answers[0].report_interval.ToMilliseconds() == 100
    await agent.leave()
    await cluster.until(stub, lambda v: v.states == {})
    kinds = [row[b"kind"] for _, row in await cluster.client.xrange(redis_keys.EVENTS)]
    assert kinds == [b"joined", b"ready", b"left"]


async def test_redis_tells_an_operator_the_story(cluster):
    """The keys hold readable values under the names of the design, alive for three reports."""
    replica, stub = await cluster.replica()
    agent = cluster.agent(stub)
    agent.load.queued_prefill_tokens = 512
    agent.load.step_seconds = 0.0125
    agent.start()
    await cluster.until(
        stub, lambda v: v.states == {"d0": "READY"} and v.load("d0", "queued_prefill_tokens")
    )
    shown = {
        k.decode(): v.decode()
        for k, v in (await cluster.client.hgetall(redis_keys.instance("d0"))).items()
    }

    assert shown["role"] == "DECODE"
    assert shown["state"] == "READY"
    assert shown["epoch"] == "e1"
    assert shown["measured.running"] == "1"
    assert shown["estimated.queued_prefill_tokens"] == "512"
    assert float(shown["estimated.step_seconds"]) == 0.0125
    assert shown["kv_total_tokens"] == "60000"
    assert float(shown["last_report_unix"]) > 1e9
    assert 0 < await cluster.client.pttl(redis_keys.instance("d0")) <= 5000
    assert await cluster.client.smembers(redis_keys.INSTANCES) == {b"d0"}
    raw = await cluster.client.get(redis_keys.SNAPSHOT)
    assert types_pb2.ClusterSnapshot.FromString(raw).sequence > 0
    assert await cluster.client.get(redis_keys.SNAPSHOT_PUBLISHER) == replica.replica_id.encode()


async def test_stale_then_gone_then_back_under_a_new_epoch(cluster):
    """A dead agent's instance turns STALE, then GONE; its restart is used again, the old boot not."""
    _, stub = await cluster.replica(stale_after_seconds=0.6, gone_after_seconds=0.6)
    agent = cluster.agent(stub).start()
    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})
    await agent.die()
    await cluster.until(stub, lambda v: v.states == {"d0": "STALE"})
    shown = await cluster.client.hgetall(redis_keys.instance("d0"))
    assert shown[b"state"] == b"STALE"
    assert b"measured.running" not in shown
    await cluster.until(stub, lambda v: v.states == {})
    assert not await cluster.client.exists(redis_keys.instance("d0"), redis_keys.member("d0"))
    again = cluster.agent(stub, epoch="e2").start()
    view = await cluster.until(stub, lambda v: v.states == {"d0": "READY"})

    assert view.epochs == {"d0": "e2"}
    assert again.registrations == 1


async def test_a_new_epoch_replaces_a_living_one_at_once(cluster):
    """A second boot under the same id takes its place; the first is refused from then on."""
    _, stub = await cluster.replica()
    first = cluster.agent(stub).start()
    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})
    second = cluster.agent(stub, epoch="e2").start()
    await cluster.until(stub, lambda v: v.epochs == {"d0": "e2"} and v.states == {"d0": "READY"})
    error = await cluster.refused(first.register())

    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "EPOCH_REPLACED")
    assert second.registrations == 1


async def test_an_unregistered_report_asks_to_register(cluster):
    """A first report of an unknown epoch ends with NOT_FOUND and the reason UNREGISTERED."""
    _, stub = await cluster.replica()

    async def reports():
        yield control_pb2.ReportRequest(instance_id="ghost", epoch="e", sequence=1)

    error = await cluster.refused(stub.Report(reports()).read())

    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNREGISTERED")
    assert error.metadata == {"instance_id": "ghost", "epoch": "e"}


async def test_an_engine_that_does_not_answer_is_not_ready(cluster):
    """The agent lives, its engine does not: the instance goes back to JOINING, and returns."""
    _, stub = await cluster.replica()
    agent = cluster.agent(stub).start()
    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})
    agent.load.engine_healthy = False
    await cluster.until(stub, lambda v: v.states == {"d0": "JOINING"})
    agent.load.engine_healthy = True

    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})


async def test_a_clock_that_is_wrong_changes_nothing(cluster):
    """Ages count from when a report came in, whatever the agent's clock says."""
    _, stub = await cluster.replica()
    agent = cluster.agent(stub)
    agent.load.time.FromSeconds(4_000_000_000)
    agent.start()
    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})
    agent.load.time.FromSeconds(1)
    seen = []
    await cluster.until(
        stub, lambda v: v.load("d0", "age_seconds") > 0 and len(seen) > 20, collect=seen
    )

    assert {view.states["d0"] for view in seen} == {"READY"}


async def test_drain_and_undo(cluster):
    """A drained instance stays out over a silence, until it is put back."""
    _, stub = await cluster.replica(stale_after_seconds=0.6)
    agent = cluster.agent(stub).start()
    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})
    answer = await stub.Drain(control_pb2.DrainRequest(instance_id="d0"))
    assert answer.state == types_pb2.INSTANCE_STATE_DRAINING
    await cluster.until(stub, lambda v: v.states == {"d0": "DRAINING"})
    await agent.die()
    await cluster.until(stub, lambda v: v.states == {"d0": "STALE"})
    agent.start()
    await cluster.until(stub, lambda v: v.states == {"d0": "DRAINING"})
    again = await stub.Drain(control_pb2.DrainRequest(instance_id="d0"))
    assert again.state == types_pb2.INSTANCE_STATE_DRAINING
    answer = await stub.Drain(control_pb2.DrainRequest(instance_id="d0", undo=True))
    assert answer.state == types_pb2.INSTANCE_STATE_READY
    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})
    error = await cluster.refused(stub.Drain(control_pb2.DrainRequest(instance_id="nobody")))

    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_INSTANCE")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instance_id", ""),
        ("instance_id", "a:b"),
        ("epoch", ""),
        ("role", 0),
        ("model", ""),
        ("model", "a|b"),
        ("address", "nowhere"),
        ("profile", "a:1"),
    ],
)
async def test_bad_registrations_name_the_field(cluster, field, value):
    """What everything hangs on is checked, and nothing is stored."""
    _, stub = await cluster.replica()
    agent = cluster.agent(stub)
    setattr(agent.engine, field, value)
    error = await cluster.refused(agent.register())

    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in error.violations] == [f"engine.{field}"]
    assert await cluster.client.keys("steelyard:member:*") == []


async def test_a_bad_report_names_the_field(cluster):
    """A number that cannot be ends the stream with INVALID_ARGUMENT."""
    _, stub = await cluster.replica()
    agent = cluster.agent(stub)
    await agent.register()

    async def reports():
        load = types_pb2.InstanceLoad(step_seconds=float("nan"))
        yield control_pb2.ReportRequest(instance_id="d0", epoch="e1", sequence=1, load=load)

    error = await cluster.refused(stub.Report(reports()).read())

    assert [violation.field for violation in error.violations] == ["load.step_seconds"]


async def test_a_graceful_stop_ends_streams_without_an_error(cluster):
    """Watchers and agents of a stopping replica see their streams end well, and nothing is lost."""
    replica, stub = await cluster.replica()
    agent = cluster.agent(stub).start()
    await cluster.until(stub, lambda v: v.states == {"d0": "READY"})
    watch = stub.WatchCluster(control_pb2.WatchClusterRequest())
    await watch.read()
    stopping = asyncio.create_task(replica.stop())
    while await watch.read() is not grpc.aio.EOF:
        pass

    assert await watch.code() is grpc.StatusCode.OK
    await stopping
    await agent.die()
    assert await cluster.client.get(redis_keys.SNAPSHOT_PUBLISHER) is None
    await cluster.replicas.pop(replica).close()


async def test_many_instances_are_told_to_report_less_often(cluster):
    """The server steers the interval by how many there are."""
    _, stub = await cluster.replica(max_reports_per_second=10.0)
    agents = [cluster.agent(stub, f"d{n}").start() for n in range(5)]
    await cluster.until(stub, lambda v: len(v.states) == 5)

    async def slowed():
        return agents[0].answers and agents[0].answers[-1].report_interval.ToMilliseconds() == 500

    await cluster.eventually(slowed)


async def test_settings_are_printed_under_their_variables():
    """Every setting has a line, defaults as documented."""
    printed = ControlPlaneSettings.load().print_config()

    assert "STEELYARD_CONTROLPLANE_STALE_AFTER_SECONDS=0.3 " in printed
    assert len(printed.splitlines()) == len(ControlPlaneSettings.model_fields)
