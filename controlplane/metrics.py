"""What the control plane counts; each metric is explained in docs/metrics.md."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUILD_BUCKETS_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class ControlMetrics:
    """All metrics of one replica."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.instances = Gauge(
            "steelyard_instances",
            "Instances of the last snapshot.",
            ("role", "state"),
            registry=registry,
        )
        self.publisher = Gauge(
            "steelyard_snapshot_publisher", "1 on the replica that publishes.", registry=registry
        )
        self.published = Counter(
            "steelyard_snapshots_published", "Snapshots published here.", registry=registry
        )
        self.build_seconds = Histogram(
            "steelyard_snapshot_build_seconds",
            "From the answer of the store to a snapshot ready to be stored.",
            buckets=_BUILD_BUCKETS_SECONDS,
            registry=registry,
        )
        self.snapshot_bytes = Gauge(
            "steelyard_snapshot_bytes", "Size of the last snapshot.", registry=registry
        )
        self.snapshot_age = Gauge(
            "steelyard_snapshot_age_seconds",
            "Time since a snapshot came in here.",
            registry=registry,
        )
        self.store_up = Gauge(
            "steelyard_redis_up", "1 while Redis answers this replica.", registry=registry
        )
        self.reports = Counter(
            "steelyard_reports", "Reports of agents.", ("result",), registry=registry
        )
        self.watchers = Gauge("steelyard_watchers", "Open WatchCluster calls.", registry=registry)
        self.outcomes = Counter(
            "steelyard_outcomes",
            "Finished requests that routers told of.",
            ("slo_class", "status", "slo_met"),
            registry=registry,
        )
        self.outcomes_dropped = Counter(
            "steelyard_outcomes_dropped",
            "Outcomes lost because Redis was away for too long.",
            registry=registry,
        )
        self.events = Counter(
            "steelyard_events", "Events written here.", ("kind",), registry=registry
        )
        self.constants_version = Gauge(
            "steelyard_constants_version",
            "Current version of a profile's constants; 0 is the built-in reference.",
            ("profile",),
            registry=registry,
        )
        self.drift_ratio = Gauge(
            "steelyard_drift_ratio",
            "Observed over predicted time of an instance that left the pace of its constants.",
            ("instance", "part"),
            registry=registry,
        )

    def show_instances(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Replace the counts by role and state."""
        self.instances.clear()
        for (role, state), count in counts.items():
            self.instances.labels(role, state).set(count)
