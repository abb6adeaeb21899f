"""Leases in a real Redis: written, renewed, swept, and right again after Redis was away."""

import asyncio

import pytest
import pytest_asyncio

from dataplane.router.inflight import LEASE_SECONDS, REQUEST_TTL_SECONDS, InflightBoard
from servicekit.clock import ManualClock
from servicekit.embedded_redis import EmbeddedRedis
from servicekit.redis_client import connect
from servicekit.redis_keys import inflight, request

HERE = inflight("d0", "boot-1")


@pytest.fixture
def clock() -> ManualClock:
    """Return a clock that stands still."""
    return ManualClock()


@pytest.fixture
def board(redis_client, clock) -> InflightBoard:
    """Return a board over an empty Redis; the test flushes it."""
    return InflightBoard(redis_client, clock=clock, router_id="router-0")


@pytest_asyncio.fixture
async def mortal():
    """Yield a Redis that may be killed, and a client of it."""
    with EmbeddedRedis(persist=True) as server:
        client = connect(server.url, timeout_seconds=0.5)
        yield server, client
        await client.aclose()


async def members(client) -> set[str]:
    """Return the requests on d0."""
    return {member.decode() for member in await client.zrange(HERE, 0, -1)}


@pytest.mark.asyncio
async def test_a_lease_is_there_until_it_is_dropped(board, redis_client, clock):
    """Holding writes the request with its expiry, dropping takes it out, and the key with it."""
    board.hold("r1", "d0", "boot-1")
    board.hold("r2", "d0", "boot-1")
    await board.flush()
    assert await redis_client.zscore(HERE, "r1") == clock.unix() + LEASE_SECONDS
    board.drop("r1", "d0", "boot-1")
    board.drop("r2", "d0", "boot-1")
    await board.flush()

    assert await redis_client.exists(HERE) == 0
    assert len(board) == 0


@pytest.mark.asyncio
async def test_what_comes_and_goes_between_two_writes_leaves_nothing(board, redis_client):
    """A lease held and dropped before a write is never seen; one dropped and held again is."""
    board.hold("gone", "d0", "boot-1")
    board.drop("gone", "d0", "boot-1")
    board.hold("back", "d0", "boot-1")
    await board.flush()
    board.drop("back", "d0", "boot-1")
    board.hold("back", "d0", "boot-1")
    await board.flush()

    assert await members(redis_client) == {"back"}


@pytest.mark.asyncio
async def test_long_requests_have_their_leases_renewed(board, redis_client, clock):
    """A lease whose half is over is written anew."""
    board.hold("r", "d0", "boot-1")
    await board.flush()
    await clock.advance(LEASE_SECONDS / 2 + 1)
    await board.flush()

    assert await redis_client.zscore(HERE, "r") == clock.unix() + LEASE_SECONDS


@pytest.mark.asyncio
async def test_what_a_dead_router_left_is_swept(board, redis_client, clock):
    """A write to an instance's leases takes out those that are over, whoever held them."""
    await redis_client.zadd(HERE, {"orphan": clock.unix() - 1, "alive": clock.unix() + 5})
    board.hold("mine", "d0", "boot-1")
    await board.flush()

    assert await members(redis_client) == {"alive", "mine"}


@pytest.mark.asyncio
async def test_a_boot_has_leases_of_its_own(board, redis_client):
    """Leases of an earlier boot stay under its name and are dropped there."""
    board.hold("r", "d0", "boot-1")
    board.hold("r", "d0", "boot-2")
    board.drop("r", "d0", "boot-1")
    await board.flush()

    assert await members(redis_client) == set()
    assert await redis_client.zcard(inflight("d0", "boot-2")) == 1


@pytest.mark.asyncio
async def test_a_request_has_a_row_that_ends_by_itself(board, redis_client):
    """Fields gather in the request's hash, with its router and a time to live."""
    board.note("r", {"phase": "prefill", "at": "p0"})
    board.note("r", {"phase": "decode"})
    await board.flush()
    row = await redis_client.hgetall(request("r"))

    assert row == {b"router": b"router-0", b"phase": b"decode", b"at": b"p0"}
    assert 0 < await redis_client.ttl(request("r")) <= REQUEST_TTL_SECONDS


@pytest.mark.asyncio
async def test_a_request_shorter_than_a_write_leaves_no_row(board, redis_client):
    """Only what was in flight at some write is written, and then its end as well."""
    board.note("short", {"phase": "prefill"})
    board.note("long", {"phase": "prefill"})
    board.note("short", {"phase": "ended"})
    await board.flush()
    board.note("long", {"phase": "ended"})
    await board.flush()

    assert await redis_client.hgetall(request("short")) == {}
    assert await redis_client.hget(request("long"), "phase") == b"ended"


@pytest.mark.asyncio
async def test_after_redis_was_away_leases_are_right(mortal, clock):
    """What is held is written again, what was dropped meanwhile is taken out of the old data."""
    server, client = mortal
    board = InflightBoard(client, clock=clock, router_id="router-0")
    for name in ("stays", "ends"):
        board.hold(name, "d0", "boot-1")
    await board.flush()
    server.kill()
    board.drop("ends", "d0", "boot-1")
    board.hold("new", "d0", "boot-1")
    await board.flush()
    board.hold("newer", "d0", "boot-1")
    await board.flush()
    server.start()
    assert await members(client) == {"stays", "ends"}
    await board.flush()

    assert await members(client) == {"stays", "new", "newer"}


@pytest.mark.asyncio
async def test_an_emptied_redis_is_filled_again(mortal, clock):
    """A Redis that lost everything gets all leases that are held, not only the new ones."""
    server, client = mortal
    board = InflightBoard(client, clock=clock, router_id="router-0")
    board.hold("old", "d0", "boot-1")
    await board.flush()
    await client.flushall()
    server.kill()
    board.note("x", {"phase": "prefill"})
    await board.flush()
    server.start()
    await board.flush()

    assert await members(client) == {"old"}


@pytest.mark.asyncio
async def test_while_redis_is_away_nothing_piles_up(mortal, clock):
    """Dropped leases are forgotten once they are over in any case."""
    server, client = mortal
    board = InflightBoard(client, clock=clock, router_id="router-0")
    board.hold("r", "d0", "boot-1")
    await board.flush()
    server.kill()
    board.drop("r", "d0", "boot-1")
    await board.flush()
    await clock.advance(LEASE_SECONDS + 1)
    await board.flush()
    server.start()
    await board.flush()

    assert await members(client) == {"r"}, "nobody asked for it any more"
    board.hold("next", "d0", "boot-1")
    await board.flush()
    assert await members(client) == {"next"}


@pytest.mark.asyncio
async def test_writes_keep_their_order(board, redis_client):
    """Two flushes at once write one after the other: a dropped lease does not come back."""
    for turn in range(50):
        board.hold(f"r{turn}", "d0", "boot-1")
        first = asyncio.create_task(board.flush())
        await asyncio.sleep(0)
        board.drop(f"r{turn}", "d0", "boot-1")
        await asyncio.gather(first, board.flush())

    assert await members(redis_client) == set()


@pytest.mark.asyncio
async def test_a_write_that_is_cancelled_is_made_up_for(board, redis_client):
    """Stopping in the middle of a write loses nothing: the next one repeats it."""
    board.hold("kept", "d0", "boot-1")
    board.hold("ended", "d0", "boot-1")
    await board.flush()
    board.drop("ended", "d0", "boot-1")
    task = asyncio.create_task(board.flush())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await board.flush()

    assert await members(redis_client) == {"kept"}
