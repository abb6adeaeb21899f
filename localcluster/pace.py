"""What paced engines are told: vLLM's flags, its pace and its leases, from a profile and a time scale.

See docs/paced-engines.md. The model is the smallest that serves: its steps must be done long before
the modelled ones are.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from enginemodel.profiles import PROFILES, EngineProfile
from localcluster.errors import ClusterError
from localcluster.spec import ClusterSpec

MODEL_OPTIONS: Mapping[str, int] = {
    "layers": 1,
    "hidden": 32,
    "intermediate": 64,
    "heads": 1,
    "kv_heads": 1,
}
WORKER = "steelyard_enginekit.paced.worker"
_VARIABLE = "STEELYARD_PACE"
_KV_BYTES_PER_TOKEN = 256
"""Of that model: K and V of one head of 32 floats."""
_BLOCK_TOKENS = 32
"""The least on CPU, and on every engine of a cluster the same."""
_LEASE_SECONDS = 30
_SHORTEST_LEASE_SECONDS = 6
"""vLLM renews leases every sixth of one, in whole seconds."""


def dilation(spec: ClusterSpec) -> float:
    """Return real seconds an engine second.

    Raises:
        ClusterError: The time scale leaves no pace to keep.
    """
    if not 0.0 < spec.time_scale < float("inf"):
        raise ClusterError(f"paced engines need a finite time scale, not {spec.time_scale:g}")
    return 1.0 / spec.time_scale


def paced_profile(spec: ClusterSpec) -> EngineProfile:
    """Return what engines are paced after: the profile of the spec, with its overrides.

    Raises:
        ClusterError: There is no such profile, or no such part of it.
    """
    if spec.profile not in PROFILES:
        known = ", ".join(sorted(PROFILES))
        raise ClusterError(f"there is no profile {spec.profile!r}, only {known}")
    profile = PROFILES[spec.profile]
    overrides = dict(spec.profile_overrides)
    constants = overrides.pop("constants", {})
    try:
        return replace(profile, constants=replace(profile.constants, **constants), **overrides)
    except TypeError as error:
        raise ClusterError(f"profile {spec.profile!r}: {error}") from error


def paced_flags(profile: EngineProfile) -> list[str]:
    """Return the flags that all servers share; the spec's own come after and win."""
    blocks = -(-profile.kv_total_tokens // _BLOCK_TOKENS) + 1  # vLLM keeps one for itself
    return [
        "--max-model-len", str(profile.max_model_tokens),
        "--max-num-seqs", str(profile.max_num_seqs),
        "--max-num-batched-tokens", str(profile.max_batched_tokens),
        "--block-size", str(_BLOCK_TOKENS),
        "--kv-cache-memory-bytes", str(blocks * _BLOCK_TOKENS * _KV_BYTES_PER_TOKEN),
        "--no-enable-prefix-caching",
    ]  # fmt: skip


def paced_server(spec: ClusterSpec, instance_id: str) -> dict[str, Any]:
    """Return what one server's entry of the launcher's spec gains."""
    profile, slowdown = paced_profile(spec), dilation(spec)
    pace = {
        "constants": asdict(profile.constants),
        "kv_bytes_per_token": profile.kv_bytes_per_token,
        "dilation": slowdown,
        "record": str(record_path(spec.directory, instance_id).resolve()),
    }
    lease_seconds = max(_SHORTEST_LEASE_SECONDS, round(_LEASE_SECONDS * slowdown))
    return {
        "flags": ["--worker-cls", f"{WORKER}.PacedWorker"],
        "environment": {_VARIABLE: json.dumps(pace)},
        "kv_transfer": {"kv_connector_extra_config": {"kv_lease_duration": lease_seconds}},
    }


def paced_agent(spec: ClusterSpec) -> dict[str, Any]:
    """Return the settings of agents beside paced engines, which price by the profile."""
    return {
        "engine": "vllm",
        "profile": spec.profile,
        "vllm_kv_bytes_per_token": paced_profile(spec).kv_bytes_per_token,
    }


def record_path(directory: Path, instance_id: str) -> Path:
    """Return where an engine's steps are written down."""
    return directory / "engines" / f"{instance_id}.steps.jsonl"
