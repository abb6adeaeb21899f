"""What waits for the store, and what watches it."""

import asyncio

import pytest
from steelyard.v1 import types_pb2

from controlplane.core.values import Outcome
from controlplane.errors import Unregistered
from controlplane.feed import SnapshotFeed
from controlplane.sinks import OutcomeSink, ReportSink
from controlplane.store import SnapshotState
from controlplane.store_memory import MemoryStore
from controlplane.testing import FlakyStore, make_engine, make_metrics, make_publisher, make_report
from servicekit.clock import ManualClock
from servicekit.errors import RedisUnavailable

pytestmark = pytest.mark.asyncio

GATHER_SECONDS = 0.02


@pytest.fixture
def clock():
    """Make a clock that stands still."""
    return ManualClock()


@pytest.fixture
def store(clock):
    """Make a store that can go away."""
    return FlakyStore(clock)


async def seen(store):
    """Read what the store has of d0."""
    sighting = (await store.tick("a", 60.0)).sightings["d0"]
    return sighting.report.load.running if sighting.report else None


async def test_reports_are_gathered_into_one_write(store, clock):
    """Reports of the same instance within some ms become one, the latest."""
    sink = ReportSink(store, clock, make_metrics(), GATHER_SECONDS)
    running = asyncio.ensure_future(sink.run())
    await store.register(make_engine())
    for number in range(5):
        sink.offer(make_report(running=number))
    await clock.advance(0)
    assert await seen(store) is None
    await clock.advance(GATHER_SECONDS)

    assert await seen(store) == 4
    running.cancel()


async def test_reports_wait_while_the_store_is_away(store, clock):
    """The latest report of each instance survives an outage and is written after it."""
    sink = ReportSink(store, clock, make_metrics(), GATHER_SECONDS)
    running = asyncio.ensure_future(sink.run())
    await store.register(make_engine())
    store.away = True
    sink.offer(make_report(running=1))
    await clock.advance(1.0)
    sink.offer(make_report(running=2))
    await clock.advance(1.0)
    store.away = False
    await clock.advance(1.0)

    assert await seen(store) == 2
    running.cancel()


async def test_strangers_are_told_to_register(store, clock):
    """An unknown epoch is refused at once when asked, and after the write otherwise."""
    sink = ReportSink(store, clock, make_metrics(), GATHER_SECONDS)
    with pytest.raises(Unregistered):
        await sink.admit("d0", "e1")
    sink.offer(make_report())
    await sink.flush()
    with pytest.raises(Unregistered):
        sink.offer(make_report())
    await store.register(make_engine())
    await sink.admit("d0", "e1")
    sink.offer(make_report(running=7))
    await sink.flush()

    assert await seen(store) == 7


async def test_everybody_is_admitted_while_the_store_is_away(store, clock):
    """Nobody is sent to register with a store that cannot take it."""
    store.away = True
    await ReportSink(store, clock, make_metrics(), GATHER_SECONDS).admit("d0", "e1")


async def test_outcomes_are_answered_once_stored(store, clock):
    """The ticket of an outcome is good when the store has it, not before."""
    sink = OutcomeSink(store, clock, make_metrics(), GATHER_SECONDS)
    tickets = [sink.offer(Outcome(request_id=f"r{n}")) for n in range(3)]
    waiting = asyncio.ensure_future(sink.written(tickets[-1], 5.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await sink.flush()
    await waiting

    assert [o.request_id for _, o in await store.recent_outcomes(9)] == ["r2", "r1", "r0"]


async def test_outcomes_that_cannot_be_stored_in_time_say_so(store, clock):
    """While the store is away the caller hears of it, and the outcome is stored later."""
    sink = OutcomeSink(store, clock, make_metrics(), GATHER_SECONDS)
    store.away = True
    ticket = sink.offer(Outcome(request_id="r"))
    with pytest.raises(RedisUnavailable):
        await sink.flush()
    with pytest.raises(RedisUnavailable):
        await sink.written(ticket, 0.01)
    store.away = False
    await sink.flush()

    await sink.written(ticket, 0.0)


async def test_outcomes_are_stored_once_though_two_flush_at_once(clock):
    """A stop that flushes while the gatherer writes does not write the same outcomes again."""

    class SlowStore(MemoryStore):
        async def add_outcomes(self, outcomes):
            await asyncio.sleep(0)
            await super().add_outcomes(outcomes)

    slow = SlowStore(clock)
    sink = OutcomeSink(slow, clock, make_metrics(), GATHER_SECONDS)
    for number in range(3):
        sink.offer(Outcome(request_id=str(number)))

    await asyncio.gather(sink.flush(), sink.flush())

    assert [o.request_id for _, o in await slow.recent_outcomes(9)] == ["2", "1", "0"]


async def test_the_oldest_outcomes_make_room(store, clock):
    """An outage longer than the memory loses the oldest, counts them, and goes on."""
    counted = make_metrics()
    sink = OutcomeSink(store, clock, counted, GATHER_SECONDS)
    last = [sink.offer(Outcome(request_id=str(n))) for n in range(20_010)][-1]
    await sink.flush()
    await sink.written(last, 0.0)

    assert counted.outcomes_dropped._value.get() == 10
    assert len(await store.recent_outcomes(30_000)) == 20_000


async def test_watchers_get_the_latest_and_then_each_newer(store, clock):
    """A new watcher is served at once; closing ends all watches."""
    feed = SnapshotFeed(store, clock, make_metrics())
    following = asyncio.ensure_future(feed.run())
    maker = make_publisher(store, clock)
    await store.register(make_engine())
    await maker.step()
    await clock.advance(0.04)
    first_watch, second_watch = feed.watch(), feed.watch()
    first = await anext(first_watch)
    waiting = asyncio.ensure_future(anext(first_watch))
    await maker.step()
    second = await asyncio.wait_for(waiting, 5)

    assert second.sequence == first.sequence + 1
    assert (await anext(second_watch)).sequence == second.sequence
    assert {name: state.value for name, state in feed.states.items()} == {"d0": "JOINING"}
    feed.close()
    assert [snapshot async for snapshot in first_watch] == []
    following.cancel()


async def test_the_feed_never_goes_back(store, clock):
    """A snapshot that was overtaken on its way is dropped, unless nothing newer comes."""
    feed = SnapshotFeed(store, clock, make_metrics())
    for sequence in (5, 4, 5):
        feed._take(types_pb2.ClusterSnapshot(sequence=sequence))
    assert feed.latest.sequence == 5
    await clock.advance(2.0)
    assert feed.age_seconds() == 2.0
    feed._take(types_pb2.ClusterSnapshot(sequence=4))

    assert feed.latest.sequence == 4


async def test_the_feed_survives_an_outage(store, clock):
    """Snapshots are followed again when the store is back."""
    feed = SnapshotFeed(store, clock, make_metrics())
    following = asyncio.ensure_future(feed.run())
    await store.tick("a", 1e9)
    for sequence in (1, 2, 3):
        store.away = sequence == 2
        # Published by another process, past this outage.
        blob = types_pb2.ClusterSnapshot(sequence=sequence).SerializeToString()
        await MemoryStore.publish(store, "a", SnapshotState(sequence=sequence), blob)
        await clock.advance(0.2)

    assert feed.latest.sequence == 3
    following.cancel()
