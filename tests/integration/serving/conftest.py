"""Two whole clusters, each started once: one at full speed, one slow enough to interrupt."""

from collections.abc import AsyncIterator

import pytest_asyncio

from servicekit.embedded_redis import EmbeddedRedis
from tests.support.whole_cluster import WholeCluster


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def whole_cluster() -> AsyncIterator[WholeCluster]:
    """Yield a cluster of 2P4D that computes as fast as the machine can."""
    with EmbeddedRedis() as server:
        async with WholeCluster(server.url) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(whole_cluster: WholeCluster) -> AsyncIterator[WholeCluster]:
    """Yield the fast cluster; after the test nothing is left of any request."""
    yield whole_cluster
    await whole_cluster.settled()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def whole_slow_cluster() -> AsyncIterator[WholeCluster]:
    """Yield a cluster of 1P2D at ten times an A40's pace."""
    with EmbeddedRedis() as server:
        async with WholeCluster(server.url, "1P2D", time_scale=10.0) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="session")
async def slow_cluster(whole_slow_cluster: WholeCluster) -> AsyncIterator[WholeCluster]:
    """Yield the slow cluster; after the test nothing is left of any request."""
    yield whole_slow_cluster
    await whole_slow_cluster.settled()
