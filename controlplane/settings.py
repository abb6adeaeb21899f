"""Settings of the control plane, from environment variables STEELYARD_CONTROLPLANE_*."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from controlplane.core.liveness import Timing
from controlplane.publisher import PublisherOptions
from servicekit.settings import ServiceSettings


class ControlPlaneSettings(ServiceSettings):
    """What one replica can be told; replicas of one Redis should be told the same."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_nested_delimiter="__",
        env_prefix="STEELYARD_CONTROLPLANE_",
    )

    listen: str = Field("127.0.0.1:7420", description="host:port of gRPC")
    http_listen: str | None = Field(
        "127.0.0.1:7421", description="host:port of the page, /metrics and /healthz"
    )
    replica_id: str = Field("", description="name of this replica; made up where empty")
    report_interval_seconds: float = Field(
        0.1, gt=0, le=10, description="how often agents report at least"
    )
    stale_after_seconds: float = Field(
        0.3, gt=0, description="silence after which an instance is not used"
    )
    gone_after_seconds: float = Field(
        5.0, gt=0, description="further silence after which it is given up"
    )
    max_reports_per_second: float = Field(
        2_000.0, gt=0, description="over all instances; above it agents report less often"
    )
    snapshot_interval_seconds: float = Field(
        0.04, gt=0, le=1, description="between snapshots; 0.04 keeps them below 50 ms of age"
    )
    publisher_lease_seconds: float = Field(
        0.12, gt=0, description="after that long another replica publishes in a dead one's place"
    )
    redis_down_after_seconds: float = Field(
        0.5, gt=0, description="Redis silent for that long makes the replica NOT_SERVING"
    )
    gather_seconds: float = Field(
        0.02, ge=0, description="how long reports and outcomes are gathered for one write"
    )
    length_half_life_seconds: float = Field(
        1_800.0, gt=0, description="after that long a finished request counts half"
    )
    max_outcomes: int = Field(100_000, gt=0, description="rows kept in the outcomes stream")
    max_events: int = Field(10_000, gt=0, description="rows kept in the events stream")

    auto_publish: bool = Field(
        default=False,
        description="publish the constants that live traffic proposes when engines drift; else "
        "they are proposed only",
    )
    publish_after_seconds: float = Field(
        60.0, ge=0, description="auto_publish: how long a drift must last, and be learned"
    )

    def timing(self) -> Timing:
        """Pick what liveness needs."""
        return Timing(
            report_interval_seconds=self.report_interval_seconds,
            stale_after_seconds=self.stale_after_seconds,
            gone_after_seconds=self.gone_after_seconds,
            max_reports_per_second=self.max_reports_per_second,
        )

    def publisher_options(self) -> PublisherOptions:
        """Pick what the publisher needs."""
        return PublisherOptions(
            interval_seconds=self.snapshot_interval_seconds,
            lease_seconds=self.publisher_lease_seconds,
            down_after_seconds=self.redis_down_after_seconds,
        )
