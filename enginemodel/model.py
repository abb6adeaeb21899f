"""The engine model: seconds that prefill steps, decode steps and hand-offs take.

Forms after DistServe's estimators (linear in tokens, quadratic in attention; decode affine in
batch and KV) with a floor for short prefill steps. Constants come from calibration or from the
reference profiles beside this module.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

NOTICE_SHARE = 0.1
"""When in a step a decode engine looks for finished pulls, as a share of the step.

vLLM looks when the step's forward pass has been launched, not when it has run: early, on a GPU as
on paced engines (docs/engine-findings.md). So a pull shorter than a step, begun with one step, is seen in the next and
runs in the third.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConstants:
    """Cost constants of one engine profile; all non-negative, finite.

    Attributes:
        p0_seconds: Shortest prefill step.
        p1_seconds: Fixed part of a prefill step.
        p2_seconds_per_token: Linear part per prompt token.
        p3_seconds_per_token_squared: Quadratic part, attention.
        d0_seconds: Fixed part of a decode step.
        d1_seconds_per_sequence: Per sequence in the batch.
        d2_seconds_per_kv_token: Per KV token in the batch.
        h0_seconds: Fixed part of a hand-off.
        handoff_bytes_per_second: Speed of the KV link; > 0.
    """

    p0_seconds: float
    p1_seconds: float
    p2_seconds_per_token: float
    p3_seconds_per_token_squared: float
    d0_seconds: float
    d1_seconds_per_sequence: float
    d2_seconds_per_kv_token: float
    h0_seconds: float
    handoff_bytes_per_second: float

    def slowed(self, factor: float) -> "EngineConstants":
        """Return the constants of an engine that takes `factor` times as long for every step."""
        return replace(
            self,
            p0_seconds=self.p0_seconds * factor,
            p1_seconds=self.p1_seconds * factor,
            p2_seconds_per_token=self.p2_seconds_per_token * factor,
            p3_seconds_per_token_squared=self.p3_seconds_per_token_squared * factor,
            d0_seconds=self.d0_seconds * factor,
            d1_seconds_per_sequence=self.d1_seconds_per_sequence * factor,
            d2_seconds_per_kv_token=self.d2_seconds_per_kv_token * factor,
        )


def prefill_step_seconds(constants: EngineConstants, tokens: int, context_tokens: int = 0) -> float:
    """Return the time of a step that prefills `tokens` after `context_tokens` of the same prompt.

    max(p0, p1 + p2 T) + p3 ((s + T)^2 - s^2).
    """
    linear = constants.p1_seconds + constants.p2_seconds_per_token * tokens
    return max(constants.p0_seconds, linear) + attention_seconds(constants, tokens, context_tokens)


def attention_seconds(constants: EngineConstants, tokens: int, context_tokens: int = 0) -> float:
    """Return the quadratic part alone; a step of several prompts sums it over its chunks."""
    return constants.p3_seconds_per_token_squared * tokens * (tokens + 2 * context_tokens)


def prefill_seconds(constants: EngineConstants, prompt_tokens: int, chunk_tokens: int) -> float:
    """Return the time to prefill one prompt alone, in steps of at most `chunk_tokens`."""
    seconds = 0.0
    done = 0
    while done < prompt_tokens:
        tokens = min(chunk_tokens, prompt_tokens - done)
        seconds += prefill_step_seconds(constants, tokens, done)
        done += tokens
    return seconds


def prefill_work_seconds(constants: EngineConstants, prompt_tokens: int) -> float:
    """Return what a prompt adds to a step that others share: no floor, no fixed part."""
    return prompt_tokens * (
        constants.p2_seconds_per_token + constants.p3_seconds_per_token_squared * prompt_tokens
    )


def decode_step_seconds(constants: EngineConstants, sequences: float, kv_tokens: float) -> float:
    """Return the time of a decode step: d0 + d1 B + d2 KV."""
    return (
        constants.d0_seconds
        + constants.d1_seconds_per_sequence * sequences
        + constants.d2_seconds_per_kv_token * kv_tokens
    )


def step_seconds(
    constants: EngineConstants, chunks: Iterable[tuple[int, int]], sequences: int, kv_tokens: int
) -> float:
    """Return the time of a step that prefills `chunks` and decodes `sequences`.

    A pure prefill step costs max(p0, p1 + p2·ΣT) + p3·Σ((s+T)² - s²), a pure decode step
    d0 + d1·B + d2·KV. In a mixed step prompt tokens ride along with the decode step: they add
    p2·ΣT and their attention, no fixed part.

    Args:
        constants: Of the engine.
        chunks: (tokens, context tokens before them) of each prompt in the step.
        sequences: Sequences that decode.
        kv_tokens: Their context.
    """
    prefill_tokens, attention = 0, 0.0
    for tokens, context_tokens in chunks:
        prefill_tokens += tokens
        attention += attention_seconds(constants, tokens, context_tokens)
    linear = constants.p2_seconds_per_token * prefill_tokens
    if sequences:
        return decode_step_seconds(constants, sequences, kv_tokens) + linear + attention
    return max(constants.p0_seconds, constants.p1_seconds + linear) + attention


def handoff_seconds(constants: EngineConstants, tokens: int, kv_bytes_per_token: int) -> float:
    """Return the time to move the KV of `tokens`: h0 + bytes / bandwidth.

    The decode engine notices it only within a step and runs it in the step after; that is not in
    here.
    """
    return constants.h0_seconds + tokens * kv_bytes_per_token / constants.handoff_bytes_per_second
