"""A service that lives until it is stopped."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from servicekit.signals import serve_until

pytestmark = pytest.mark.asyncio


class Service:
    """Enters once it may; notes what happens to it."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.begun = asyncio.Event()
        self.may_enter = asyncio.Event()
        self.entered = asyncio.Event()

    @asynccontextmanager
    async def life(self):
        """Begin, enter, leave; or be cancelled before."""
        self.begun.set()
        try:
            await self.may_enter.wait()
        except asyncio.CancelledError:
            self.noted.append("cancelled")
            raise
        self.entered.set()
        try:
            yield
        finally:
            self.noted.append("left")


async def test_a_service_is_left_once_it_is_to_stop():
    """It lives until the event, and no longer."""
    service, stop = Service(), asyncio.Event()
    service.may_enter.set()
    serving = asyncio.create_task(serve_until(stop, service.life()))
    await service.entered.wait()
    assert service.noted == []
    stop.set()
    await serving

    assert service.noted == ["left"]


async def test_a_stop_ends_a_start_that_takes_long():
    """Who is to stop does not wait until it has started."""
    service, stop = Service(), asyncio.Event()
    serving = asyncio.create_task(serve_until(stop, service.life()))
    await service.begun.wait()
    stop.set()
    await serving

    assert service.noted == ["cancelled"]


async def test_cancelling_ends_a_start_too():
    """Nothing goes on behind the back of whoever was cancelled."""
    service = Service()
    serving = asyncio.create_task(serve_until(asyncio.Event(), service.life()))
    await service.begun.wait()
    serving.cancel()
    await asyncio.wait([serving])

    assert serving.cancelled()
    assert service.noted == ["cancelled"]


async def test_a_start_that_fails_is_told():
    """The error of a service that cannot start reaches the caller."""

    @asynccontextmanager
    async def failing():
        raise OSError("taken")
        yield

    with pytest.raises(OSError, match="taken"):
        await serve_until(asyncio.Event(), failing())
