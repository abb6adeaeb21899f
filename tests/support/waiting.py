"""Waiting for what must come about, without guessing how long it takes."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

POLL_SECONDS = 0.01


async def eventually(
    condition: Callable[[], Any | Awaitable[Any]], *, within_seconds: float = 10.0, what: str = ""
) -> Any:
    """Return what `condition` returns once that is true; fail, showing the last, if it stays false."""
    last: Any = None
    try:
        async with asyncio.timeout(within_seconds):
            while True:
                last = condition()
                if inspect.isawaitable(last):
                    last = await last
                if last:
                    return last
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise AssertionError(
            f"{what or condition} did not come about in {within_seconds:g} s; last was {last!r}"
        ) from None
