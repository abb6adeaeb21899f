"""A real redis-server shared by the whole run, empty at the start of each test that asks for it."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import redis.asyncio

from servicekit.embedded_redis import EmbeddedRedis
from servicekit.redis_client import connect


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[EmbeddedRedis]:
    """Yield one redis-server; nobody may kill it, others use it too."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(shared_redis: EmbeddedRedis) -> str:
    """Return the URL of an empty Redis."""
    import redis as sync_redis

    with sync_redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    return shared_redis.url


@pytest_asyncio.fixture
async def redis_client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """Yield a client of an empty Redis."""
    client = connect(redis_url)
    yield client
    await client.aclose()
