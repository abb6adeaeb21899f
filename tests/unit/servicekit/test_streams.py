"""Streams that end when the service stops."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from servicekit.streams import until_stopping

pytestmark = pytest.mark.asyncio


async def counted(
    left: list[str], *, forever: bool, waits: asyncio.Event | None = None
) -> AsyncIterator[int]:
    """Yield 0, 1, 2, then end or wait for good; `waits` is set once it does."""
    try:
        for number in range(3):
            yield number
        if forever:
            (waits or asyncio.Event()).set()
            await asyncio.Event().wait()
    finally:
        left.append("left")


async def test_everything_is_passed_on_until_the_end():
    """Without a stop a stream is what it was."""
    items = until_stopping(counted([], forever=False), asyncio.Event())

    assert [item async for item in items] == [0, 1, 2]


async def test_a_stop_ends_a_stream_that_waits():
    """What came is passed on, then the stream ends and the source is left."""
    left: list[str] = []
    stopping = asyncio.Event()
    found = []
    async for item in until_stopping(counted(left, forever=True), stopping):
        found.append(item)
        if item == 2:
            asyncio.get_running_loop().call_soon(stopping.set)

    assert found == [0, 1, 2]
    assert left == ["left"]


async def test_errors_of_the_source_come_through():
    """A source that fails fails the reader, with its own error."""

    async def failing() -> AsyncIterator[int]:
        yield 1
        raise KeyError("why")

    with pytest.raises(KeyError, match="why"):
        async for _ in until_stopping(failing(), asyncio.Event()):
            pass


async def test_cancelling_the_reader_leaves_nothing_behind():
    """The pending read of the source is cancelled with its reader."""
    left: list[str] = []
    waits = asyncio.Event()

    async def read() -> None:
        source = counted(left, forever=True, waits=waits)
        async for _ in until_stopping(source, asyncio.Event()):
            pass

    reader = asyncio.create_task(read())
    await waits.wait()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await asyncio.sleep(0)

    assert reader.cancelled()
    assert left == ["left"]
