"""SIGTERM and SIGINT as an event."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator


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
