"""Settings of an agent, from STEELYARD_AGENT_*."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from dataplane.agent.engine import Role
from enginemodel.profiles import REFERENCE
from servicekit.settings import ServiceSettings


class AgentSettings(ServiceSettings):
    """What an agent can be told."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_nested_delimiter="__", env_prefix="STEELYARD_AGENT_"
    )

    role: Role = Field(Role.MIXED, description="prefill, decode or mixed")
    engine: Literal["emulated", "vllm"] = Field("emulated", description="kind of engine")
    instance_id: str = Field(
        "", description="name in the cluster, stable over restarts; empty: role and address"
    )
    advertised_address: str = Field(
        "", description="host:port at which routers reach this agent; empty: where it listens"
    )
    control_planes: list[str] = Field(
        default_factory=list, description="host:port of control planes to report to, as JSON"
    )
    report_min_gap_seconds: float = Field(
        0.02, gt=0, description="changes closer together than this share a report"
    )
    handoff_margin_seconds: float = Field(
        1.0, ge=0, description="hand-offs with less of their lease left than this are refused"
    )
    engine_start_seconds: float = Field(
        300.0, gt=0, description="how long a spawned engine may take to become healthy"
    )
    profile: str = Field(
        REFERENCE.name, description="whose step times an emulated engine has; its name to routers"
    )

    model: str = Field("qwen2.5-3b", description="emulated: served model name")
    time_scale: float = Field(
        1.0, gt=0, description="emulated: engine seconds a real second; inf for full speed"
    )
    constants: dict[str, float] = Field(
        default_factory=dict, description="emulated: constants taken over the profile's, as JSON"
    )
    slowness: float = Field(
        1.0, gt=0, description="emulated: factor on every step of this one engine"
    )
    kv_total_tokens: int | None = Field(
        None, gt=0, description="emulated: KV cache; empty: the profile's"
    )
    max_num_seqs: int | None = Field(
        None, gt=0, description="emulated: sequences a step holds; empty: the profile's"
    )
    max_batched_tokens: int | None = Field(
        None, gt=0, description="emulated: tokens a step computes; empty: the profile's"
    )
    max_model_tokens: int | None = Field(
        None, gt=1, description="emulated: longest prompt plus output; empty: the profile's"
    )
    block_tokens: int | None = Field(
        None, gt=0, description="emulated: tokens of a KV block; empty: the profile's"
    )
    vocab_size: int = Field(384, gt=0, description="emulated: token ids are below it")
    tokenizer_path: Path | None = Field(
        None, description="emulated: tokenizer.json; empty: one token a byte"
    )
    mean_output_tokens: float = Field(
        256.0, ge=1, description="emulated: mean length of texts that end by themselves"
    )
    handoff_lease_seconds: float = Field(
        30.0, gt=0, description="how long a prefilled KV cache is held; vLLM: as it was told"
    )
    notice_share: float = Field(
        0.5, ge=0, le=1, description="emulated: when in a step finished pulls are noticed"
    )
    seed: int = Field(0, description="emulated: of jitter and stalls")
    jitter_sigma: float = Field(
        0.0, ge=0, le=1, description="emulated: lognormal sigma of step times"
    )
    stall_probability: float = Field(
        0.0, ge=0, le=1, description="emulated: chance of a host stall in a step"
    )
    stall_seconds: float = Field(0.02, ge=0, description="emulated: length of a host stall")
    side_channel_host: str = Field(
        "127.0.0.1", description="emulated: where other engines reach this one to pull KV"
    )
