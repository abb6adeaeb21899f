"""Comparing policies on the same seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean difference with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """True where the interval keeps clear of 0."""
        return self.low > 0.0 or self.high < 0.0


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0
) -> Difference:
    """Return the mean of ours minus theirs over paired seeds.

    The pairs are resampled, not the sides, so that what both sides share (the requests) cancels.

    Raises:
        ValueError: The sides are empty or of different length.
    """
    if not ours or len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} values against {len(theirs)}: not pairs")
    differences = np.array(ours) - np.array(theirs)
    random = np.random.default_rng(seed)
    picks = random.integers(len(differences), size=(RESAMPLES, len(differences)))
    means = differences[picks].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Difference(float(differences.mean()), float(low), float(high))
