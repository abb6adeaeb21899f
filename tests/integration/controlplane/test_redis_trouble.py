"""A Redis that is there and yet of no use: connections that died unseen, and refusals."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Self

import pytest
import pytest_asyncio

from controlplane.core.liveness import Timing
from controlplane.core.values import Happening
from controlplane.store import SnapshotState
from controlplane.store_redis import RedisStore
from servicekit.embedded_redis import EmbeddedRedis
from servicekit.errors import RedisUnavailable
from servicekit.redis_client import connect

pytestmark = pytest.mark.asyncio


class Wire:
    """Passes bytes between clients and Redis; what was connected can be cut without a word."""

    def __init__(self, port: int) -> None:
        self._redis_port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut: set[asyncio.StreamReader] = set()
        self._readers: set[asyncio.StreamReader] = set()
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Let nothing through any more on the connections that there are; new ones work."""
        self._cut |= self._readers

    async def _connect(self, reader, writer) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self._redis_port)
        for source, target in ((reader, downstream), (upstream, writer)):
            task = asyncio.create_task(self._pass(source, target))
            self._tasks.add(task)
            self._readers.add(source)

    async def _pass(self, source, target) -> None:
        try:
            while data := await source.read(65_536):
                if source not in self._cut:
                    target.write(data)
        except OSError:
            pass
        finally:
            target.close()


@pytest_asyncio.fixture
async def redis_server() -> AsyncIterator[EmbeddedRedis]:
    """Yield a Redis whose settings a test may change."""
    with EmbeddedRedis() as server:
        yield server


async def publish(store: RedisStore, sequence: int) -> None:
    """Publish a snapshot that names its number."""
    await store.tick("a", 60.0)
    await store.publish("a", SnapshotState(sequence=sequence), str(sequence).encode())


async def test_snapshots_go_on_where_a_connection_died_unseen(redis_server):
    """A subscription that will never say anything again is replaced by one that does."""
    publisher = connect(redis_server.url)
    writing = RedisStore(publisher, timing=Timing())
    async with Wire(redis_server.port) as wire:
        client = connect(f"redis://127.0.0.1:{wire.port}/0")
        snapshots = RedisStore(client, timing=Timing()).snapshots()
        await publish(writing, 1)
        async with contextlib.aclosing(snapshots), asyncio.timeout(20):
            assert await anext(snapshots) == b"1"
            wire.cut()
            await publish(writing, 2)

            with contextlib.suppress(RedisUnavailable):  # on connections that died as well
                assert await anext(snapshots) == b"2"
            again = RedisStore(client, timing=Timing()).snapshots()
            async with contextlib.aclosing(again):
                assert await anext(again) == b"2"
        await client.aclose()
    await publisher.aclose()


async def test_a_redis_that_takes_no_writes_for_now_is_unavailable(redis_server):
    """Refusals that pass by themselves are waited out; they end no replica."""
    client = connect(redis_server.url)
    store = RedisStore(client, timing=Timing())
    await client.config_set("min-replicas-to-write", 1)

    with pytest.raises(RedisUnavailable, match="NOREPLICAS"):
        await store.add_event(Happening("joined", "d0"))
    await client.config_set("min-replicas-to-write", 0)
    await store.add_event(Happening("joined", "d0"))

    assert len(await store.recent_events(9)) == 1
    await client.aclose()
