"""The snapshot feed on a real Redis: new ones, old ones, garbage, and silence."""

import asyncio

import pytest
import pytest_asyncio

from dataplane.router.feed import SnapshotFeed
from dataplane.router.snapshots import SnapshotReader
from servicekit.clock import SystemClock
from servicekit.embedded_redis import EmbeddedRedis
from servicekit.redis_client import connect
from servicekit.redis_keys import SNAPSHOT, SNAPSHOTS_CHANNEL
from tests.support.snapshots import publish, roster, snapshot
from tests.support.waiting import eventually


class Follower:
    """A feed that runs, and what it told."""

    def __init__(self, client, stale_after_seconds: float) -> None:
        self.feed = SnapshotFeed(
            client,
            SnapshotReader("router-0"),
            clock=SystemClock(),
            stale_after_seconds=stale_after_seconds,
        )
        self.told: list[tuple[int, bool]] = []
        self.feed.listen(
            lambda state: self.told.append(
                (state.sequence, any(s.stale for s in state.pools.values()))
            )
        )
        self.task = asyncio.create_task(self.feed.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


@pytest_asyncio.fixture
async def follow():
    """Return a function that starts a feed over a client; all are stopped afterwards."""
    followers = []

    def start(client, stale_after_seconds: float = 1e6) -> Follower:
        followers.append(Follower(client, stale_after_seconds))
        return followers[-1]

    yield start
    for follower in followers:
        await follower.stop()


def numbered(sequence: int):
    """Return the sequence's snapshot of one roster."""
    return snapshot(roster("p0", "d0"), sequence=sequence)


@pytest.mark.asyncio
async def test_the_last_snapshot_is_read_at_once_and_new_ones_as_they_come(redis_client, follow):
    """A router that starts knows the cluster before anything is published, then each change."""
    await publish(redis_client, numbered(1))
    follower = follow(redis_client)
    await eventually(lambda: follower.told == [(1, False)])
    await publish(redis_client, numbered(2))
    await eventually(lambda: follower.told[-1] == (2, False))

    assert follower.feed.age_seconds < 10


@pytest.mark.asyncio
async def test_the_same_snapshot_is_told_once(redis_client, follow):
    """A sequence that comes twice changes nothing, and is no sign of life."""
    await publish(redis_client, numbered(1))
    follower = follow(redis_client)
    await eventually(lambda: follower.told)
    await publish(redis_client, numbered(1))
    await publish(redis_client, numbered(2))
    await eventually(lambda: follower.told[-1] == (2, False))

    assert follower.told == [(1, False), (2, False)]


@pytest.mark.asyncio
async def test_garbage_is_passed_over(redis_client, follow):
    """Bytes that are no snapshot are logged and forgotten; the next good one is taken."""
    await redis_client.set(SNAPSHOT, b"\xff\xff\xff")
    follower = follow(redis_client)
    await eventually(lambda: _subscribers(redis_client))
    await redis_client.publish(SNAPSHOTS_CHANNEL, b"\x00garbage")
    await publish(redis_client, numbered(3))
    await eventually(lambda: follower.told == [(3, False)])


async def _subscribers(client) -> bool:
    ((_, count),) = await client.pubsub_numsub(SNAPSHOTS_CHANNEL)
    return count > 0


@pytest.mark.asyncio
async def test_silence_makes_the_last_one_stale_and_a_new_one_mends_it(redis_client, follow):
    """After the age limit listeners hear once that measurements are not to be believed."""
    await publish(redis_client, numbered(1))
    follower = follow(redis_client, stale_after_seconds=0.2)
    await eventually(lambda: follower.told == [(1, False), (1, True)])
    await publish(redis_client, numbered(2))
    await eventually(lambda: (2, False) in follower.told)


@pytest.mark.asyncio
async def test_a_feed_outlives_its_redis(follow):
    """Redis dies: the last snapshot stays and goes stale; Redis returns: new ones come again."""
    with EmbeddedRedis(persist=True) as server:
        client = connect(server.url, timeout_seconds=0.5)
        await publish(client, numbered(1))
        follower = follow(client, stale_after_seconds=0.3)
        await eventually(lambda: follower.told)
        server.kill()
        await eventually(lambda: follower.told[-1] == (1, True))
        server.start()
        # The feed's own client has connections that died with Redis; ours must not.
        publisher = connect(server.url)
        await eventually(lambda: _subscribers(publisher))
        await publish(publisher, numbered(2))
        await eventually(lambda: follower.told[-1] == (2, False))
        await follower.stop()
        await publisher.aclose()
        await client.aclose()
