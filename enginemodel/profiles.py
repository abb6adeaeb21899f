"""Reference profiles: engines that were measured or derived elsewhere, for use before calibration.

`a40-qwen2.5-3b` rests on per-layer timings of Vidur's A40 profiles of a model of that size and on
the card's memory bandwidth. The others are scaled from published figures and serve experiments on
how far results carry over; they are no measurement.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from enginemodel.model import EngineConstants


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """One kind of engine: what its steps cost and what it holds."""

    name: str
    constants: EngineConstants
    kv_bytes_per_token: int
    kv_total_tokens: int
    max_num_seqs: int
    max_batched_tokens: int
    max_model_tokens: int
    block_tokens: int


A40_QWEN = EngineProfile(
    name="a40-qwen2.5-3b",
    constants=EngineConstants(
        p0_seconds=12.5e-3,
        p1_seconds=4e-3,
        p2_seconds_per_token=5.54e-5,
        p3_seconds_per_token_squared=2.46e-9,
        d0_seconds=11.8e-3,
        d1_seconds_per_sequence=5e-5,
        d2_seconds_per_kv_token=8e-8,
        h0_seconds=5e-3,
        handoff_bytes_per_second=4e9,
    ),
    kv_bytes_per_token=36_864,
    kv_total_tokens=60_000,
    max_num_seqs=256,
    max_batched_tokens=2048,
    max_model_tokens=8192,
    block_tokens=16,
)

A40_7B = EngineProfile(
    name="a40-llama-7b",
    constants=EngineConstants(
        p0_seconds=28e-3,
        p1_seconds=8.3e-3,
        p2_seconds_per_token=1.236e-4,
        p3_seconds_per_token_squared=4.4e-9,
        d0_seconds=24e-3,
        d1_seconds_per_sequence=7.5e-5,
        d2_seconds_per_kv_token=8.5e-7,
        h0_seconds=5e-3,
        handoff_bytes_per_second=4e9,
    ),
    kv_bytes_per_token=524_288,
    kv_total_tokens=40_000,
    max_num_seqs=256,
    max_batched_tokens=2048,
    max_model_tokens=4096,
    block_tokens=16,
)

H100_QWEN = EngineProfile(
    name="h100-qwen2.5-3b",
    constants=EngineConstants(
        p0_seconds=5e-3,
        p1_seconds=3e-3,
        p2_seconds_per_token=8.5e-6,
        p3_seconds_per_token_squared=3.7e-10,
        d0_seconds=4.5e-3,
        d1_seconds_per_sequence=2e-5,
        d2_seconds_per_kv_token=1.7e-8,
        h0_seconds=3e-3,
        handoff_bytes_per_second=2e10,
    ),
    kv_bytes_per_token=36_864,
    kv_total_tokens=500_000,
    max_num_seqs=1024,
    max_batched_tokens=8192,
    max_model_tokens=32_768,
    block_tokens=16,
)

PROFILES: Mapping[str, EngineProfile] = MappingProxyType(
    {profile.name: profile for profile in (A40_QWEN, A40_7B, H100_QWEN)}
)
REFERENCE = A40_QWEN
