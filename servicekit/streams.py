"""Reading a caller's stream without letting it hold up a graceful stop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

T = TypeVar("T")


async def until_stopping(
    items: AsyncIterator[T], stopping: asyncio.Event
) -> AsyncGenerator[T, None]:
    """Yield items as they come; end when there are no more, or once `stopping` is set.

    A stream that its caller keeps open for good would otherwise last for the whole grace of a stop.
    """
    stop = asyncio.ensure_future(stopping.wait())
    waiting: set[asyncio.Future[Any]] = {stop}
    try:
        while True:
            item = asyncio.ensure_future(anext(items))
            waiting.add(item)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not item.done():
                return
            waiting.discard(item)
            try:
                found = item.result()
            except StopAsyncIteration:
                return
            yield found
    finally:
        for future in waiting:
            future.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await future
