"""Ending background tasks for sure."""

import asyncio
from collections.abc import Collection

_AGAIN_SECONDS = 0.5


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they are done, whatever they end with.

    A cancellation can be swallowed by a library that a task waits in (redis-py does so while it
    connects), so it is repeated until it has worked.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
