"""Both stores, under one name."""

import pytest
import pytest_asyncio

from controlplane.core.liveness import Timing
from controlplane.store_memory import MemoryStore
from controlplane.store_redis import RedisStore
from servicekit.clock import SystemClock
from servicekit.embedded_redis import EmbeddedRedis
from servicekit.redis_client import connect


@pytest.fixture(scope="session")
def redis_server():
    """Yield one real redis-server for the whole session."""
    with EmbeddedRedis() as server:
        yield server


@pytest_asyncio.fixture(params=["redis", "memory"])
async def store(request):
    """Yield an empty store of each kind."""
    if request.param == "memory":
        yield MemoryStore(SystemClock(), max_outcomes=50, max_events=50)
        return
    server = request.getfixturevalue("redis_server")
    client = connect(server.url)
    await client.flushall()
    yield RedisStore(client, timing=Timing(), max_outcomes=50, max_events=50)
    await client.aclose()
