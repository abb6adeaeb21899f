"""The outbox: what gathers goes out together, in order, and what is urgent does not wait."""

import asyncio

import pytest
import pytest_asyncio
from steelyard.v1 import agent_pb2

from servicekit.outbox import MAX_BATCH_BYTES, Outbox
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio
FOREVER_SECONDS = 1e6


class Line:
    """A stream that takes a batch at a time, once it is `open`."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = asyncio.Event()

    async def send(self, batch) -> None:
        """Take a batch."""
        await self.open.wait()
        self.batches.append([piece.leg for piece in batch])


def piece(number: int, size_bytes: int = 0) -> agent_pb2.LegResponse:
    """Return one piece."""
    end = agent_pb2.LegEnd(details=b"x" * size_bytes)
    return agent_pb2.LegResponse(leg=number, end=end)


@pytest_asyncio.fixture
async def started():
    """Yield a function that makes a running outbox; all are ended after the test."""
    tasks = []

    def start(line: Line, rest_seconds: float = 0.0) -> Outbox:
        outbox = Outbox(line.send, agent_pb2.LegResponse.ByteSize, rest_seconds=rest_seconds)
        tasks.append(asyncio.create_task(outbox.run()))
        return outbox

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_gathers_while_one_is_on_its_way_travels_together(started):
    """The first goes alone; those put while it was being sent make the next batch, in order."""
    line = Line()
    outbox = started(line)
    outbox.put(piece(1))
    await asyncio.sleep(0)
    for number in (2, 3, 4):
        outbox.put(piece(number))

    line.open.set()
    await outbox.idle()

    assert line.batches == [[1], [2, 3, 4]]


async def test_only_urgent_pieces_end_the_rest_after_a_message(started):
    """What can wait waits for something urgent and leaves with it, before it."""
    line = Line()
    line.open.set()
    outbox = started(line, FOREVER_SECONDS)
    outbox.put(piece(1), urgent=False)
    await eventually(lambda: line.batches == [[1]])
    outbox.put(piece(2), urgent=False)
    for _ in range(10):
        await asyncio.sleep(0)
    assert line.batches == [[1]]

    outbox.put(piece(3))
    await outbox.idle()

    assert line.batches == [[1], [2, 3]]


async def test_the_rest_ends_by_itself(started):
    """What can wait goes out without anything urgent after it."""
    line = Line()
    line.open.set()
    outbox = started(line, 0.001)
    for number in range(5):
        await outbox.sent(piece(number), urgent=False)

    assert line.batches == [[number] for number in range(5)]


async def test_batches_are_bounded_in_bytes(started):
    """A batch is closed before it outgrows the bound; what is larger by itself travels alone."""
    line = Line()
    outbox = started(line)
    outbox.put(piece(0))
    await asyncio.sleep(0)
    outbox.put(piece(1))
    outbox.put(piece(2, 2 * MAX_BATCH_BYTES))
    for number in (3, 4, 5):
        outbox.put(piece(number, MAX_BATCH_BYTES // 2 - 100))

    line.open.set()
    await outbox.idle()

    assert line.batches == [[0], [1], [2], [3, 4], [5]]


async def test_a_piece_is_sent_when_the_stream_has_taken_it(started):
    """`sent` and `idle` wait for a stream that takes nothing; somebody who gave up is no harm."""
    line = Line()
    outbox = started(line)
    gone = asyncio.create_task(outbox.sent(piece(1), urgent=True))
    waiting = asyncio.create_task(outbox.sent(piece(2), urgent=True))
    idle = asyncio.create_task(outbox.idle())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert not idle.done()
    gone.cancel()

    line.open.set()
    await waiting
    await idle

    assert [number for batch in line.batches for number in batch] == [1, 2]
