"""The engine model as functions of its constants, with derivatives, at many points at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibrator.observations import StepShape
from calibrator.robust import Array


def step_arrays(shapes: Sequence[Sequence[StepShape]]) -> tuple[Array, Array]:
    """Return tokens of each step, shape (n, most steps), 0 where there is none, and attention (n,)."""
    tokens = np.zeros((len(shapes), max(len(steps) for steps in shapes)))
    for row, steps in zip(tokens, shapes, strict=True):
        row[: len(steps)] = [step.tokens for step in steps]
    attention = np.array([sum(s.attention_tokens_squared for s in steps) for steps in shapes])
    return tokens, attention


@dataclass(frozen=True, slots=True)
class Linear:
    """offset + X theta."""

    rows: Array
    offset: Array

    def predict(self, parameters: Array) -> tuple[Array, Array]:
        """Return the sum and its derivatives, which are the rows."""
        return np.maximum(self.offset + self.rows @ parameters, 1e-12), self.rows


@dataclass(frozen=True, slots=True)
class FixedKnee:
    """p1 n + p2 sum(max(K, T)) + p3 sum(A) with a given knee; parameters p1, p2, p3.

    Where `called` is given, c called is added, and c is the last parameter.
    """

    tokens: Array
    """Tokens of each step, shape (n, most steps), 0 where there is none."""
    attention: Array
    knee: float
    called: Array | None = None

    def predict(self, parameters: Array) -> tuple[Array, Array]:
        """Return the times and their derivatives."""
        real = self.tokens > 0
        effective = np.where(real, np.maximum(self.tokens, self.knee), 0.0).sum(axis=1)
        columns = [real.sum(axis=1).astype(float), effective, self.attention]
        rows = np.column_stack(columns if self.called is None else [*columns, self.called])
        return np.maximum(rows @ parameters, 1e-12), rows


@dataclass(frozen=True, slots=True)
class FreeFloor:
    """sum(max(p0, p1 + p2 T)) + p3 sum(A); parameters p1, p2, p3, p0, all of them times.

    Where `called` is given, c called is added, and c is the last parameter.
    """

    tokens: Array
    attention: Array
    called: Array | None = None

    def predict(self, parameters: Array) -> tuple[Array, Array]:
        """Return the times and their derivatives, those of the branch that holds."""
        p1, p2, _, p0 = parameters[:4]
        real = self.tokens > 0
        floored = real & (p1 + p2 * self.tokens < p0)
        linear = real & ~floored
        counts = linear.sum(axis=1).astype(float)
        tokens = np.where(linear, self.tokens, 0.0).sum(axis=1)
        columns = [counts, tokens, self.attention, floored.sum(axis=1)]
        rows = np.column_stack(columns if self.called is None else [*columns, self.called])
        return np.maximum(rows @ parameters, 1e-12), rows
