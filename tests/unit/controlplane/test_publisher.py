"""The publisher on a store in memory and a clock that stands still."""

from dataclasses import replace

import pytest
from steelyard.v1 import types_pb2

from controlplane.core import slo
from controlplane.core.values import Constants, Outcome
from controlplane.testing import FlakyStore, make_engine, make_publisher, make_report
from enginemodel.profiles import A40_QWEN
from servicekit.clock import ManualClock
from servicekit.errors import RedisUnavailable

pytestmark = pytest.mark.asyncio


class World:
    """A store, a clock and one or more publishers."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = FlakyStore(self.clock)
        self.publisher = make_publisher(self.store, self.clock)

    async def snapshot(self):
        return types_pb2.ClusterSnapshot.FromString(await anext(self.store.snapshots()))

    async def tick(self, who=None, *, seconds: float = 0.04):
        await self.clock.advance(seconds)
        assert await (who or self.publisher).step()
        return await self.snapshot()

    async def join(self, **fields):
        await self.store.register(make_engine(**fields))

    async def kinds(self):
        return [event.kind for event in reversed(await self.store.recent_events(100))]


@pytest.fixture
def world():
    """Make an empty world."""
    return World()


def states(snapshot) -> dict[str, str]:
    """Read the states in a snapshot."""
    roster = types_pb2.Roster.FromString(snapshot.roster)
    return {
        instance.engine.instance_id: types_pb2.InstanceState.Name(instance.state)[15:]
        for instance in roster.instances
    }


async def test_a_life_from_joining_to_gone(world):
    """An instance joins, serves, falls silent, is given up, each within its time."""
    await world.join()
    assert states(await world.tick()) == {"d0": "JOINING"}
    await world.store.write_reports([make_report(running=2, kv_used_tokens=30)])
    ready = await world.tick()
    assert states(ready) == {"d0": "READY"}
    assert (list(ready.loads.running), list(ready.loads.kv_used_tokens)) == ([2], [30])
    for _ in range(6):
        late = await world.tick()
    assert states(late) == {"d0": "READY"}
    for _ in range(3):
        late = await world.tick()
    assert states(late) == {"d0": "STALE"}
    for _ in range(60):
        late = await world.tick(seconds=0.1)

    assert states(late) == {}
    assert await world.kinds() == ["ready", "stale", "gone"]


async def test_the_roster_has_a_new_version_when_and_only_when_it_changes(world):
    """Reports alone leave version and bytes as they are."""
    await world.join()
    first = await world.tick()
    await world.store.write_reports([make_report()])
    second = await world.tick()
    await world.store.write_reports([make_report(running=9)])
    third = await world.tick()
    await world.store.set_slo(slo.DEFAULT)
    fourth = await world.tick()
    loose = replace(slo.DEFAULT, default_class="tight")
    await world.store.set_slo(loose)
    fifth = await world.tick()

    assert first.roster_version < second.roster_version == third.roster_version
    assert second.roster == third.roster
    assert fourth.roster_version == third.roster_version  # the same targets as by default
    assert fifth.roster_version > fourth.roster_version


async def test_sequence_and_version_go_on_in_the_next_replica(world):
    """A replica that takes over counts on from where the last one stopped, with the same roster."""
    await world.join()
    before = [await world.tick() for _ in range(3)]
    other = make_publisher(world.store, world.clock, "b")
    assert not await other.step()
    await world.clock.advance(0.13)
    after = await world.tick(other, seconds=0)

    assert after.sequence > before[-1].sequence > before[0].sequence
    assert (after.roster_version, after.roster) == (before[-1].roster_version, before[-1].roster)
    assert not await world.publisher.step()


async def test_numbers_are_never_used_twice_even_if_the_store_forgets(world):
    """An emptied store makes the count start at its clock, above all that was published."""
    await world.join()
    before = [await world.tick() for _ in range(5)][-1]
    emptied = FlakyStore(world.clock)
    fresh = make_publisher(emptied, world.clock, "b")
    await world.clock.advance(1.0)
    await fresh.step()
    after = types_pb2.ClusterSnapshot.FromString(await anext(emptied.snapshots()))

    assert after.sequence > before.sequence
    assert after.roster_version > before.roster_version


async def test_an_outage_of_the_store_makes_nobody_stale(world):
    """After Redis was away for long, instances get their time to report again."""
    await world.join()
    await world.store.write_reports([make_report()])
    await world.tick()
    world.store.away = True
    await world.clock.advance(60.0)
    with pytest.raises(RedisUnavailable):
        await world.publisher.step()
    world.store.away = False

    assert states(await world.tick()) == {"d0": "READY"}
    assert states(await world.tick(seconds=0.4)) == {"d0": "READY"}
    assert states(await world.tick(seconds=0.1)) == {"d0": "READY"}
    for _ in range(4):
        last = await world.tick(seconds=0.1)
    assert states(last) == {"d0": "STALE"}


async def test_ages_are_the_stores_not_the_agents(world):
    """A report's age counts from when it was stored."""
    await world.join()
    await world.store.write_reports([make_report()])

    assert list((await world.tick(seconds=0.25)).loads.age_seconds) == pytest.approx([0.25])


