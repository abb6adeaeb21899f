"""What the gateway counts; documented in docs/metrics.md."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class GatewayMetrics:
    """All series of one gateway, on its router's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "steelyard_gateway_requests_total",
            "HTTP requests that ended; status 499 is a client that left first.",
            ("path", "status"),
            registry=registry,
        )
        self._connections = Gauge(
            "steelyard_gateway_connections",
            "HTTP connections that are open.",
            registry=registry,
        )

    def watch(self, connections: Callable[[], float]) -> None:
        """Read the gauge from this whenever it is scraped."""
        self._connections.set_function(connections)
