"""Which points to measure: a coarse geometric grid, then where the fit is least certain a second.

Refinement is greedy A-optimal design with a price: each step takes the candidate that lowers the
summed relative variance of the constants most per second of engine time, then counts it as
measured. Rows are the logarithmic derivatives of the engine model, that is, the share of a
prediction that each constant makes; so "least certain" means in percent, of whatever size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from calibrator.models import FreeFloor, step_arrays
from calibrator.observations import StepShape, chunks_of, together
from calibrator.robust import Array
from enginemodel.model import EngineConstants, decode_step_seconds, handoff_seconds

STEADY_STEPS = 32
"""Steps of a decode probe in which its whole batch runs."""
_SHORTEST_TOKENS = 8
_SHORTEST_HANDOFF_TOKENS = 16
_FILL = 0.9
"""Share of the KV cache that probes use at most."""
_RIDGE = 1e-3
"""Information that is there before the first point, so that nothing divides by zero."""
_NEGLIGIBLE_SHARE = 0.05
"""A constant that makes up less of every prediction is priced as if it made up that much."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can hold, tokens and sequences."""

    max_model_tokens: int
    max_batched_tokens: int
    max_num_seqs: int
    kv_total_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Prompts of these lengths at once; several of them fit into one step."""

    prompt_tokens: tuple[int, ...]

    def steps(self, limits: Limits) -> tuple[StepShape, ...]:
        """Return the steps they should take."""
        if len(self.prompt_tokens) > 1:
            return (together(self.prompt_tokens),)
        return chunks_of(self.prompt_tokens[0], limits.max_batched_tokens)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Sequences of one context generating together."""

    sequences: int
    context_tokens: int
    output_tokens: int

    @property
    def kv_tokens(self) -> float:
        """KV tokens in the middle of the steady steps."""
        return self.sequences * (self.context_tokens + self.output_tokens - STEADY_STEPS / 2)


def geometric(first: int, last: int, factor: float) -> list[int]:
    """Return first, first x factor, … and last, each once, ascending."""
    count = max(math.ceil(math.log(max(last / first, 1.0)) / math.log(factor)), 1)
    return sorted({round(first * (last / first) ** (i / count)) for i in range(count + 1)})


