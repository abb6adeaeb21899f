"""Settings of a router, from STEELYARD_ROUTER_*."""

from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dataplane.gateway.settings import GatewayFields
from servicekit.settings import ServiceSettings


class RouterSettings(ServiceSettings, GatewayFields):
    """What a router can be told."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_nested_delimiter="__", env_prefix="STEELYARD_ROUTER_"
    )

    router_id: str = Field("", description="name in ledgers and journals; empty: host and process")
    control_planes: list[str] = Field(
        default_factory=list, description="host:port of control planes that take outcomes, as JSON"
    )
    policy: str = Field("late_binding", description="placement policy of requests that name none")
    policy_settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="settings by policy, as JSON"
    )
    fallback_policy: str = Field(
        "least_loaded",
        description="places without a dispatcher, and in Route what a late-binding policy holds back",
    )
    dispatch: bool = Field(
        default=True,
        description="policies that bind late: one router a pool decides for all of them",
    )
    advertised_address: str = Field(
        "", description="host:port at which other routers reach this one; empty: where it listens"
    )
    coalesce_seconds: float = Field(
        0.0, ge=0, le=1, description="how long tokens may wait in an agent to travel together"
    )
    stale_after_seconds: float = Field(
        1.0, gt=0, description="age at which a snapshot is not believed any more"
    )
    journal_path: Path | None = Field(None, description="JSONL file of finished requests")
    journal_views: bool = Field(
        default=True, description="rows carry all candidates' loads, to replay the decision"
    )
    events_path: Path | None = Field(
        None,
        description="JSONL file of all that schedulers were told, to replay it; a dispatcher's rows say so",
    )
    clock_rate: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds it counts while one passes, for experiments on slowed engines",
    )
    predictor_error: float = Field(
        0.0, ge=0, description="relative error injected into predicted lengths, for experiments"
    )
    default_output_tokens: float = Field(
        128.0, gt=0, description="output length predicted where nothing was ever seen"
    )
