"""Prometheus plumbing: registries are made here and passed on, never taken from a global."""

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

TTFT_BUCKETS_SECONDS = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.175, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0,
)  # fmt: skip
"""Time to first token: 1 ms to 100 s, with an edge at the tight target of 175 ms."""

TPOT_BUCKETS_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.0397, 0.05, 0.075, 0.1, 0.12,
    0.25, 0.5, 1.0,
)  # fmt: skip
"""Time per output token: 0.5 ms to 1 s, with an edge at the tight target of 39.7 ms."""

RPC_BUCKETS_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip
"""Length of a gRPC call."""


def new_registry(*, with_process: bool = True) -> CollectorRegistry:
    """Make a registry; with the process's own CPU, memory, files and collections by default."""
    registry = CollectorRegistry()
    if with_process:
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """Return the exposition text and its content type."""
    return generate_latest(registry), CONTENT_TYPE_LATEST