async def test_constants_reach_the_roster_with_each_instances_scale(world):
    """Published constants appear, the reference stands in before, and instances get their scale."""
    await world.join()
    roster = types_pb2.Roster.FromString((await world.tick()).roster)
    assert [(c.profile, c.version, c.uncalibrated) for c in roster.constants] == [("p", 0, True)]
    draft = Constants(
        profile="p", version=0, constants=A40_QWEN.constants, instance_scale={"d0": 1.3}
    )
    await world.store.publish_constants(draft, 0)
    roster = types_pb2.Roster.FromString((await world.tick()).roster)

    assert [(c.profile, c.version, c.uncalibrated) for c in roster.constants] == [("p", 1, False)]
    assert roster.instances[0].scale == pytest.approx(1.3)
    assert roster.constants[0].constants.p0_seconds == A40_QWEN.constants.p0_seconds


async def test_a_leaving_instance_is_gone_at_once(world):
    """The last report of an orderly shutdown takes it out of the roster."""
    await world.join()
    await world.store.write_reports([make_report()])
    await world.tick()
    await world.store.write_reports([make_report(leaving=True)])

    assert states(await world.tick()) == {}
    assert await world.kinds() == ["ready", "left"]


async def test_lengths_are_folded_once_whoever_publishes(world):
    """Outcomes count once over two replicas, and the version moves with the bytes only."""
    done = Outcome(request_id="r", model="m", prompt_tokens=9, completion_tokens=12)
    await world.store.add_outcomes([done, done])
    first = await world.tick()
    await world.store.add_outcomes([done])
    second = await world.tick()
    third = await world.tick(seconds=1.0)
    await world.store.release("a")
    taken_over = await world.tick(make_publisher(world.store, world.clock, "b"))
    table = types_pb2.LengthTable.FromString(third.lengths)
    evidence = {row.key: sum(row.weights) for row in table.lengths}

    assert first.lengths_version == second.lengths_version < third.lengths_version
    assert set(evidence) == {"m|||16", "m|||"}
    assert evidence["m|||"] == pytest.approx(3.0, abs=0.01)
    assert (taken_over.lengths_version, taken_over.lengths) == (
        third.lengths_version,
        third.lengths,
    )


async def test_a_joining_crowd_does_not_hold_snapshots_up(world):
    """More changes than fit one tick are spread over the next ones."""
    crowd = [f"d{n:03}" for n in range(120)]
    for name in crowd:
        await world.join(instance_id=name)
    await world.store.write_reports([make_report(name) for name in crowd])
    ready = [list(states(await world.tick()).values()).count("READY") for _ in range(3)]

    assert ready == [50, 100, 120]
