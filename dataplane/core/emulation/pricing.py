"""What a step of the emulated engine takes: the engine model, jitter and host stalls."""

import math
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from dataplane.core.emulation.values import BatchingConfig, Step
from enginemodel.model import EngineConstants, step_seconds


class StepClock:
    """Prices steps and adds the noise of a real machine, repeatable by its generator."""

    def __init__(self, config: BatchingConfig, rng: Random) -> None:
        self._config = config
        self._rng = rng

    def reprice(self, constants: EngineConstants) -> None:
        """Price by other constants from now on."""
        self._config = replace(self._config, constants=constants)

    def step(self, begin_seconds: float, parts: Iterable[tuple[int, int, bool]]) -> Step:
        """Price the step that begins now.

        Args:
            begin_seconds: When it begins.
            parts: (tokens, context tokens before them, is decoding) of each sequence in it.
        """
        chunks: list[tuple[int, int]] = []
        sequences = kv_tokens = 0
        for tokens, context_tokens, decoding in parts:
            if decoding:
                sequences += 1
                kv_tokens += context_tokens + 1
            else:
                chunks.append((tokens, context_tokens))
        seconds = step_seconds(self._config.constants, chunks, sequences, kv_tokens)
        return Step(
            begin_seconds=begin_seconds,
            duration_seconds=self._noisy(seconds),
            prefill_tokens=sum(tokens for tokens, _ in chunks),
            sequences=sequences,
            kv_tokens=kv_tokens,
        )

    def _noisy(self, seconds: float) -> float:
        """Apply jitter (mean 1) and, seldom, a stall."""
        sigma = self._config.jitter_sigma
        if sigma > 0:
            seconds *= math.exp(self._rng.gauss(0.0, sigma) - sigma * sigma / 2)
        if self._config.stall_probability > 0 and (
            self._rng.random() < self._config.stall_probability
        ):
            seconds += self._config.stall_seconds
        return seconds
