"""The cluster as last reported: who is there, what they are, what they were measured at."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from dataplane.core.request import Targets
from enginemodel.model import EngineConstants


class Role(Enum):
    """What an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class State(Enum):
    """Where an instance stands; only READY ones are given new requests."""

    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One engine; fixed for one boot but for `state` and `scale`.

    Attributes:
        pool: Model with revision; requests and constants belong to a pool.
        pairing_key: KV moves only between engines with equal keys.
        scale: Slowness relative to its profile; 1 is the profile's mean.
    """

    instance_id: str
    epoch: str
    role: Role
    state: State
    pool: str
    address: str
    pairing_key: str
    profile: str
    scale: float
    max_model_tokens: int
    vocab_size: int
    block_tokens: int
    kv_total_tokens: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_batched_tokens: int
    handoff_lease_seconds: float
    tokenizer_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedConstants:
    """Constants in force for one profile."""

    version: int
    constants: EngineConstants
    uncalibrated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SloPolicy:
    """Targets by class name, and the class of requests that name none."""

    classes: Mapping[str, Targets]
    default_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """What changes seldom; equal versions mean equal rosters."""

    version: int
    instances: tuple[Instance, ...]
    constants: Mapping[str, PricedConstants]
    slo: SloPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Columns aligned with a roster's instances, as last reported.

    The `other_` columns hold what everybody but this router has in flight, as the agents count
    it; this router's own part is never in them, so that its ledger can be added without counting
    anything twice.
    """

    step_seconds: "array[float]"
    age_seconds: "array[float]"
    kv_used_tokens: "array[float]"
    other_prefill_requests: "array[float]"
    other_prefill_tokens: "array[float]"
    other_decode_requests: "array[float]"
    other_decode_kv_tokens: "array[float]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One state of the cluster.

    Attributes:
        sequence: Counts up.
        roster: Who is there.
        measurements: What they were measured at.
        stale: True when the snapshot is too old for its measurements to be believed: the
            scheduler then goes by its own ledger alone.
    """

    sequence: int
    roster: Roster
    measurements: Measurements
    stale: bool = False


def empty_measurements(count: int) -> Measurements:
    """Return zeros for `count` instances."""
    zeros = array("d", bytes(8 * count))
    return Measurements(
        step_seconds=zeros,
        age_seconds=zeros,
        kv_used_tokens=zeros,
        other_prefill_requests=zeros,
        other_prefill_tokens=zeros,
        other_decode_requests=zeros,
        other_decode_kv_tokens=zeros,
    )
