"""Notices that a stream of log residuals has shifted: a two-sided CUSUM with its own baseline.

A residual is log(observed / predicted). Live traffic sits a little beside the probes that the
constants were fitted on, so the first residuals set a baseline, within limits: a shift that large is
no baseline but the drift itself. Slack and threshold grow with the noise, so that steady traffic
raises a false alarm less than once in e^24 excursions (Page 1954; for Gaussian residuals the chance of
one excursion is exp(-2 k h / sigma^2)).
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

_BASELINE_COUNT = 25
_BASELINE_MOST = 256
_BASELINE_ERROR = 0.025
"""Noisy streams are listened to for longer: a baseline that is off by more than the slack would
itself look like a shift, for ever."""
_BASELINE_LIMIT = math.log(1.2)
_CLIP = 0.6
_SLACK = 0.12
"""Shifts smaller than about twice that (27 %) are slow to be noticed, or are not."""
_LEAST_THRESHOLD = 1.5
_EXPONENT = 24.0
_RECENT = 20
_CALM = 0.08
_NOISE_WEIGHT = 0.02
_LARGEST_SIGMA = 0.4


@dataclass(frozen=True, slots=True)
class Shift:
    """Residuals have left their baseline.

    Attributes:
        ratio: Recent median of observed over predicted.
    """

    ratio: float


class ShiftDetector:
    """One stream of residuals; `observe` each, in order."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._started = False
        self._baseline = 0.0
        self._variance = 0.0
        self._above = 0.0
        self._below = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.shift: Shift | None = None

    def __repr__(self) -> str:
        """Show where the sums stand."""
        return (
            f"ShiftDetector(baseline={self._baseline:.3f}, above={self._above:.2f}, "
            f"below={self._below:.2f}, shift={self.shift})"
        )

    @property
    def offset(self) -> float:
        """Recent median residual; 0 before the baseline is known."""
        return median(self._recent) if self.ready and self._recent else 0.0

    @property
    def ready(self) -> bool:
        """Whether the baseline is known."""
        return self._started

    def observe(self, residual: float) -> bool:
        """Take one residual; returns whether the verdict changed."""
        residual = min(max(residual, -2.0), 2.0)
        self._recent.append(residual)
        if not self.ready:
            self._first.append(residual)
            self._start_if_known()
            return False
        deviation = min(max(residual - self._baseline, -_CLIP), _CLIP)
        sigma = math.sqrt(self._variance)
        slack = max(_SLACK, sigma / 2)
        threshold = max(_LEAST_THRESHOLD, _EXPONENT * self._variance / (2 * slack))
        self._above = max(0.0, self._above + deviation - slack)
        self._below = max(0.0, self._below - deviation - slack)
        if self.shift is None:
            return self._look_for_shift(deviation, threshold)
        return self._look_for_calm()

    def _start_if_known(self) -> None:
        """Set the baseline and the noise from the first residuals, once there are enough.

        The standard error of a median is 1.25 sigma over the root of the count.
        """
        count = len(self._first)
        if count < _BASELINE_COUNT:
            return
        middle = median(self._first)
        spread = 1.4826 * median(abs(r - middle) for r in self._first)
        sigma = min(max(spread, 0.02), _LARGEST_SIGMA)
        if count < min(_BASELINE_MOST, (1.25 * sigma / _BASELINE_ERROR) ** 2):
            return
        self._started = True
        self._baseline = min(max(middle, -_BASELINE_LIMIT), _BASELINE_LIMIT)
        self._variance = sigma**2

    def _look_for_shift(self, deviation: float, threshold: float) -> bool:
        if max(self._above, self._below) > threshold:
            self.shift = Shift(math.exp(median(list(self._recent)[-_RECENT // 2 :])))
            return True
        # Only calm residuals teach what noise is: those of a shift under way would hide it.
        if max(self._above, self._below) < threshold / 4:
            square = min(deviation**2, (3 * _LARGEST_SIGMA) ** 2)
            self._variance += _NOISE_WEIGHT * (square - self._variance)
            self._variance = min(max(self._variance, 0.02**2), _LARGEST_SIGMA**2)
        return False

    def _look_for_calm(self) -> bool:
        self.shift = Shift(math.exp(self.offset))
        if abs(self.offset - self._baseline) > _CALM or len(self._recent) < _RECENT:
            return False
        self.shift = None
        self._above = self._below = 0.0
        return True
