"""Step-time noise of one engine, in a form that lets many steps be summed at once."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from simulator.values import Noise

BLOCK_STEPS = 2048


class StepNoise:
    """Jitter factors and stalls of the next BLOCK_STEPS steps, as prefix sums.

    Step n of a block takes `seconds * j[n] + s[n]`. With J[n] the sum of j below n, N[n] the sum of
    m j[m] below n and S[n] the sum of s below n, k steps from n on that get longer by `b` each take

        (a - b n) (J[n+k] - J[n]) + b (N[n+k] - N[n]) + S[n+k] - S[n]

    which is how a decode engine jumps over steps whose batch does not change.

    Attributes:
        factors: J, BLOCK_STEPS + 1 numbers.
        weighted: N, likewise.
        stalls: S, likewise.
    """

    __slots__ = ("_noise", "_random", "factors", "stalls", "weighted")

    def __init__(self, noise: Noise, random: np.random.Generator) -> None:
        self._noise = noise
        self._random = random
        self.factors: list[float] = []
        self.weighted: list[float] = []
        self.stalls: list[float] = []
        self.renew()

    def renew(self) -> None:
        """Draw the next block."""
        sigma = self._noise.jitter_sigma
        draw = np.ones(BLOCK_STEPS)
        if sigma > 0.0:
            draw = np.exp(self._random.normal(-sigma * sigma / 2.0, sigma, BLOCK_STEPS))
        stall = np.zeros(BLOCK_STEPS)
        if self._noise.stall_probability > 0.0:
            low, high = self._noise.stall_seconds
            hit = self._random.random(BLOCK_STEPS) < self._noise.stall_probability
            stall = np.where(hit, self._random.uniform(low, high, BLOCK_STEPS), 0.0)
        self.factors = _prefix(draw)
        self.weighted = _prefix(draw * np.arange(BLOCK_STEPS))
        self.stalls = _prefix(stall)


def single_steps(noise: StepNoise) -> Iterator[tuple[float, float]]:
    """Yield (factor, stall seconds) step by step, for an engine whose steps all differ."""
    while True:
        factors, stalls = noise.factors, noise.stalls
        for n in range(BLOCK_STEPS):
            yield factors[n + 1] - factors[n], stalls[n + 1] - stalls[n]
        noise.renew()


def _prefix(values: npt.NDArray[np.float64]) -> list[float]:
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return list(sums.tolist())
