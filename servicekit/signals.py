"""SIGTERM and SIGINT as an event, and a service that lives until it."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` at the first SIGTERM or SIGINT; a second one kills, as without us."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def first() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def serve_until(stop: asyncio.Event, service: AbstractAsyncContextManager[object]) -> None:
    """Enter a service, and leave it once `stop` is set; while it still enters, that is cancelled.

    Raises:
        Exception: what entering or leaving it raises.
    """
    entering = asyncio.ensure_future(service.__aenter__())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([entering, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if not entering.done():
            entering.cancel()
            await asyncio.wait([entering])
    if entering.cancelled():
        return
    entering.result()
    try:
        await stop.wait()
    finally:
        await service.__aexit__(None, None, None)
