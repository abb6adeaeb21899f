"""Robust fit of positive models on relative error: soft-L1 start, then Tukey's biweight.

The residual of a point is log(y) - log(s_g) - log(f(x)), so that 5 % count alike at 10 ms and at
1 s; s_g is the slowness of the point's group (an engine instance) relative to the typical one.
Stalls and other outliers get no weight in the end (biweight, c = 4.685), after a start that they
cannot carry away (soft L1). Standard errors follow Huber's proposal for M-estimates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy import optimize

Array = npt.NDArray[np.float64]

_OPTIMIZE: Any = optimize
"""Its untyped names confuse a type checker: functions and modules share them."""
_TUKEY_C = 4.685
_MAD_TO_SIGMA = 1.4826
_SMALLEST_SIGMA = 1e-4
_MOST_ROUNDS = 30
_NEGLIGIBLE_SHARE = 1e-5
"""A parameter that makes up less of every prediction is 0: the solver only nears its bounds."""
_GAUGE_WEIGHT = 1e3
"""Weight of the row that holds the mean of log scales at 0 while solving."""


class Model(Protocol):
    """A positive function of parameters that are >= 0, evaluated at fixed points."""

    def predict(self, parameters: Array) -> tuple[Array, Array]:
        """Return f of shape (n,) and its derivatives of shape (n, parameters)."""
        ...


@dataclass(frozen=True, slots=True)
class RobustFit:
    """What a fit found.

    Attributes:
        parameters: Shape (p,).
        covariance: Shape (p, p); infinite where the points cannot tell.
        log_scales: Logarithm of each group's slowness, median 0.
        log_scale_errors: Their standard errors.
        residuals: log(y / prediction), shape (n,).
        sigma: Robust spread of the residuals.
        inliers: Weight of each point, 0 to 1.
    """

    parameters: Array
    covariance: Array
    log_scales: Array
    log_scale_errors: Array
    residuals: Array
    sigma: float
    inliers: Array


@dataclass(frozen=True, slots=True)
class _Problem:
    """Points and what stands still while they are fitted; parameters are solved in units of `unit`."""

    model: Model
    log_seconds: Array
    groups: npt.NDArray[np.int64]
    group_count: int
    unit: Array

    @property
    def parameter_count(self) -> int:
        """Parameters of the model, without scales."""
        return len(self.unit)

    def residuals(self, solution: Array) -> Array:
        """Return log(y) - log(s) - log(f)."""
        f, _ = self.model.predict(solution[: self.parameter_count] * self.unit)
        scales = solution[self.parameter_count :]
        return self.log_seconds - scales[self.groups] - np.log(f)

    def jacobian(self, solution: Array) -> Array:
        """Return the derivatives of the residuals, shape (n, parameters + groups)."""
        f, derivatives = self.model.predict(solution[: self.parameter_count] * self.unit)
        rows = np.zeros((len(f), len(solution)))
        rows[:, : self.parameter_count] = -derivatives / f[:, None] * self.unit
        rows[np.arange(len(f)), self.parameter_count + self.groups] = -1.0
        return rows

    def solve(self, start: Array, weights: Array, loss: str, loss_scale: float) -> Array:
        """Minimise the weighted loss from `start`, the mean of the scales held at 0."""
        root = np.sqrt(weights)
        count = self.parameter_count

        def weighted(solution: Array) -> Array:
            gauge = _GAUGE_WEIGHT * solution[count:].mean()
            return np.append(root * self.residuals(solution), gauge)

        def weighted_jacobian(solution: Array) -> Array:
            gauge = np.zeros((1, len(solution)))
            gauge[0, count:] = _GAUGE_WEIGHT / self.group_count
            return np.vstack([root[:, None] * self.jacobian(solution), gauge])

        lower = np.concatenate([np.zeros(count), np.full(self.group_count, -np.inf)])
        start = np.concatenate([np.maximum(start[:count], 1e-6), start[count:]])
        found = _OPTIMIZE.least_squares(
            weighted,
            start,
            jac=weighted_jacobian,
            bounds=(lower, np.inf),
            loss=loss,
            f_scale=loss_scale,
            max_nfev=200,
        )
        return np.asarray(found.x, dtype=float)


def fit(
    model: Model,
    seconds: Sequence[float],
    groups: Sequence[int],
    start: Sequence[float],
    *,
    rough: bool = False,
) -> RobustFit:
    """Fit a model's parameters and the scale of each group.

    Args:
        model: What is fitted.
        seconds: Observed, > 0, shape (n,), n >= 1.
        groups: Group of each point, 0 to the number of groups - 1, each at least once.
        start: A first guess, > 0 in every parameter: its size sets the units of the solution.
        rough: Stop after the soft-L1 start; enough to compare models.
    """
    unit = np.asarray(start, dtype=float)
    group_count = max(groups) + 1
    problem = _Problem(
        model,
        np.log(np.asarray(seconds, dtype=float)),
        np.asarray(groups, dtype=np.int64),
        group_count,
        unit,
    )
    ones = np.ones(len(seconds))
    solution = np.concatenate([np.ones(len(unit)), np.zeros(group_count)])
    solution = problem.solve(solution, ones, "soft_l1", 0.1)
    if rough:
        return _finish(problem, solution, ones)
    sigma = _spread(problem.residuals(solution), len(solution) - 1)
    solution = problem.solve(solution, ones, "soft_l1", max(sigma, 0.01))
    weights = ones
    for _ in range(_MOST_ROUNDS):
        residuals = problem.residuals(solution)
        sigma = _spread(residuals, len(solution) - 1)
        weights = np.square(np.clip(1 - np.square(residuals / (_TUKEY_C * sigma)), 0, None))
        before = solution
        solution = problem.solve(solution, weights, "linear", 1.0)
        if np.allclose(solution, before, rtol=1e-4, atol=1e-6):
            break
    return _finish(problem, solution, weights)


def _spread(residuals: Array, parameters: int) -> float:
    """Return the robust standard deviation, corrected for the parameters that were fitted."""
    freedom = max(len(residuals) - parameters, 1) / len(residuals)
    mad = float(np.median(np.abs(residuals)))
    return max(_MAD_TO_SIGMA * mad / math.sqrt(freedom), _SMALLEST_SIGMA)


def _finish(problem: _Problem, solution: Array, weights: Array) -> RobustFit:
    """Move the median of the scales to 0 and work out the errors."""
    count = problem.parameter_count
    residuals = problem.residuals(solution)
    covariance = _covariance(problem, solution, residuals)
    scales = solution[count:]
    middle = float(np.median(scales))
    unit = problem.unit * np.exp(middle)
    parameters = solution[:count] * unit
    f, derivatives = problem.model.predict(solution[:count] * problem.unit)
    largest_share = np.max(np.abs(derivatives) / f[:, None], axis=0) * solution[:count]
    parameters[largest_share * problem.unit < _NEGLIGIBLE_SHARE] = 0.0
    return RobustFit(
        parameters=parameters,
        covariance=covariance[:count, :count] * np.outer(unit, unit),
        log_scales=scales - middle,
        log_scale_errors=np.sqrt(np.diag(covariance)[count:]),
        residuals=residuals,
        sigma=_spread(residuals, len(solution) - 1),
        inliers=weights,
    )


def _covariance(problem: _Problem, solution: Array, residuals: Array) -> Array:
    """Return the covariance of the solution (Huber 1981, 7.6): infinite without freedom left."""
    size = len(solution)
    freedom = len(residuals) - (size - 1)
    if freedom <= 0:
        return np.full((size, size), np.inf)
    sigma = _spread(residuals, size - 1)
    u = residuals / (_TUKEY_C * sigma)
    inside = np.abs(u) < 1
    psi = np.where(inside, residuals * np.square(1 - u**2), 0.0)
    slope = np.where(inside, (1 - u**2) * (1 - 5 * u**2), 0.0).mean()
    variance = float(np.square(psi).sum() / freedom / max(slope, 0.1) ** 2)
    variance = max(variance, _SMALLEST_SIGMA**2)
    jacobian = problem.jacobian(solution)
    gauge = np.zeros((1, size))
    gauge[0, problem.parameter_count :] = _GAUGE_WEIGHT / problem.group_count
    stacked = np.vstack([jacobian, gauge])
    scale = np.sqrt(np.square(stacked).sum(axis=0))
    scale[scale == 0] = 1.0
    information = (stacked / scale).T @ (stacked / scale)
    values, vectors = np.linalg.eigh(information)
    floor = 1e-12 * values[-1]
    inverse = (vectors / np.maximum(values, floor)) @ vectors.T
    covariance: Array = variance * inverse / np.outer(scale, scale)
    unseen = np.square(jacobian).sum(axis=0) == 0
    covariance[np.ix_(unseen, unseen)] = np.inf
    return covariance
