"""From observations to the constants of the engine model, with errors and each instance's scale.

Prefill: p1 n + p2 sum(max(K, T)) + p3 sum(A) over n steps of T tokens and attention A, where the
knee K = (p0 - p1) / p2 is found from the data: tried over a grid, then solved with the rest. A knee
that does not pay for its parameter (BIC) is none, and p0 = p1. A prompt that runs alone is seen with
its call around it, the gap between two steps is not: where there are enough of both, what a call adds
is fitted too. p0 and p1 are of a step with its call. Decode: d0 + d1 B + d2 KV. Hand-off: h0 + bytes /
bandwidth beside the decode step that follows it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize

from calibrator.models import FixedKnee, FreeFloor, Linear, step_arrays
from calibrator.observations import DecodeObservation, HandoffObservation, PrefillObservation
from calibrator.robust import Array, RobustFit, fit

_OPTIMIZE: Any = optimize
UNKNOWN = -1.0
"""Standard error of a value that was not measured."""
_SEARCH_POINTS = 250
"""As many are enough to find roughly where the knee is."""
_FEWEST_OF_A_KIND = 8
"""With fewer observations with, or without, a call around them, what it adds is not fitted."""
_SHORTEST_NEEDED_TOKENS = 64
"""Without a prompt this short nothing is known about the floor p0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One fitted value.

    Attributes:
        value: In the unit of its name.
        standard_error: In the same unit; infinite where the points cannot tell.
        influence: Standard error times the largest weight that the constant has in any measured
            prediction, as a share of that prediction: what not knowing it can cost.
    """

    value: float
    standard_error: float
    influence: float

    @property
    def relative_error(self) -> float:
        """Standard error as a share of the value; infinite at 0."""
        return self.standard_error / self.value if self.value > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFit:
    """The fit of prefill, of decode or of hand-offs.

    Attributes:
        constants: By name, as in the engine model.
        scale: Slowness of each instance relative to the typical one.
        scale_error: Standard error of its logarithm.
        sigma: Robust relative spread of a single observation.
        points: Observations used.
        outliers: Of these, without any weight in the end.
        call_seconds: Of p0 and p1, what is the call's and not the step's; 0 where unknown.
        call_error: Its standard error.
    """

    constants: dict[str, Constant]
    scale: dict[str, float]
    scale_error: dict[str, float]
    sigma: float
    points: int
    outliers: int
    call_seconds: float = 0.0
    call_error: float = 0.0


def fit_prefill(observations: Sequence[PrefillObservation]) -> PartFit:
    """Fit p0 to p3; at least one observation is needed, and some dozens to identify all."""
    tokens, attention = step_arrays([o.steps for o in observations])
    seconds = [o.seconds for o in observations]
    names, groups = _groups([o.instance_id for o in observations])
    found = _fit_floor(tokens, attention, seconds, groups)
    called = np.array([float(o.called) for o in observations])
    if min(called.sum(), len(called) - called.sum()) >= _FEWEST_OF_A_KIND:
        with_call = _fit_floor(tokens, attention, seconds, groups, called)
        gain = len(seconds) * math.log(_loss(found) / _loss(with_call))
        found = with_call if gain > 2 * math.log(len(seconds)) else found
    call, call_error, found = _add_call(found)
    p1, p2, p3, p0 = found.parameters
    errors = _errors(found.covariance)
    if tokens.sum(axis=1).min() > _SHORTEST_NEEDED_TOKENS:
        errors[3] = math.inf
    f, rows = FreeFloor(tokens, attention).predict(found.parameters)
    weights = np.max(rows / f[:, None], axis=0)
    constants = {
        "p0_seconds": _constant(p0, errors[3], max(weights[0], weights[3])),
        "p1_seconds": _constant(p1, errors[0], weights[0]),
        "p2_seconds_per_token": _constant(p2, errors[1], weights[1]),
        "p3_seconds_per_token_squared": _constant(p3, errors[2], weights[2]),
    }
    return replace(_part(constants, names, found), call_seconds=call, call_error=call_error)


def _add_call(found: RobustFit) -> tuple[float, float, RobustFit]:
    """Return c, its error, and p1, p2, p3, p0 of steps with their call around them."""
    if len(found.parameters) == 4:
        return 0.0, 0.0, found
    mixing = np.hstack([np.eye(4), np.array([[1.0], [0.0], [0.0], [1.0]])])
    with_calls = replace(
        found,
        parameters=mixing @ found.parameters,
        covariance=mixing @ found.covariance @ mixing.T,
    )
    return float(found.parameters[4]), float(_errors(found.covariance)[4]), with_calls


def _fit_floor(
    tokens: Array,
    attention: Array,
    seconds: Sequence[float],
    groups: Sequence[int],
    called: Array | None = None,
) -> RobustFit:
    """Return the better of the fits with and without a floor; parameters p1, p2, p3, p0 (, c)."""
    times = np.asarray(seconds, dtype=float)

    def fixed(knee: float, chosen: npt.NDArray[np.int64], *, rough: bool = False) -> RobustFit:
        some = None if called is None else called[chosen]
        model = FixedKnee(tokens[chosen], attention[chosen], knee, some)
        _, rows = model.predict(np.ones(3 if called is None else 4))
        _, members = np.unique(np.asarray(groups)[chosen], return_inverse=True)
        start = _start(rows, times[chosen])
        return fit(model, list(times[chosen]), list(members), start, rough=rough)

    real = tokens[tokens > 0]
    without = fixed(0.0, np.arange(len(times)))
    if len(seconds) <= 5 or real.min() == real.max():
        return _no_floor(without)
    grid = np.geomspace(max(real.min(), 1.0) * 1.2, real.max() * 0.8, 14)
    few = np.arange(0, len(seconds), max(len(seconds) // _SEARCH_POINTS, 1))
    start, knee = min(
        ((fixed(float(knee), few, rough=True), float(knee)) for knee in grid),
        key=lambda trial: _loss(trial[0]),
    )
    p1, p2, p3, *call = _positive(start.parameters, without.parameters)
    model = FreeFloor(tokens, attention, called)
    free = fit(model, seconds, groups, [p1, p2, p3, p1 + p2 * knee, *call])
    p1, p2, _, p0 = free.parameters[:4]
    seen = p0 > p1 + p2 * real.min()
    gain = len(seconds) * math.log(_loss(without) / _loss(free))
    return free if seen and gain > 2 * math.log(len(seconds)) else _no_floor(without)


def _no_floor(found: RobustFit) -> RobustFit:
    """Add p0 = p1, which is a floor that never holds."""
    order = [0, 1, 2, 0, *range(3, len(found.parameters))]
    return replace(
        found,
        parameters=found.parameters[order],
        covariance=found.covariance[np.ix_(order, order)],
    )


def _loss(found: RobustFit) -> float:
    """Return the mean of residuals squared, each bounded: stalls do not decide between models."""
    bound = 0.5
    return float(np.square(np.clip(found.residuals, -bound, bound)).mean()) + 1e-12


def fit_decode(observations: Sequence[DecodeObservation]) -> PartFit:
    """Fit d0 to d2; at least one observation is needed."""
    rows = np.array([[1.0, o.sequences, o.kv_tokens] for o in observations])
    seconds = np.array([o.seconds for o in observations])
    names, groups = _groups([o.instance_id for o in observations])
    model = Linear(rows, np.zeros(len(rows)))
    found = fit(model, list(seconds), groups, _start(rows, seconds))
    labels = ("d0_seconds", "d1_seconds_per_sequence", "d2_seconds_per_kv_token")
    f, _ = model.predict(found.parameters)
    return _part(_constants(labels, found, rows, f), names, found)


def fit_handoff(
    observations: Sequence[HandoffObservation],
    decode_seconds: Sequence[float],
    kv_bytes_per_token: int,
) -> PartFit:
    """Fit h0 and the bandwidth.

    Args:
        observations: At least one.
        decode_seconds: What the decode step after each pull takes there; shape of observations.
        kv_bytes_per_token: > 0.
    """
    rows = np.array([[1.0, float(o.prompt_tokens * kv_bytes_per_token)] for o in observations])
    seconds = np.array([o.seconds for o in observations])
    offset = np.asarray(decode_seconds, dtype=float)
    model = Linear(rows, offset)
    start = _start(rows, np.maximum(seconds - offset, 0.02 * seconds))
    found = fit(model, list(seconds), [0] * len(rows), start)
    f, _ = model.predict(found.parameters)
    raw = _constants(("h0_seconds", "seconds_per_byte"), found, rows, f)
    slope = raw.pop("seconds_per_byte")
    # A link too fast to be seen gets the speed that it has at least, within two errors.
    slowest = max(slope.value, 2 * min(slope.standard_error, 1.0) if slope.value == 0 else 0.0)
    slowest = max(slowest, 1e-14)
    raw["handoff_bytes_per_second"] = Constant(
        value=1 / slowest,
        standard_error=slope.standard_error / slowest**2,
        influence=slope.influence,
    )
    return _part(raw, ["all"], found)


def _start(rows: Array, seconds: Array) -> list[float]:
    """Return non-negative least squares on relative error, lifted where it is 0."""
    relative = rows / seconds[:, None]
    size = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    solution, _ = _OPTIMIZE.nnls(relative / size, np.ones(len(seconds)))
    solution = solution / size
    smallest = 0.02 / np.maximum(relative.max(axis=0), 1e-300)
    return [float(max(value, low)) for value, low in zip(solution, smallest, strict=True)]


def _positive(first: Array, second: Array) -> list[float]:
    """Return the first of two guesses, else the second, else a tiny value, in each place."""
    return [float(a or b or 1e-12) for a, b in zip(first, second, strict=True)]


def _groups(instance_ids: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the distinct ids and the position of each point's id among them."""
    names = sorted(set(instance_ids))
    position = {name: index for index, name in enumerate(names)}
    return names, [position[instance_id] for instance_id in instance_ids]


def _errors(covariance: Array) -> Array:
    """Return the standard errors."""
    return np.sqrt(np.maximum(np.diag(covariance), 0.0))


def _constant(value: float, error: float, weight: float) -> Constant:
    """Make a constant of plain floats."""
    return Constant(
        value=float(value), standard_error=float(error), influence=float(error * weight)
    )


def _constants(
    labels: Sequence[str], found: RobustFit, rows: Array, f: Array
) -> dict[str, Constant]:
    """Make the constants of a linear model."""
    weights = np.max(rows / f[:, None], axis=0)
    columns = zip(labels, found.parameters, _errors(found.covariance), weights, strict=True)
    return {label: _constant(value, error, weight) for label, value, error, weight in columns}


def _part(constants: dict[str, Constant], names: Sequence[str], found: RobustFit) -> PartFit:
    """Put a fit together."""
    return PartFit(
        constants=constants,
        scale={n: float(np.exp(s)) for n, s in zip(names, found.log_scales, strict=True)},
        scale_error={n: float(e) for n, e in zip(names, found.log_scale_errors, strict=True)},
        sigma=found.sigma,
        points=len(found.residuals),
        outliers=int((found.inliers == 0).sum()),
    )
