"""When requests come: renewal processes under a changing intensity.

A process of mean rate 1 (exponential or gamma gaps) gives the amount of intensity between two
arrivals; a modulation of mean 1 says how fast intensity accrues at each time. So bursts change when
requests come and nothing else, and a rate is a factor on both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from evaluation.errors import InvalidWorkloadError

FloatArray = npt.NDArray[np.float64]
CHUNK = 1024


class Modulation(Protocol):
    """Intensity over time, 1 in the mean."""

    def segments(self, random: np.random.Generator) -> Iterator[tuple[float, float]]:
        """Yield (seconds, intensity) without end."""
        ...


@dataclass(frozen=True, slots=True)
class Steady:
    """Always 1."""

    def segments(self, random: np.random.Generator) -> Iterator[tuple[float, float]]:  # noqa: ARG002
        """Yield one long segment after another."""
        while True:
            yield 3600.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """Two states with exponential stays: the Markov-modulated Poisson process of two states."""

    high: float = 2.0
    high_seconds: float = 3.0
    low: float = 0.625
    low_seconds: float = 8.0

    def segments(self, random: np.random.Generator) -> Iterator[tuple[float, float]]:
        """Yield high and low stays in turn, high first."""
        while True:
            yield float(random.exponential(self.high_seconds)), self.high
            yield float(random.exponential(self.low_seconds)), self.low


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """A square wave: bursts of equal length at equal distance, the first after a low stretch."""

    high: float = 2.5
    high_seconds: float = 4.0
    low: float = 0.5
    low_seconds: float = 12.0

    def segments(self, random: np.random.Generator) -> Iterator[tuple[float, float]]:  # noqa: ARG002
        """Yield low and high in turn."""
        while True:
            yield self.low_seconds, self.low
            yield self.high_seconds, self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalProcess:
    """Gaps and their modulation.

    Attributes:
        gap_cv: Coefficient of variation of the gaps; 1 is Poisson, others are gamma.
        modulation: Intensity over time.
    """

    gap_cv: float = 1.0
    modulation: Modulation = Steady()

    def __post_init__(self) -> None:
        """Refuse gaps without spread in either direction."""
        if not 0.0 < self.gap_cv < 100.0:
            raise InvalidWorkloadError(f"gap_cv is {self.gap_cv}; it is above 0 and below 100")

    def times(
        self, rate: float, gaps: np.random.Generator, states: np.random.Generator
    ) -> Iterator[float]:
        """Yield arrival times without end, seconds, at `rate` a second in the mean."""
        segments = self.modulation.segments(states)
        begin, reached = 0.0, 0.0
        seconds, intensity = next(segments)
        spent = 0.0
        while True:
            for gap in self._gaps(gaps):
                spent += gap / rate
                while spent > reached + seconds * intensity:
                    reached += seconds * intensity
                    begin += seconds
                    seconds, intensity = next(segments)
                yield begin + (spent - reached) / intensity

    def _gaps(self, random: np.random.Generator) -> list[float]:
        if self.gap_cv == 1.0:
            return list(random.exponential(1.0, CHUNK).tolist())
        shape = 1.0 / (self.gap_cv * self.gap_cv)
        return list(random.gamma(shape, 1.0 / shape, CHUNK).tolist())


def make_process(
    process: str = "poisson", *, gap_cv: float = 1.0, **modulation: float
) -> ArrivalProcess:
    """Construct a process by name: poisson, gamma, bursts or train.

    Raises:
        InvalidWorkloadError: The name or a parameter is not known.
    """
    kinds = {"poisson": Steady, "gamma": Steady, "bursts": Bursts, "train": Train}
    kind = kinds.get(process)
    if kind is None:
        raise InvalidWorkloadError(f"no arrival process {process!r}; there are {[*kinds]}")
    try:
        return ArrivalProcess(gap_cv=gap_cv, modulation=kind(**modulation))
    except TypeError as error:
        raise InvalidWorkloadError(f"arrivals of process {process!r}: {error}") from error
