"""Keeps constants true: watches every instance's pace, and learns what the constants should be.

Residuals come from finished requests. Prefill: the engine's time for a prompt that found the engine
free, so that no waiting is in it. Decode: the mean time of a token against the step that the
instance's reported batch should take. A shift of one instance is its drift; the shape of the cost is
learned by recursive least squares for the whole profile, from instances brought to a common pace.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np

from controlplane.core.drift_detector import ShiftDetector
from controlplane.core.drift_rls import Array, Recursion
from controlplane.core.values import Constants
from enginemodel.model import EngineConstants, attention_seconds

Part = Literal["prefill", "decode"]
PARTS: tuple[Part, ...] = ("prefill", "decode")
PREFILL_NAMES = (
    "p0_seconds",
    "p1_seconds",
    "p2_seconds_per_token",
    "p3_seconds_per_token_squared",
)
DECODE_NAMES = ("d0_seconds", "d1_seconds_per_sequence", "d2_seconds_per_kv_token")
_FEWEST_FOR_PROPOSAL = 40


@dataclass(frozen=True, slots=True)
class Drift:
    """An instance that left the pace of its constants."""

    instance_id: str
    profile: str
    part: Part
    ratio: float
    """Observed over predicted time: 1.4 is 40 % slower."""
    since_unix_seconds: float


@dataclass(frozen=True, slots=True)
class _Seen:
    """One observed time, with what each constant makes of its prediction."""

    instance_id: str
    part: Part
    terms: Array
    seconds: float
    now: float


class _ProfileWatch:
    """What is known of one profile since its constants were published."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self.detectors: dict[tuple[str, Part], ShiftDetector] = {}
        self.learned: dict[Part, Recursion] = {
            "prefill": Recursion(len(PREFILL_NAMES)),
            "decode": Recursion(len(DECODE_NAMES)),
        }

    def detector(self, instance_id: str, part: Part) -> ShiftDetector:
        """Return the detector of one instance and part."""
        return self.detectors.setdefault((instance_id, part), ShiftDetector())

    def pace(self, part: Part) -> float:
        """Return the typical recent log residual of the instances of one part."""
        offsets = [d.offset for (_, p), d in self.detectors.items() if p == part and d.ready]
        return median(offsets) if offsets else 0.0


