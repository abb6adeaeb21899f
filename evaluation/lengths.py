"""How long prompts and outputs are."""

from dataclasses import dataclass
from math import log
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evaluation.errors import InvalidWorkloadError

IntArray = npt.NDArray[np.int64]


class Lengths(Protocol):
    """A distribution of token counts."""

    def draw(self, random: np.random.Generator, count: int) -> IntArray:
        """Return `count` lengths, each at least 1."""
        ...

    @property
    def mean_tokens(self) -> float:
        """Mean before clipping."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Lognormal with a mean and a coefficient of variation, clipped to [low, high]."""

    mean: float
    cv: float
    low: int = 1
    high: int = 1_000_000

    @property
    def mean_tokens(self) -> float:
        """Mean before clipping."""
        return self.mean

    def draw(self, random: np.random.Generator, count: int) -> IntArray:
        """Return clipped draws, rounded down."""
        variance = log(1.0 + self.cv * self.cv)
        draws = random.lognormal(log(self.mean) - variance / 2.0, variance**0.5, count)
        return np.clip(draws, self.low, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Every length from low to high alike."""

    low: int
    high: int

    @property
    def mean_tokens(self) -> float:
        """Mean."""
        return (self.low + self.high) / 2.0

    def draw(self, random: np.random.Generator, count: int) -> IntArray:
        """Return draws."""
        return random.integers(self.low, self.high + 1, count).astype(np.int64)


def make_lengths(description: dict[str, Any]) -> Lengths:
    """Construct a distribution from {kind, …}.

    Raises:
        InvalidWorkloadError: The kind is unknown, or a field of it missing or out of range.
    """
    kinds = {"lognormal": LogNormal, "uniform": Uniform}
    fields = dict(description)
    kind = fields.pop("kind", None)
    if kind not in kinds:
        raise InvalidWorkloadError(f"no length distribution {kind!r}; there are {[*kinds]}")
    try:
        lengths: LogNormal | Uniform = kinds[kind](**fields)
    except TypeError as error:
        raise InvalidWorkloadError(f"lengths of kind {kind!r}: {error}") from error
    if not 1 <= lengths.low <= lengths.high:
        raise InvalidWorkloadError(f"lengths run from {lengths.low} to {lengths.high}")
    return lengths
