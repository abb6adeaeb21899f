"""Recursive least squares with forgetting, on relative error: what live traffic makes of constants.

theta are multipliers of the published constants, 1 at the start. An observation is the row of shares
that each constant makes of a prediction, and observed over predicted time:
K = P x / (lambda + x' P x), theta += K (y - x' theta), P = (P - K x' P) / lambda.
Innovations are clipped, so that a stall moves little; the trace of P is bounded, so that traffic
which says nothing of a constant does not wind its uncertainty up; theta stays positive.
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_FORGETTING = 0.998
_CLIP = 0.25
_PRIOR_VARIANCE = 0.1
_LEAST, _MOST = 0.2, 5.0


class Recursion:
    """Multipliers of some constants."""

    def __init__(self, size: int) -> None:
        self.theta: Array = np.ones(size)
        self._covariance: Array = _PRIOR_VARIANCE * np.eye(size)
        self.count = 0

    def __repr__(self) -> str:
        """Show the multipliers."""
        return f"Recursion(theta={np.round(self.theta, 3).tolist()}, count={self.count})"

    def observe(self, shares: Array, ratio: float) -> None:
        """Take one observation.

        Args:
            shares: Share that each constant makes of the prediction, sums to 1.
            ratio: Observed over predicted time.
        """
        moved = self._covariance @ shares
        gain = moved / (_FORGETTING + float(shares @ moved))
        innovation = ratio - float(shares @ self.theta)
        self.theta = np.clip(self.theta + gain * min(max(innovation, -_CLIP), _CLIP), _LEAST, _MOST)
        covariance = (self._covariance - np.outer(gain, moved)) / _FORGETTING
        limit = _PRIOR_VARIANCE * len(shares)
        trace = float(np.trace(covariance))
        self._covariance = covariance * min(1.0, limit / trace)
        self.count += 1
