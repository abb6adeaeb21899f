"""What probes saw, in the shape that the fit takes: one row an observation, noise already thinned.

A prefill observation is one engine step, or the steps of one long prompt; a decode observation is
the middle of one probe's steady steps; a hand-off observation is one pull on an idle engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SAME_STEP, _OWN_STEP = 0.25, 0.75
"""Shares of the shortest step: completions closer than the first ended one step, later than the
second each its own; what lies between tells nothing."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one prefill step computes.

    Attributes:
        tokens: Prompt tokens, over all prompts in it.
        attention_tokens_squared: Sum of (s + T)^2 - s^2 over its chunks of T tokens after s.
    """

    tokens: int
    attention_tokens_squared: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillObservation:
    """Time of consecutive prefill steps on one instance; seconds > 0.

    `called` is false for the gap between two steps, which holds no call's own time: what agent,
    HTTP server and scheduling add around a prompt that runs alone.
    """

    instance_id: str
    steps: tuple[StepShape, ...]
    seconds: float
    held_out: bool = False
    called: bool = True

    @property
    def calls_missing(self) -> int:
        """How many of its steps have no call of their own around them."""
        return len(self.steps) - self.called

    @property
    def tokens(self) -> int:
        """Prompt tokens over all its steps."""
        return sum(step.tokens for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeObservation:
    """Typical time of a decode step at one batch; seconds > 0."""

    instance_id: str
    sequences: float
    kv_tokens: float
    seconds: float
    steps: int = 1
    held_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffObservation:
    """Time from a pull's arrival at an idle decode engine to its first token; seconds > 0."""

    prefill_instance_id: str
    decode_instance_id: str
    prompt_tokens: int
    seconds: float
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class StepSeen:
    """One decode step as a probe reports it.

    Attributes:
        seconds: Its length.
        sequences: Sequences that got a token in it.
        kv_tokens: KV tokens they held.
        unsteady: A sequence joined or left in it.
    """

    seconds: float
    sequences: int
    kv_tokens: int
    unsteady: bool


def steady_middle(
    instance_id: str, steps: Sequence[StepSeen], sequences: int, *, held_out: bool
) -> DecodeObservation | None:
    """Return the typical step of a probe: its whole batch runs, nobody joins or leaves.

    The first steps of the full batch are left out too: engines compile or allocate in them.

    Returns:
        None where fewer than four steps are left.
    """
    steady = [s for s in steps if s.sequences == sequences and not s.unsteady and s.seconds > 0]
    steady = steady[2:] if len(steady) > 8 else steady
    if len(steady) < 4:
        return None
    return DecodeObservation(
        instance_id=instance_id,
        sequences=float(sequences),
        kv_tokens=float(np.mean([step.kv_tokens for step in steady])),
        seconds=middle_mean([step.seconds for step in steady]),
        steps=len(steady),
        held_out=held_out,
    )


def chunks_of(prompt_tokens: int, chunk_tokens: int) -> tuple[StepShape, ...]:
    """Return the steps in which an engine prefills one prompt alone.

    Args:
        prompt_tokens: > 0.
        chunk_tokens: Prompt tokens a step can hold, > 0.
    """
    steps: list[StepShape] = []
    done = 0
    while done < prompt_tokens:
        tokens = min(chunk_tokens, prompt_tokens - done)
        steps.append(StepShape(tokens, float(tokens * (tokens + 2 * done))))
        done += tokens
    return tuple(steps)


def together(prompt_tokens: Sequence[int]) -> StepShape:
    """Return the one step that holds all of several prompts."""
    return StepShape(sum(prompt_tokens), float(sum(tokens * tokens for tokens in prompt_tokens)))


def split_into_steps(
    prompt_tokens: Sequence[int], seconds: Sequence[float], shortest_step_seconds: float
) -> list[tuple[StepShape, float]]:
    """Tell from completion times which prompts, sent at once, shared a step.

    No step is shorter than a prompt alone at its shortest, but for what a call costs: completions
    much closer than that ended the same step, and the first of them tells when: answers come one
    by one. Of the first step the whole time counts, of later ones the gap.

    Args:
        prompt_tokens: Length of each prompt; together they fit into one step.
        seconds: From sending to completion, one entry a prompt.
        shortest_step_seconds: Shortest time seen for any prompt alone on this engine.

    Returns:
        (what ran in the step, its seconds) in order of time; nothing where completions are smeared,
        so that steps cannot be told apart.
    """
    order = np.argsort(np.asarray(seconds), kind="stable")
    groups: list[list[int]] = []
    last = -np.inf
    for index in order:
        if not groups or seconds[index] - last > _SAME_STEP * shortest_step_seconds:
            groups.append([])
        groups[-1].append(int(index))
        last = seconds[index]
    steps: list[tuple[StepShape, float]] = []
    before = 0.0
    for group in groups:
        begin, end = min(seconds[i] for i in group), max(seconds[i] for i in group)
        smeared = end - begin > _SAME_STEP * shortest_step_seconds
        if smeared or begin - before < _OWN_STEP * shortest_step_seconds:
            return []
        steps.append((together([prompt_tokens[index] for index in group]), begin - before))
        before = begin
    return steps


def middle_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half: as steady as a median against stalls, less noisy.

    Args:
        values: At least one.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())
