"""A grpc.aio server with everything a user of one expects around the service itself."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute

from servicekit.clock import Clock
from servicekit.http_side import HttpSide, operator_routes
from servicekit.interceptors import CallInterceptor, Translate
from servicekit.options import ServerOptions

_HARD_LIMIT_FACTOR = 4
"""Messages between our limit and this many times it are refused with a rich status; above, by gRPC
itself with a plain RESOURCE_EXHAUSTED."""

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, slots=True)
class ServiceBinding:
    """One service to serve: `ServiceBinding.of(control_pb2, "ControlService", add, servicer)`."""

    full_name: str
    add: Callable[[Any], None]

    @classmethod
    def of(
        cls, module: Any, name: str, add: Callable[[Any, Any], None], servicer: object
    ) -> "ServiceBinding":
        """Bind a servicer with the generated `add_…_to_server`; `module` is the `_pb2` module."""
        full_name = module.DESCRIPTOR.services_by_name[name].full_name
        return cls(full_name, lambda server: add(servicer, server))


class RpcServer:
    """Our services, grpc.health.v1, reflection, channelz and the HTTP side port.

    Health is NOT_SERVING until `set_serving(True)`. `stop` is graceful: NOT_SERVING, `stopping` set
    so that long streams end themselves, calls under way get their grace, then the port closes.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        services: Sequence[ServiceBinding],
        registry: CollectorRegistry,
        clock: Clock,
        translate: Translate | None = None,
        routes: Sequence[BaseRoute] = (),
        stopping: asyncio.Event | None = None,
    ) -> None:
        self.options = options
        self.stopping = stopping or asyncio.Event()
        self.port = 0
        self._clock = clock
        self._log = structlog.get_logger("servicekit.server")
        self._serving = False
        self._names = ["", *(service.full_name for service in services)]
        self._health = HealthServicer()
        self._interceptor = CallInterceptor(
            registry=registry,
            clock=clock,
            max_message_bytes=options.max_message_bytes,
            translate=translate,
        )
        self._server = grpc.aio.server(
            interceptors=[self._interceptor], options=_channel_arguments(options.max_message_bytes)
        )
        for service in services:
            service.add(self._server)
        _add_standard_services(self._server, self._health, self._names[1:])
        self._http: HttpSide | None = None
        if options.http_listen is not None:
            ours = operator_routes(registry, lambda: self._serving)
            self._http = HttpSide(options.http_listen, [*ours, *routes])

    @property
    def address(self) -> str:
        """host:port that gRPC is served on, with the real port."""
        return f"{self.options.listen.rpartition(':')[0]}:{self.port}"

    @property
    def http_port(self) -> int:
        """The real HTTP port; 0 where there is none."""
        return self._http.port if self._http else 0

    @property
    def serving(self) -> bool:
        """What health says."""
        return self._serving

    def observed(
        self, service: str, method: str, handler: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap a handler of requests that share a stream: each is counted and logged as a call."""
        return self._interceptor.observed(service, method, handler)

    async def start(self) -> None:
        """Bind and accept calls; health says NOT_SERVING until `set_serving(True)`.

        Raises:
            OSError: an address is taken or not ours.
        """
        await self.set_serving(False)
        try:
            self.port = self._server.add_insecure_port(self.options.listen)
        except RuntimeError as error:
            raise OSError(
                f"cannot listen on {self.options.listen}: it is taken, or no address of this host"
            ) from error
        await self._server.start()
        try:
            if self._http:
                await self._http.start()
        except OSError:
            await self._server.stop(None)
            raise
        self._log.info("server_started", address=self.address, http_port=self.http_port)

    async def set_serving(self, serving: bool) -> None:
        """Make health say SERVING or NOT_SERVING, for the server and for each of its services."""
        self._serving = serving and not self.stopping.is_set()
        for name in self._names:
            await self._health.set(name, _SERVING if self._serving else _NOT_SERVING)

    async def stop(self, *, grace_seconds: float | None = None) -> None:
        """Stop gracefully; safe to call twice."""
        self.stopping.set()
        self._serving = False
        await self._health.enter_graceful_shutdown()
        await self._clock.sleep(self.options.notice_seconds)
        grace = self.options.drain_grace_seconds if grace_seconds is None else grace_seconds
        await self._server.stop(grace)
        if self._http:
            await self._http.stop()
        self._log.info("server_stopped", address=self.address)


def _add_standard_services(
    server: grpc.aio.Server, health: HealthServicer, names: Sequence[str]
) -> None:
    """Add health, channelz and reflection; their packages carry no types."""
    add_health: Any = health_pb2_grpc.add_HealthServicer_to_server
    add_channelz: Any = channelz.add_channelz_servicer
    add_reflection: Any = reflection.enable_server_reflection
    add_health(health, server)
    add_channelz(server)
    standard = ("grpc.health.v1.Health", "grpc.channelz.v1.Channelz", reflection.SERVICE_NAME)
    add_reflection([*names, *standard], server)


def _channel_arguments(max_message_bytes: int) -> list[tuple[str, int]]:
    """Arguments of the C core: message sizes, keepalive that we tolerate, no shared ports."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes * _HARD_LIMIT_FACTOR),
        ("grpc.max_send_message_length", max_message_bytes * _HARD_LIMIT_FACTOR),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_channelz", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
