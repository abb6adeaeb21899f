"""Settings of an agent, from STEELYARD_AGENT_*."""

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat
from pydantic_settings import SettingsConfigDict

from dataplane.agent.engine import Role
from enginemodel.model import NOTICE_SHARE
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
        600.0, gt=0, description="how long an engine may take to answer at the start"
    )
    profile: str = Field(
        "", description="name that constants are fitted for; emulated: whose step times it has"
    )

    clock_rate: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds it counts while one passes, for experiments on slowed engines",
    )

    vllm_url: str = Field("http://127.0.0.1:8000", description="vllm: where its HTTP server is")
    spawn_vllm: bool = Field(
        default=False,
        description="vllm: start the server and keep it running; else it runs already",
    )
    vllm_command: list[str] = Field(
        default_factory=lambda: ["vllm", "serve"],
        description="vllm: how a spawned server is started, as JSON",
    )
    vllm_flags: str = Field(
        "",
        description="vllm: flags of a spawned server, as in a shell; --host and --port are added",
    )
    vllm_log_path: Path | None = Field(
        None, description="vllm: where a spawned server's output goes; empty: standard error"
    )
    vllm_metrics_seconds: float = Field(
        1.0,
        gt=0,
        description="vllm: how often its /metrics is read; each reading costs it 10-50 ms",
    )
    vllm_fixed_lengths: bool = Field(
        default=False,
        description="vllm: requests may fix their output length by "
        "extra_json.emulated_output_tokens, for experiments",
    )
    vllm_dtype: str = Field("auto", description="vllm: of the model, where the server does not say")
    vllm_max_num_seqs: int = Field(256, gt=0, description="vllm: likewise")
    vllm_max_batched_tokens: int = Field(2048, gt=0, description="vllm: likewise")
    vllm_kv_bytes_per_token: int = Field(
        0, ge=0, description="vllm: of the model that it stands in for; 0: the served model's own"
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
    slowness_schedule: list[tuple[NonNegativeFloat, PositiveFloat]] = Field(
        default_factory=list,
        description="emulated: further factors as [[seconds after the start, factor], ...], as JSON",
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
        30.0,
        gt=0,
        description="how long a prefilled KV cache is held; vllm: where the server does not say",
    )
    notice_share: float = Field(
        NOTICE_SHARE,
        ge=0,
        le=1,
        description="emulated: when in a step finished pulls are noticed",
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
