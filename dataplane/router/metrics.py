"""What a router counts; documented in docs/metrics.md."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from servicekit.metrics import TPOT_BUCKETS_SECONDS, TTFT_BUCKETS_SECONDS

_DECISION_BUCKETS_SECONDS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)


class RouterMetrics:
    """All series of one router, on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "steelyard_router_requests_total",
            "Requests that ended.",
            ("model", "policy", "status"),
            registry=registry,
        )
        self.slo = Counter(
            "steelyard_router_slo_total",
            "Completed requests by class and by whether every target was met.",
            ("model", "slo_class", "met"),
            registry=registry,
        )
        self.tokens = Counter(
            "steelyard_router_tokens_total",
            "Tokens of completed and broken requests.",
            ("model", "kind"),
            registry=registry,
        )
        self.retries = Counter(
            "steelyard_router_retries_total",
            "Legs sent again after a failure.",
            ("model",),
            registry=registry,
        )
        self.blind = Counter(
            "steelyard_router_blind_decisions_total",
            "Decisions made on a snapshot too old to believe.",
            ("model",),
            registry=registry,
        )
        self._snapshot_age = Gauge(
            "steelyard_router_snapshot_age_seconds",
            "Time since the last cluster snapshot arrived.",
            registry=registry,
        )
        self._in_flight = Gauge(
            "steelyard_router_in_flight_requests",
            "Requests that have not ended.",
            registry=registry,
        )
        self._ledger = Gauge(
            "steelyard_router_ledger_requests",
            "Requests and reservations that the ledger charges somewhere.",
            registry=registry,
        )
        self._add_histograms(registry)

    def _add_histograms(self, registry: CollectorRegistry) -> None:
        self.ttft = Histogram(
            "steelyard_router_ttft_seconds",
            "From arrival to the first generated token.",
            ("model", "slo_class"),
            buckets=TTFT_BUCKETS_SECONDS,
            registry=registry,
        )
        self.tpot = Histogram(
            "steelyard_router_tpot_seconds",
            "Mean time per token after the first, of one request.",
            ("model", "slo_class"),
            buckets=TPOT_BUCKETS_SECONDS,
            registry=registry,
        )
        self.ttft_ratio = Histogram(
            "steelyard_router_ttft_predicted_ratio",
            "Measured over predicted time to first token.",
            ("model",),
            buckets=(0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0),
            registry=registry,
        )
        self.decision = Histogram(
            "steelyard_router_decision_seconds",
            "Time the scheduler took to take a request in.",
            ("policy",),
            buckets=_DECISION_BUCKETS_SECONDS,
            registry=registry,
        )

    def watch(
        self,
        *,
        snapshot_age_seconds: Callable[[], float],
        in_flight: Callable[[], float],
        ledger: Callable[[], float],
    ) -> None:
        """Read the gauges from these whenever they are scraped."""
        self._snapshot_age.set_function(snapshot_age_seconds)
        self._in_flight.set_function(in_flight)
        self._ledger.set_function(ledger)