class DriftWatch:
    """Watches all profiles; fed with outcomes in order of time."""

    def __init__(self) -> None:
        self._profiles: dict[str, _ProfileWatch] = {}
        self._since: dict[tuple[str, Part], tuple[str, float]] = {}

    def __repr__(self) -> str:
        """Show who drifts."""
        return f"DriftWatch(profiles={sorted(self._profiles)}, drifting={sorted(self._since)})"

    def calibrated(self, constants: Constants) -> None:
        """Begin anew with a profile whose version is new; uncalibrated ones are not watched."""
        known = self._profiles.get(constants.profile)
        if known is not None and known.constants.version == constants.version:
            return
        for key in [k for k, (profile, _) in self._since.items() if profile == constants.profile]:
            del self._since[key]
        if constants.uncalibrated:
            self._profiles.pop(constants.profile, None)
        else:
            self._profiles[constants.profile] = _ProfileWatch(constants)

    def forget(self, instance_id: str) -> None:
        """Drop an instance that has gone or booted anew."""
        for watch in self._profiles.values():
            for part in PARTS:
                watch.detectors.pop((instance_id, part), None)
        for part in PARTS:
            self._since.pop((instance_id, part), None)

    def prefilled(
        self,
        instance_id: str,
        profile: str,
        *,
        tokens: int,
        chunk_tokens: int,
        seconds: float,
        now: float,
    ) -> bool:
        """Take the time of a prompt that found its engine free.

        Args:
            instance_id: Where.
            profile: Its profile.
            tokens: Prompt tokens computed, without cached ones, > 0.
            chunk_tokens: Prompt tokens a step can hold.
            seconds: What it took, > 0.
            now: Unix seconds.

        Returns:
            Whether the set of drifting instances changed.
        """
        watch = self._profiles.get(profile)
        if watch is None:
            return False
        terms = prefill_terms(watch.constants.constants, tokens, chunk_tokens)
        return self._observe(watch, _Seen(instance_id, "prefill", terms, seconds, now))

    def decoded(
        self,
        instance_id: str,
        profile: str,
        *,
        sequences: float,
        kv_tokens: float,
        seconds: float,
        now: float,
    ) -> bool:
        """Take the mean time per token of a request.

        Args:
            instance_id: Where.
            profile: Its profile.
            sequences: Mean batch while it generated, >= 1.
            kv_tokens: Mean KV in use meanwhile.
            seconds: Time per token, > 0.
            now: Unix seconds.

        Returns:
            Whether the set of drifting instances changed.
        """
        watch = self._profiles.get(profile)
        if watch is None:
            return False
        constants = watch.constants.constants
        terms = np.array(
            [
                constants.d0_seconds,
                constants.d1_seconds_per_sequence * sequences,
                constants.d2_seconds_per_kv_token * kv_tokens,
            ]
        )
        return self._observe(watch, _Seen(instance_id, "decode", terms, seconds, now))

    @property
    def drifting(self) -> list[Drift]:
        """Instances off their pace, by id."""
        found: list[Drift] = []
        for (instance_id, part), (profile, since) in sorted(self._since.items()):
            shift = self._profiles[profile].detector(instance_id, part).shift
            if shift is not None:
                found.append(Drift(instance_id, profile, part, shift.ratio, since))
        return found

    def proposals(self) -> dict[str, Constants]:
        """Return what the constants of profiles with drifting instances should be.

        A profile is left out until enough requests have been seen. Version 0: not published.
        """
        drifting = {drift.profile for drift in self.drifting}
        proposed: dict[str, Constants] = {}
        for profile in sorted(drifting):
            watch = self._profiles[profile]
            count = sum(learned.count for learned in watch.learned.values())
            if count >= _FEWEST_FOR_PROPOSAL:
                proposed[profile] = self._proposal(watch, count)
        return proposed

    def _observe(self, watch: _ProfileWatch, seen: _Seen) -> bool:
        predicted = float(seen.terms.sum())
        if predicted <= 0 or seen.seconds <= 0:
            return False
        scale = watch.constants.instance_scale.get(seen.instance_id, 1.0)
        residual = math.log(seen.seconds / (predicted * scale))
        detector = watch.detector(seen.instance_id, seen.part)
        key = (seen.instance_id, seen.part)
        changed = detector.observe(residual)
        if changed and detector.shift is not None:
            self._since[key] = (watch.constants.profile, seen.now)
        elif changed:
            self._since.pop(key, None)
        if detector.ready:
            common = residual - detector.offset + watch.pace(seen.part)
            watch.learned[seen.part].observe(seen.terms / predicted, math.exp(common))
        return changed

    def _proposal(self, watch: _ProfileWatch, count: int) -> Constants:
        old = watch.constants
        values: dict[str, float] = {}
        for part, names in zip(PARTS, (PREFILL_NAMES, DECODE_NAMES), strict=True):
            theta = watch.learned[part].theta
            for name, factor in zip(names, theta, strict=True):
                values[name] = getattr(old.constants, name) * float(factor)
        values["p0_seconds"] = max(values["p0_seconds"], values["p1_seconds"])
        return replace(
            old,
            version=0,
            constants=replace(old.constants, **values),
            standard_error=None,
            heldout_median_error=-1.0,
            sample_count=count,
            instance_scale=_scales(watch, old.instance_scale),
            published_unix_seconds=0.0,
            reason=f"learned from {count} finished requests since version {old.version}",
        )


def prefill_terms(constants: EngineConstants, tokens: int, chunk_tokens: int) -> Array:
    """Return what p0, p1, p2 and p3 each make of a prompt's prefill time, seconds."""
    floor = fixed = linear = attention = 0.0
    done = 0
    while done < tokens:
        chunk = min(max(chunk_tokens, 1), tokens - done)
        line = constants.p1_seconds + constants.p2_seconds_per_token * chunk
        if line < constants.p0_seconds:
            floor += constants.p0_seconds
        else:
            fixed += constants.p1_seconds
            linear += constants.p2_seconds_per_token * chunk
        attention += attention_seconds(constants, chunk, done)
        done += chunk
    return np.array([floor, fixed, linear, attention])


def _scales(watch: _ProfileWatch, old: Mapping[str, float]) -> dict[str, float]:
    """Return each instance's slowness with its shift against the others of its part."""
    logs: dict[str, list[float]] = {}
    for (instance_id, part), detector in watch.detectors.items():
        if detector.ready:
            logs.setdefault(instance_id, []).append(detector.offset - watch.pace(part))
    return dict(old) | {
        name: old.get(name, 1.0) * math.exp(sum(values) / len(values))
        for name, values in logs.items()
    }
