"""Histograms of output lengths: decayed counts, and what can be read off them quickly."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import sqrt

BUCKET_EDGES: tuple[int, ...] = tuple(sorted({round(sqrt(2.0) ** i) for i in range(33)}))
_MIDDLES: tuple[float, ...] = tuple(
    (lower + edge + 1) / 2.0 for lower, edge in zip((0, *BUCKET_EDGES), BUCKET_EDGES, strict=False)
)
_LARGEST_UNIT = 1e9
_NEGLIGIBLE = 1e-9


def bucket_of(tokens: int) -> int:
    """Return the index of the smallest edge at or above a length; the last for longer ones."""
    return min(bisect_left(BUCKET_EDGES, tokens), len(BUCKET_EDGES) - 1)


class DecayingCounts:
    """Counts by bucket that fade with every new one; one count costs the same for any number.

    Instead of fading the old, each new count is given more weight than the one before.
    """

    __slots__ = ("_decay", "_unit", "_values", "evidence")

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._unit = 1.0
        self._values = [0.0] * len(BUCKET_EDGES)
        self.evidence = 0.0

    def add(self, bucket: int) -> None:
        """Count one."""
        self._unit /= self._decay
        self._values[bucket] += self._unit
        self.evidence = self.evidence * self._decay + 1.0
        if self._unit > _LARGEST_UNIT:
            self._values = self.weights()
            self._unit = 1.0

    def weights(self) -> list[float]:
        """Return the faded counts."""
        return [value / self._unit for value in self._values]


class LengthHistogram:
    """Shares of lengths, with sums that answer for any cap and any progress in a few steps.

    Lengths of a bucket are taken to lie in its middle.
    """

    __slots__ = ("_mass", "_middles", "_moments", "_total", "weights")

    def __init__(self, weights: Sequence[float]) -> None:
        """Take one weight a bucket of BUCKET_EDGES; their sum is above 0."""
        self.weights = tuple(weights)
        held = [(m, w) for m, w in zip(_MIDDLES, self.weights, strict=True) if w > 0.0]
        self._middles = [middle for middle, _ in held]
        self._mass = [0.0, *accumulate(weight for _, weight in held)]
        self._moments = [0.0, *accumulate(middle * weight for middle, weight in held)]
        self._total = self._mass[-1]

    def __repr__(self) -> str:
        return f"<LengthHistogram of {self._total:.1f}, mean {self._moments[-1] / self._total:.0f}>"

    def rest(self, generated: int, most: int, factor: float = 1.0) -> float | None:
        """Return E[min(factor L, most) - generated | min(factor L, most) > generated].

        None where no length seen is that long.
        """
        if generated >= most:
            return None
        longer = bisect_right(self._middles, generated / factor)
        capped = max(longer, bisect_left(self._middles, most / factor))
        mass = self._total - self._mass[longer]
        if mass <= _NEGLIGIBLE * self._total:
            return None
        total = factor * (self._moments[capped] - self._moments[longer])
        total += most * (self._total - self._mass[capped])
        return total / mass - generated
