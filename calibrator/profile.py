"""All that is known of one profile after measuring: its three fits and how well they predict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from calibrator.design import prefill_times
from calibrator.fit import UNKNOWN, Constant, PartFit, fit_decode, fit_handoff, fit_prefill
from calibrator.observations import DecodeObservation, HandoffObservation, PrefillObservation
from enginemodel.model import EngineConstants, decode_step_seconds, handoff_seconds

CONSTANT_NAMES = tuple(item.name for item in fields(EngineConstants))
_SLOW_FACTOR = 1.1
_SLOW_ERRORS = 3.0


@dataclass(slots=True)
class Observations:
    """Everything measured for one profile so far."""

    prefill: list[PrefillObservation] = field(default_factory=list)
    decode: list[DecodeObservation] = field(default_factory=list)
    handoff: list[HandoffObservation] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Observations of all kinds, held-out ones included."""
        return len(self.prefill) + len(self.decode) + len(self.handoff)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Relative errors |prediction / observation - 1| on points that no fit has seen."""

    median: float
    p90: float
    count: int


@dataclass(frozen=True, slots=True)
class ProfileFit:
    """The fit of one profile; a part that no instance of the profile shows is None."""

    prefill: PartFit | None
    decode: PartFit | None
    handoff: PartFit | None
    constants: EngineConstants
    """All values; those of missing parts are the fallback's."""
    heldout: Mapping[str, HeldOut]
    """By part: "prefill", "decode", "handoff"."""

    @property
    def parts(self) -> Mapping[str, PartFit]:
        """The parts there are, by name."""
        named = {"prefill": self.prefill, "decode": self.decode, "handoff": self.handoff}
        return {name: part for name, part in named.items() if part is not None}

    @property
    def measured(self) -> Mapping[str, Constant]:
        """The constants that were measured, by name."""
        return {name: c for part in self.parts.values() for name, c in part.constants.items()}

    def standard_error(self, name: str) -> float:
        """Return the standard error of a constant; UNKNOWN where it was not measured."""
        constant = self.measured.get(name)
        if constant is None or not math.isfinite(constant.standard_error):
            return UNKNOWN
        return constant.standard_error

    @property
    def instance_scale(self) -> dict[str, float]:
        """Slowness of each instance; of one that does both, the geometric mean."""
        logs: dict[str, list[float]] = {}
        for part in (self.prefill, self.decode):
            for name, scale in (part.scale if part else {}).items():
                logs.setdefault(name, []).append(math.log(scale))
        return {name: math.exp(sum(values) / len(values)) for name, values in logs.items()}

    @property
    def slow_instances(self) -> dict[str, float]:
        """Instances that are slower than their like, beyond doubt, and by how much."""
        slow: dict[str, float] = {}
        for part in (self.prefill, self.decode):
            for name, scale in (part.scale if part else {}).items():
                sure = math.log(scale) > _SLOW_ERRORS * (part.scale_error[name] if part else 0)
                if scale >= _SLOW_FACTOR and sure:
                    slow[name] = max(scale, slow.get(name, 0.0))
        return slow


def fit_profile(
    seen: Observations, *, kv_bytes_per_token: int, fallback: EngineConstants
) -> ProfileFit:
    """Fit what was seen, held-out points apart, and test it on those.

    Args:
        seen: Everything measured.
        kv_bytes_per_token: 0 where unknown: no hand-off can be fitted then.
        fallback: Values for parts that were not measured.
    """
    train_prefill = [o for o in seen.prefill if not o.held_out]
    train_decode = [o for o in seen.decode if not o.held_out]
    train_handoff = [o for o in seen.handoff if not o.held_out]
    prefill = fit_prefill(train_prefill) if train_prefill else None
    decode = fit_decode(train_decode) if train_decode else None
    constants = _with_parts(fallback, (prefill, decode))
    handoff = None
    if train_handoff and kv_bytes_per_token > 0:
        steps = [_first_step(constants, decode, o) for o in train_handoff]
        handoff = fit_handoff(train_handoff, steps, kv_bytes_per_token)
        constants = _with_parts(constants, (handoff,))
    found = ProfileFit(prefill, decode, handoff, constants, {})
    heldout = _heldout(found, seen, kv_bytes_per_token)
    return ProfileFit(prefill, decode, handoff, constants, heldout)


def predict_prefill(found: ProfileFit, points: Sequence[PrefillObservation]) -> list[float]:
    """Return the predicted time of each observation, its instance's scale included."""
    if not points:
        return []
    times = prefill_times(found.constants, [o.steps for o in points])
    call_seconds = found.prefill.call_seconds if found.prefill else 0.0
    return [
        float(time - call_seconds * o.calls_missing) * _scale(found.prefill, o.instance_id)
        for time, o in zip(times, points, strict=True)
    ]


def predict_decode(found: ProfileFit, points: Sequence[DecodeObservation]) -> list[float]:
    """Return the predicted time of each observation, its instance's scale included."""
    return [
        decode_step_seconds(found.constants, o.sequences, o.kv_tokens)
        * _scale(found.decode, o.instance_id)
        for o in points
    ]


def predict_handoff(
    found: ProfileFit, points: Sequence[HandoffObservation], kv_bytes_per_token: int
) -> list[float]:
    """Return the predicted time of each observation."""
    return [
        handoff_seconds(found.constants, o.prompt_tokens, kv_bytes_per_token)
        + _first_step(found.constants, found.decode, o)
        for o in points
    ]


def _heldout(found: ProfileFit, seen: Observations, kv_bytes: int) -> dict[str, HeldOut]:
    """Return the errors of each fitted part on its held-out points."""
    prefill = [o for o in seen.prefill if o.held_out]
    decode = [o for o in seen.decode if o.held_out]
    handoff = [o for o in seen.handoff if o.held_out]
    errors: dict[str, HeldOut] = {}
    if found.prefill and prefill:
        seconds = [o.seconds for o in prefill]
        errors["prefill"] = _summary(predict_prefill(found, prefill), seconds)
    if found.decode and decode:
        errors["decode"] = _summary(predict_decode(found, decode), [o.seconds for o in decode])
    if found.handoff and handoff:
        predicted = predict_handoff(found, handoff, kv_bytes)
        errors["handoff"] = _summary(predicted, [o.seconds for o in handoff])
    return errors


def _summary(predicted: Sequence[float], seconds: Sequence[float]) -> HeldOut:
    """Return the median and 90th percentile of relative errors."""
    errors = np.abs(np.asarray(predicted) / np.asarray(seconds) - 1)
    return HeldOut(float(np.median(errors)), float(np.quantile(errors, 0.9)), len(errors))


def _first_step(
    constants: EngineConstants, decode: PartFit | None, point: HandoffObservation
) -> float:
    """Return the time of the step that turns a pulled prompt into its first token."""
    step = decode_step_seconds(constants, 1, point.prompt_tokens)
    return step * _scale(decode, point.decode_instance_id)


def _scale(part: PartFit | None, instance_id: str) -> float:
    """Return an instance's scale; 1 where it was not measured."""
    return part.scale.get(instance_id, 1.0) if part else 1.0


def _with_parts(base: EngineConstants, parts: Sequence[PartFit | None]) -> EngineConstants:
    """Return the constants with the values of the parts that there are."""
    values = {name: getattr(base, name) for name in CONSTANT_NAMES}
    for part in parts:
        if part is not None:
            values |= {name: constant.value for name, constant in part.constants.items()}
    return EngineConstants(**values)
