"""Gathers what many tasks have to say on one stream, so that a message carries more than one piece."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_BATCH_BYTES = 1024 * 1024
"""A batch is closed before it grows beyond; what is larger by itself travels alone."""


class Outbox(Generic[T]):
    """Pieces in the order they were put, sent in batches by one task.

    Sending costs by the message: what gathers while one is on its way goes out as the next, and
    after each the outbox rests a moment for more, unless something urgent is put.

    Args:
        send: Sends a batch; returns when the stream takes another.
        size: Says how many bytes a piece has.
        rest_seconds: How long to rest after each.
    """

    def __init__(
        self,
        send: Callable[[Sequence[T]], Awaitable[None]],
        size: Callable[[T], int],
        *,
        rest_seconds: float = 0.0,
    ) -> None:
        self._send = send
        self._size = size
        self._rest_seconds = rest_seconds
        self._pieces: deque[tuple[T, asyncio.Future[None] | None]] = deque()
        self._urgent = False
        self._waiter: asyncio.Future[None] | None = None
        self._resting = False
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        """Show how much waits."""
        return f"<Outbox of {len(self._pieces)} pieces>"

    def put(self, piece: T, *, urgent: bool = True) -> None:
        """Have a piece sent."""
        self._add(piece, None, urgent=urgent)

    async def sent(self, piece: T, *, urgent: bool) -> None:
        """Have a piece sent and wait until it is; without end where `run` has ended."""
        done = asyncio.get_running_loop().create_future()
        self._add(piece, done, urgent=urgent)
        await done

    async def idle(self) -> None:
        """Wait until all that was put is sent."""
        await self._idle.wait()

    async def run(self) -> None:
        """Send until cancelled.

        Raises:
            Exception: What `send` raised.
        """
        while True:
            if not self._pieces:
                await self._wait(None)
            batch, done = self._take()
            await self._send(batch)
            for future in done:
                if not future.done():
                    future.set_result(None)
            if not self._pieces:
                self._idle.set()
            if self._rest_seconds > 0 and not self._urgent:
                await self._wait(self._rest_seconds)

    def _add(self, piece: T, done: "asyncio.Future[None] | None", *, urgent: bool) -> None:
        self._pieces.append((piece, done))
        self._idle.clear()
        self._urgent = self._urgent or urgent
        # Who waits for a first piece is woken by any, who rests only by an urgent one.
        if self._waiter is not None and (urgent or not self._resting) and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> tuple[list[T], list["asyncio.Future[None]"]]:
        batch: list[T] = []
        futures: list[asyncio.Future[None]] = []
        size = 0
        pieces = self._pieces
        while pieces:
            size += self._size(pieces[0][0])
            if batch and size > MAX_BATCH_BYTES:
                break
            piece, done = pieces.popleft()
            batch.append(piece)
            if done is not None:
                futures.append(done)
        self._urgent = self._urgent and bool(pieces)
        return batch, futures

    async def _wait(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        self._resting = seconds is not None
        timer = None if seconds is None else loop.call_later(seconds, _set, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


def _set(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
