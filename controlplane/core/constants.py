"""When fitted constants may be published, and what holds where none were."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite

from controlplane.core.values import Constants
from enginemodel.model import EngineConstants
from enginemodel.profiles import PROFILES, REFERENCE

JUMP_FACTOR = 3.0
"""A value that many times away from the current version's is published on demand only."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one field."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What a constant can be on any hardware; a value in ms or GB/s falls outside."""

    least: float
    most: float
    negligible: float
    """Below it a value counts as this one when versions are compared: ratios of noise mean
    nothing."""


BOUNDS: dict[str, _Bounds] = {
    "p0_seconds": _Bounds(0.0, 2.0, 1e-4),
    "p1_seconds": _Bounds(0.0, 2.0, 1e-4),
    "p2_seconds_per_token": _Bounds(0.0, 2e-2, 1e-7),
    "p3_seconds_per_token_squared": _Bounds(0.0, 1e-6, 1e-10),
    "d0_seconds": _Bounds(0.0, 2.0, 1e-4),
    "d1_seconds_per_sequence": _Bounds(0.0, 2e-2, 1e-6),
    "d2_seconds_per_kv_token": _Bounds(0.0, 1e-5, 1e-9),
    "h0_seconds": _Bounds(0.0, 2.0, 1e-4),
    "handoff_bytes_per_second": _Bounds(1e4, 1e14, 1e4),
}
LEAST_SCALE, MOST_SCALE = 0.1, 10.0


def reference(profile: str) -> Constants:
    """Return version 0 of a profile: its built-in values, or those of the reference profile."""
    known = PROFILES.get(profile, REFERENCE)
    return Constants(
        profile=profile,
        version=0,
        constants=known.constants,
        fingerprint=f"reference {known.name}",
        uncalibrated=True,
        reason="built in; nobody measured it here",
    )


def problems(draft: Constants) -> list[Problem]:
    """Return everything that forbids publishing; empty where nothing does."""
    return [*_value_problems(draft), *_evidence_problems(draft)]


def _value_problems(draft: Constants) -> Iterator[Problem]:
    values = asdict(draft.constants)
    bad = False
    for name, value in values.items():
        bounds = BOUNDS[name]
        if not isfinite(value) or not bounds.least <= value <= bounds.most:
            bad = True
            yield Problem(
                f"constants.constants.{name}",
                f"is {value}; finite and between {bounds.least:g} and {bounds.most:g} is possible "
                "(units are in the name)",
            )
    if bad:
        return
    constants = draft.constants
    if constants.p0_seconds + constants.p1_seconds + constants.p2_seconds_per_token <= 0:
        yield Problem("constants.constants.p0_seconds", "a prefill step would cost nothing")
    if constants.d0_seconds + constants.d1_seconds_per_sequence <= 0:
        yield Problem("constants.constants.d0_seconds", "a decode step would cost nothing")


def _evidence_problems(draft: Constants) -> Iterator[Problem]:
    for name, value in asdict(draft.standard_error).items() if draft.standard_error else ():
        if not isfinite(value):
            yield Problem(f"constants.standard_error.{name}", f"is {value}; unknown is negative")
    if not isfinite(draft.heldout_median_error):
        yield Problem(
            "constants.heldout_median_error",
            f"is {draft.heldout_median_error}; not measured is negative",
        )
    for instance_id, scale in draft.instance_scale.items():
        if not LEAST_SCALE <= scale <= MOST_SCALE:
            yield Problem(
                f"constants.instance_scale[{instance_id}]",
                f"is {scale}; between {LEAST_SCALE:g} and {MOST_SCALE:g} is possible",
            )


def jumps(current: EngineConstants, draft: EngineConstants) -> list[Problem]:
    """Return the values that are `JUMP_FACTOR` or more away from the current ones."""
    found = []
    before, after = asdict(current), asdict(draft)
    for name, bounds in BOUNDS.items():
        old = max(before[name], bounds.negligible)
        new = max(after[name], bounds.negligible)
        if max(old, new) >= JUMP_FACTOR * min(old, new):
            found.append(
                Problem(
                    f"constants.constants.{name}",
                    f"is {after[name]:g}, {JUMP_FACTOR:g} times or more away from the current "
                    f"{before[name]:g}; set accept_jump to publish it",
                )
            )
    return found
