"""The listening side: binds, sweeps, stops."""

import asyncio
import contextlib
import socket

from dataplane.gateway.connection import Connections
from servicekit.clock import Clock

_SWEEP_SECONDS = 1.0
_BACKLOG = 4096


class HttpServer:
    """Accepts connections between `start` and `stop`."""

    def __init__(self, listen: str, connections: Connections, clock: Clock) -> None:
        self._listen = listen
        self._connections = connections
        self._clock = clock
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """host:port, with the real port."""
        return f"{self._listen.rpartition(':')[0]}:{self.port}"

    async def start(self) -> None:
        """Bind and accept; port 0 takes a free one.

        Raises:
            OSError: The address is taken or not ours.
        """
        host, _, port = self._listen.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=_BACKLOG)
        self.port = bound.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connections.make, sock=bound, backlog=_BACKLOG
        )
        self._sweeper = asyncio.create_task(self._sweep(), name="gateway-sweeper")

    async def stop(self, grace_seconds: float) -> None:
        """Stop accepting, let answers under way end within the grace, and close everything."""
        if self._server is None or self._sweeper is None:
            return
        self._server.close()
        shared = self._connections
        shared.closing = True
        for connection in list(shared.open):
            connection.close_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await shared.emptied()
        for connection in list(shared.open):
            connection.abort()
        self._sweeper.cancel()
        await asyncio.wait([self._sweeper])
        self._server = None

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(_SWEEP_SECONDS)
            self._connections.sweep()
