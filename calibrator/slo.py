"""SLO targets from what an unloaded cluster takes: tight is a multiple of it, loose one of tight.

The paper's targets follow this rule: 39.7 ms a token are three times the 13.2 ms of a lightly
loaded engine, and loose is three times tight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from calibrator.design import prefill_times
from calibrator.observations import chunks_of
from enginemodel.model import EngineConstants, decode_step_seconds, handoff_seconds

TIGHT_FACTOR = 3.0
LOOSE_FACTOR = 3.0
LIGHT_PROMPT_TOKENS = 512
"""Prompt that the light load consists of."""
LIGHT_SEQUENCES = 8
"""Batch at light load; on the reference engine that makes 12.5 ms a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightLoad:
    """What one unloaded pool takes.

    Attributes:
        ttft_seconds: Prefill, hand-off and first decode step of the light prompt.
        tpot_seconds: One step of the light batch.
        ttft_base_seconds: The part of TTFT that a longer prompt does not change.
        ttft_seconds_per_token: What each prompt token adds, up to the light prompt's length.
    """

    ttft_seconds: float
    tpot_seconds: float
    ttft_base_seconds: float
    ttft_seconds_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTargets:
    """Targets of one class, in two forms.

    Attributes:
        ttft_seconds: One TTFT for all prompts.
        tpot_seconds: Per token after the first.
        ttft_base_seconds: Second form: TTFT of a prompt of L tokens is base + per_token * L.
        ttft_seconds_per_token: Of the second form.
    """

    ttft_seconds: float
    tpot_seconds: float
    ttft_base_seconds: float
    ttft_seconds_per_token: float

    def ttft_for(self, prompt_tokens: int) -> float:
        """Return the length-scaled TTFT target of a prompt, seconds."""
        return self.ttft_base_seconds + self.ttft_seconds_per_token * prompt_tokens

    def times(self, factor: float) -> "ClassTargets":
        """Return targets `factor` times as wide."""
        return ClassTargets(
            ttft_seconds=self.ttft_seconds * factor,
            tpot_seconds=self.tpot_seconds * factor,
            ttft_base_seconds=self.ttft_base_seconds * factor,
            ttft_seconds_per_token=self.ttft_seconds_per_token * factor,
        )


def light_load(
    prefill: EngineConstants,
    decode: EngineConstants,
    *,
    kv_bytes_per_token: int,
    chunk_tokens: int,
    prompt_tokens: int = LIGHT_PROMPT_TOKENS,
) -> LightLoad:
    """Return what an unloaded pair takes.

    Args:
        prefill: Constants of the prefill engines.
        decode: Constants of the decode engines, hand-off included.
        kv_bytes_per_token: Of the decode engines.
        chunk_tokens: Prompt tokens a prefill step can hold.
        prompt_tokens: The light prompt.
    """

    def ttft(tokens: int) -> float:
        steps = chunks_of(tokens, chunk_tokens)
        first = decode_step_seconds(decode, 1, tokens)
        moved = handoff_seconds(decode, tokens, kv_bytes_per_token)
        return float(prefill_times(prefill, [steps])[0]) + moved + first

    whole = ttft(prompt_tokens)
    shortest = ttft(1)
    slope = (whole - shortest) / max(prompt_tokens - 1, 1)
    batch_kv_tokens = LIGHT_SEQUENCES * prompt_tokens
    return LightLoad(
        ttft_seconds=whole,
        tpot_seconds=decode_step_seconds(decode, LIGHT_SEQUENCES, batch_kv_tokens),
        ttft_base_seconds=shortest,
        ttft_seconds_per_token=slope,
    )


def targets(
    pools: Sequence[LightLoad],
    *,
    tight_factor: float = TIGHT_FACTOR,
    loose_factor: float = LOOSE_FACTOR,
) -> dict[str, ClassTargets]:
    """Return the targets of both classes, wide enough for the slowest pool.

    Args:
        pools: Light load of each pool, at least one.
        tight_factor: Tight as a multiple of light load, > 1.
        loose_factor: Loose as a multiple of tight, >= 1.
    """
    slowest = ClassTargets(
        ttft_seconds=max(pool.ttft_seconds for pool in pools),
        tpot_seconds=max(pool.tpot_seconds for pool in pools),
        ttft_base_seconds=max(pool.ttft_base_seconds for pool in pools),
        ttft_seconds_per_token=max(pool.ttft_seconds_per_token for pool in pools),
    )
    tight = slowest.times(tight_factor)
    return {"tight": tight, "loose": tight.times(loose_factor)}
