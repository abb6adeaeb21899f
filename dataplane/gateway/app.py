"""Constructs the gateway of one router."""

from collections.abc import Mapping, Sequence

import structlog
from envoy.service.ext_proc.v3 import external_processor_pb2, external_processor_pb2_grpc
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from dataplane.gateway.asking import ApiKeys
from dataplane.gateway.connection import Connections
from dataplane.gateway.generating import Generating
from dataplane.gateway.measuring import Measuring
from dataplane.gateway.metrics import GatewayMetrics
from dataplane.gateway.model_text import ModelTexts
from dataplane.gateway.operating import Operating
from dataplane.gateway.picker import Picker
from dataplane.gateway.prompts import Models
from dataplane.gateway.routes import Endpoint, Routes
from dataplane.gateway.running import Runner
from dataplane.gateway.server import HttpServer
from dataplane.gateway.settings import GatewayFields
from dataplane.gateway.values import HttpLimits
from dataplane.router.agents import AgentChannels
from dataplane.router.desk import Desk
from dataplane.router.fleet import Fleet
from dataplane.router.front import Front
from dataplane.router.intake import Intake
from dataplane.router.tokenizers import Tokenizers
from servicekit.clock import Clock
from servicekit.server import ServiceBinding


class Gateway:
    """One gateway: `start`, and `stop` before its router's own parts stop."""

    def __init__(
        self,
        settings: GatewayFields,
        *,
        front: Front,
        fleet: Fleet,
        tokenizers: Tokenizers,
        agents: AgentChannels,
        registry: CollectorRegistry,
        clock: Clock,
        grace_seconds: float,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._log = structlog.get_logger("dataplane.gateway")
        models = Models(fleet, ModelTexts(tokenizers, agents))
        generating = Generating(models, Runner(front, clock), clock)
        operating = Operating(models, registry, clock)
        metrics = GatewayMetrics(registry)
        routes = Routes(
            endpoints(generating, operating),
            keys=ApiKeys(_plain(settings.gateway_api_keys)),
            metrics=metrics,
            clock=clock,
        )
        limits = HttpLimits(
            max_body_bytes=settings.gateway_max_body_bytes,
            max_connections=settings.gateway_max_connections,
            read_seconds=settings.gateway_read_seconds,
            idle_seconds=settings.gateway_idle_seconds,
            stall_seconds=settings.gateway_stall_seconds,
        )
        self.connections = Connections(routes.handle, limits, clock)
        metrics.watch(lambda: len(self.connections.open))
        self.server = HttpServer(settings.gateway_listen or "", self.connections, clock)

    async def start(self) -> None:
        """Bind and answer.

        Raises:
            OSError: The address is taken or not ours.
        """
        await self.server.start()
        self._log.info("gateway_started", address=self.server.address)

    async def stop(self) -> None:
        """Let answers under way end, within the grace, and close."""
        await self.server.stop(self._grace_seconds)


def picker_services(
    settings: GatewayFields,
    *,
    fleet: Fleet,
    tokenizers: Tokenizers,
    agents: AgentChannels,
    intake: Intake,
    desk: Desk,
    clock: Clock,
) -> list[ServiceBinding]:
    """Return Envoy's services for the router's gRPC port; none where no endpoints are set."""
    if not settings.gateway_picker_endpoints:
        return []
    picker = Picker(
        measuring=Measuring(Models(fleet, ModelTexts(tokenizers, agents))),
        intake=intake,
        desk=desk,
        clock=clock,
        endpoints=settings.gateway_picker_endpoints,
        max_body_bytes=settings.gateway_max_body_bytes,
    )
    add = external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server
    service = ServiceBinding.of(external_processor_pb2, "ExternalProcessor", add, picker)
    # Names that the picker protocol has its health asked by; nothing is served under them.
    probes = [ServiceBinding(name, lambda _: None) for name in ("liveness", "readiness")]
    return [service, *probes]


def endpoints(
    generating: Generating, operating: Operating
) -> Mapping[bytes, Mapping[bytes, Endpoint]]:
    """Return who answers what."""
    return {
        b"/v1/completions": {b"POST": generating.completions},
        b"/v1/chat/completions": {b"POST": generating.chat},
        b"/v1/models": {b"GET": operating.models},
        b"/health": {b"GET": operating.health},
        b"/ping": {b"GET": operating.health, b"POST": operating.health},
        b"/metrics": {b"GET": operating.metrics},
        b"/tokenize": {b"POST": operating.tokenize},
        b"/detokenize": {b"POST": operating.detokenize},
    }


def _plain(keys: Mapping[str, Sequence[SecretStr]]) -> dict[str, list[str]]:
    return {tenant: [key.get_secret_value() for key in many] for tenant, many in keys.items()}
