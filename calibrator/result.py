"""The result of a calibration as JSON: names and units as in the protocol and in Redis.

A constant `x` has its standard error beside it as `x_stderr`, -1 where it was not measured. With
one profile its fields stand at the top as well as under `profiles`; with several, those of the
profile with the most observations do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from calibrator.gate_result import GateResult
from calibrator.profile import CONSTANT_NAMES, ProfileFit
from calibrator.publish import Refusal, worst_heldout
from calibrator.slo import ClassTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """How one profile came out; `version` is 0 where nothing was published."""

    profile: str
    fingerprint: str
    instances: tuple[str, ...]
    lost_instances: Mapping[str, str]
    found: ProfileFit
    refusals: Sequence[Refusal]
    version: int
    observations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """Everything that one run found; `outcome` is "published", "refused" or why it ended."""

    outcome: str
    message: str
    seed: int
    budget_seconds: float
    elapsed_seconds: float
    started_unix_seconds: float
    gates: Sequence[GateResult]
    profiles: Sequence[ProfileResult]
    slo: Mapping[str, ClassTargets]
    round_trip_seconds: Mapping[str, float]


def as_json(result: CalibrationResult) -> dict[str, Any]:
    """Return the result as what `json.dumps` takes."""
    profiles = {item.profile: _profile(item) for item in result.profiles}
    document: dict[str, Any] = {
        "outcome": result.outcome,
        "message": result.message,
        "seed": result.seed,
        "budget_seconds": result.budget_seconds,
        "elapsed_seconds": result.elapsed_seconds,
        "started_unix_seconds": result.started_unix_seconds,
        "gates": [asdict(gate) for gate in result.gates],
        "slo": {name: asdict(targets) for name, targets in result.slo.items()},
        "round_trip_seconds": dict(result.round_trip_seconds),
        "profiles": profiles,
    }
    if result.profiles:
        main = max(result.profiles, key=lambda item: item.observations)
        document |= profiles[main.profile]
    return document


def constants_fields(found: ProfileFit) -> dict[str, float]:
    """Return each constant with its `_stderr`."""
    fields: dict[str, float] = {}
    for name in CONSTANT_NAMES:
        fields[name] = getattr(found.constants, name)
        fields[f"{name}_stderr"] = found.standard_error(name)
    return fields


def _profile(item: ProfileResult) -> dict[str, Any]:
    found = item.found
    return {
        "profile": item.profile,
        "version": item.version,
        "fingerprint": item.fingerprint,
        "instances": list(item.instances),
        "lost_instances": dict(item.lost_instances),
        "constants": constants_fields(found),
        "heldout_median_error": worst_heldout(found),
        "heldout": {name: asdict(part) for name, part in found.heldout.items()},
        "fit": {
            name: {
                "points": part.points,
                "outliers": part.outliers,
                "relative_sigma": part.sigma,
                "call_seconds": part.call_seconds,
                "call_seconds_stderr": part.call_error,
            }
            for name, part in found.parts.items()
        },
        "sample_count": item.observations,
        "instance_scale": found.instance_scale,
        "slow_instances": found.slow_instances,
        "refusals": [asdict(refusal) for refusal in item.refusals],
    }
