"""Tests of the gateway run on both loops: routers that have one run on uvloop."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import pytest_asyncio
import uvloop

from tests.support.gateway_cluster import gateway_cluster


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return both, for tests below the socket; one, for those that speak to a whole router."""
    both = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return both if "hostile" in item.nodeid else {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(name="cluster")
async def _cluster(redis_url):
    async with gateway_cluster(redis_url) as cluster:
        yield cluster
        await cluster.settled()
