"""What the control plane knows of instances and of finished requests: plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.core.liveness import Liveness
from enginemodel.model import EngineConstants


class Role(StrEnum):
    """What an engine does; the names are those of the protocol."""

    PREFILL = "PREFILL"
    DECODE = "DECODE"
    MIXED = "MIXED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What one boot of an engine is; fields as in the protocol's EngineInfo."""

    instance_id: str
    epoch: str
    role: Role
    model: str
    model_revision: str = ""
    address: str
    dtype: str = ""
    max_model_tokens: int = 0
    vocab_size: int = 0
    block_tokens: int = 0
    kv_total_tokens: int = 0
    kv_bytes_per_token: int = 0
    max_num_seqs: int = 0
    max_batched_tokens: int = 0
    pairing_key: str = ""
    handoff_lease_seconds: float = 0.0
    profile: str = ""
    engine_kind: str = ""
    engine_version: str = ""
    tokenizer_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Member:
    """One registered instance."""

    engine: Engine
    liveness: Liveness
    registered_unix_seconds: float
    """By the store's clock."""


@dataclass(frozen=True, slots=True)
class RouterShare:
    """What one router has at one instance."""

    router_id: str
    prefill_requests: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    decode_kv_tokens: int = 0
    held_requests: int = 0
    held_kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One measurement; fields as in the protocol's InstanceLoad."""

    running: int = 0
    waiting: int = 0
    kv_used_tokens: int = 0
    queued_prefill_tokens: int = 0
    step_seconds: float = 0.0
    by_router: tuple[RouterShare, ...] = ()
    preemptions: int = 0
    engine_healthy: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """One report of one boot."""

    instance_id: str
    epoch: str
    load: Load
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """One version of a profile's constants; fields as in the protocol's ConstantsVersion."""

    profile: str
    version: int
    """Counts up from 1; 0 is a built-in reference profile."""
    constants: EngineConstants
    standard_error: EngineConstants | None = None
    """A negative value is unknown."""
    heldout_median_error: float = -1.0
    sample_count: int = 0
    fingerprint: str = ""
    instance_scale: Mapping[str, float] = field(default_factory=dict)
    published_unix_seconds: float = 0.0
    uncalibrated: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets of one class; None is not aimed for."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    ttft_seconds_per_prompt_token: float = 0.0
    """Added to `ttft_seconds` for each prompt token."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets by class."""

    classes: Mapping[str, Targets]
    default_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one request went; fields as in the protocol's Outcome, None where absent."""

    request_id: str
    router_id: str = ""
    model: str = ""
    tenant: str = ""
    slo_class: str = ""
    policy: str = ""
    prefill_instance_id: str = ""
    decode_instance_id: str = ""
    constants_version: int = 0
    prompt_tokens: int = 0
    predicted_tokens: float = 0.0
    cached_prompt_tokens: int = 0
    prefill_tokens_ahead: int | None = None
    """Prompt tokens before it at the prefill engine when it arrived."""
    completion_tokens: int = 0
    status: str = "ok"
    slo_met: bool = False
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    total_seconds: float | None = None
    predicted_ttft_seconds: float | None = None
    predicted_tpot_seconds: float | None = None
    prefill_engine_seconds: float | None = None
    end_unix_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Happening:
    """One row of the events stream."""

    kind: str
    """joined, returned, ready, not_ready, stale, gone, left, replaced, drained, undrained,
    constants_published, constants_rolled_back, slo_set, drift, drift_ended."""
    subject: str
    """The instance, or the profile."""
    detail: str = ""
    unix_seconds: float = 0.0
    """By the store's clock; 0 before it is stored."""
