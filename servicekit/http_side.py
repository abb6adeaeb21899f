"""The HTTP port beside a gRPC server: /metrics, /healthz and a service's own pages.

uvicorn and starlette rather than aiohttp.web: the gateway and the page are starlette applications
already, starlette routes test without a socket, and it imports in a third of the time.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from servicekit.metrics import render


class _QuietServer(uvicorn.Server):
    """Leaves signals to the process: it is one part of a service, not its owner."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


def operator_routes(registry: CollectorRegistry, serving: Callable[[], bool]) -> list[BaseRoute]:
    """/metrics, and /healthz: 200 while `serving()`, else 503."""

    async def metrics(_: Request) -> Response:
        body, content_type = render(registry)
        return Response(body, media_type=content_type)

    async def healthz(_: Request) -> Response:
        if serving():
            return PlainTextResponse("SERVING\n")
        return PlainTextResponse("NOT_SERVING\n", status_code=503)

    return [Route("/metrics", metrics), Route("/healthz", healthz)]


class HttpSide:
    """A starlette application on a port of its own, inside the service's event loop."""

    def __init__(self, listen: str, routes: Sequence[BaseRoute]) -> None:
        self._listen = listen
        self._app = Starlette(routes=list(routes))
        self._server: _QuietServer | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Bind, serve, and set `port`; port 0 in the address takes a free one.

        Raises:
            OSError: the address is taken or not ours.
        """
        host, _, port = self._listen.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            bound = socket.create_server((host.strip("[]"), int(port)), family=family)
        except OSError as error:
            reason = (error.strerror or str(error)).partition(" (")[0]
            raise OSError(f"cannot listen on {self._listen}: {reason}") from error
        self.port = bound.getsockname()[1]
        config = uvicorn.Config(
            self._app, log_config=None, access_log=False, lifespan="off", ws="none"
        )
        config.timeout_graceful_shutdown = 1
        self._server = _QuietServer(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]), name="http-side")
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Close the port; answers under way get a second."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
        self._server, self._task = None, None