def prefill_grid(limits: Limits, factor: float = 2.0) -> list[PrefillPoint]:
    """Return single prompts up to the model's limit, and prompts that share a step."""
    longest = min(limits.max_model_tokens - 1, int(limits.kv_total_tokens * _FILL))
    points = [PrefillPoint((n,)) for n in geometric(_SHORTEST_TOKENS, longest, factor)]
    for count in (2, 4, 8):
        most = min(limits.max_batched_tokens // count, longest)
        if count <= limits.max_num_seqs and most >= _SHORTEST_TOKENS:
            lengths = geometric(_SHORTEST_TOKENS, most, factor**2)
            points += [PrefillPoint((length,) * count) for length in lengths]
    return points


def decode_point(sequences: int, context_tokens: int, limits: Limits) -> DecodePoint | None:
    """Return the probe of a batch, long enough for steady steps; None where it does not fit."""
    prefill_steps = math.ceil(sequences * context_tokens / limits.max_batched_tokens)
    output_tokens = prefill_steps + 2 + STEADY_STEPS
    total_tokens = context_tokens + output_tokens
    fits = (
        0 < sequences <= limits.max_num_seqs
        and total_tokens <= limits.max_model_tokens
        and sequences * total_tokens <= limits.kv_total_tokens * _FILL
    )
    return DecodePoint(sequences, context_tokens, output_tokens) if fits else None


def decode_grid(limits: Limits, factor: float = 4.0) -> list[DecodePoint]:
    """Return batches by context, up to the slots, the model's limit and the KV cache."""
    longest = max(limits.max_model_tokens - STEADY_STEPS - 3, _SHORTEST_TOKENS)
    points: list[DecodePoint | None] = []
    for sequences in geometric(1, limits.max_num_seqs, factor):
        per_sequence = int(limits.kv_total_tokens * _FILL / sequences) - STEADY_STEPS - 3
        most = int(min(longest, per_sequence * 0.95))
        if most >= _SHORTEST_TOKENS:
            contexts = geometric(_SHORTEST_TOKENS, most, factor)
            points += [decode_point(sequences, context, limits) for context in contexts]
    return [point for point in points if point is not None]


def random_prefill(limits: Limits, rng: Random) -> PrefillPoint:
    """Return one prompt of log-uniform length: a held-out point."""
    longest = min(limits.max_model_tokens - 1, int(limits.kv_total_tokens * _FILL))
    return PrefillPoint((_log_uniform(_SHORTEST_TOKENS, longest, rng),))


def random_decode(limits: Limits, rng: Random) -> DecodePoint | None:
    """Return a batch of log-uniform size and context: a held-out point; None where none fits."""
    for _ in range(100):
        sequences = _log_uniform(1, limits.max_num_seqs, rng)
        context = _log_uniform(_SHORTEST_TOKENS, limits.max_model_tokens, rng)
        point = decode_point(sequences, context, limits)
        if point is not None:
            return point
    return None


def prefill_cost_seconds(constants: EngineConstants, point: PrefillPoint, limits: Limits) -> float:
    """Return what a probe takes."""
    return float(prefill_times(constants, [point.steps(limits)])[0])


def prefill_times(constants: EngineConstants, shapes: Sequence[Sequence[StepShape]]) -> Array:
    """Return the time of each sequence of prefill steps."""
    f, _ = FreeFloor(*step_arrays(shapes)).predict(_prefill_parameters(constants))
    return f


def decode_cost_seconds(constants: EngineConstants, point: DecodePoint, limits: Limits) -> float:
    """Return what a probe takes, the prefill of its prompts included."""
    alone = chunks_of(point.context_tokens, limits.max_batched_tokens)
    prefill = point.sequences * float(prefill_times(constants, [alone])[0])
    step = decode_step_seconds(constants, point.sequences, point.kv_tokens)
    return prefill + point.output_tokens * step


def prefill_rows(constants: EngineConstants, shapes: Sequence[Sequence[StepShape]]) -> Array:
    """Return the share that p1, p2, p3, p0 make of each prediction, shape (n, 4)."""
    parameters = _prefill_parameters(constants)
    f, rows = FreeFloor(*step_arrays(shapes)).predict(parameters)
    return _shares(parameters, rows / f[:, None])


def decode_rows(constants: EngineConstants, batches: Sequence[tuple[float, float]]) -> Array:
    """Return the share that d0, d1, d2 make of each (sequences, kv_tokens), shape (n, 3)."""
    parameters = np.array(
        [
            constants.d0_seconds,
            constants.d1_seconds_per_sequence,
            constants.d2_seconds_per_kv_token,
        ]
    )
    rows = np.array([[1.0, sequences, kv_tokens] for sequences, kv_tokens in batches])
    f = np.maximum(rows @ parameters, 1e-12)
    return _shares(parameters, rows / f[:, None])


def handoff_grid(limits: Limits, factor: float) -> list[int]:
    """Return prompt lengths to hand over, tokens."""
    longest = min(limits.max_model_tokens - 4, int(limits.kv_total_tokens * _FILL) - 4)
    first = min(_SHORTEST_HANDOFF_TOKENS, longest)
    return geometric(first, longest, factor)


def handoff_cost_seconds(
    constants: EngineConstants, prompt_tokens: int, kv_bytes_per_token: int, limits: Limits
) -> float:
    """Return what prefill, pull and the first steps of one prompt take."""
    alone = chunks_of(prompt_tokens, limits.max_batched_tokens)
    moved = handoff_seconds(constants, prompt_tokens, kv_bytes_per_token)
    step = decode_step_seconds(constants, 1, prompt_tokens)
    return float(prefill_times(constants, [alone])[0]) + moved + 2 * step


def handoff_rows(
    constants: EngineConstants, prompt_tokens: Sequence[int], kv_bytes_per_token: int
) -> Array:
    """Return the share that h0 and the transfer make of each pull's time, shape (n, 2)."""
    parameters = np.array([constants.h0_seconds, 1 / constants.handoff_bytes_per_second])
    rows = np.array([[1.0, float(tokens * kv_bytes_per_token)] for tokens in prompt_tokens])
    steps = np.array([decode_step_seconds(constants, 1, tokens) for tokens in prompt_tokens])
    f = np.maximum(rows @ parameters + steps, 1e-12)
    return _shares(parameters, rows / f[:, None])


def choose(measured: Array, candidates: Array, costs: Sequence[float], count: int) -> list[int]:
    """Pick the candidates to measure next.

    Args:
        measured: Rows of what was measured, shape (n, k).
        candidates: Rows of what could be, shape (c, k), c >= 1.
        costs: Seconds of each candidate, > 0.
        count: How many to pick; one may be picked again.

    Returns:
        Indices of candidates, in order of choice.
    """
    size = candidates.shape[1]
    inverse = np.linalg.inv(measured.T @ measured + _RIDGE * np.eye(size))
    price = np.asarray(costs, dtype=float)
    chosen: list[int] = []
    for _ in range(count):
        moved = candidates @ inverse
        gain = np.square(moved).sum(axis=1) / (1 + (moved * candidates).sum(axis=1))
        best = int(np.argmax(gain / price))
        chosen.append(best)
        row = moved[best]
        inverse = inverse - np.outer(row, row) / (1 + float(row @ candidates[best]))
    return chosen


def _shares(parameters: Array, relative: Array) -> Array:
    """Scale relative derivatives by the constants, or by what would just be seen of them."""
    largest = np.maximum(relative.max(axis=0), 1e-300)
    shares: Array = relative * np.maximum(parameters, _NEGLIGIBLE_SHARE / largest)
    return shares


def _prefill_parameters(constants: EngineConstants) -> Array:
    """Return p1, p2, p3, p0."""
    return np.array(
        [
            constants.p1_seconds,
            constants.p2_seconds_per_token,
            constants.p3_seconds_per_token_squared,
            constants.p0_seconds,
        ]
    )


def _log_uniform(low: int, high: int, rng: Random) -> int:
    """Return an integer whose logarithm is uniform."""
    return round(math.exp(rng.uniform(math.log(low), math.log(max(high, low)))))
