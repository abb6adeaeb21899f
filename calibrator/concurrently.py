"""Work side by side, where the first failure ends all and is raised as itself."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines to their end; when one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error that is no group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
