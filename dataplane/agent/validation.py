"""What a job must satisfy before an engine sees it; each broken rule names its field and limit."""

import math

import msgspec

from dataplane.agent.engine import DecodeJob, EngineDescription, PrefillJob, Sampling
from servicekit.errors import InvalidArgument


def check_prefill(job: PrefillJob, engine: EngineDescription) -> None:
    """Check a prompt against its engine.

    Raises:
        InvalidArgument: with the field.
    """
    _check_prompt(job.prompt, engine)
    if len(job.prompt) + 1 > engine.max_model_tokens:
        raise InvalidArgument.of(
            "prompt_token_ids",
            f"{len(job.prompt)} tokens and one more exceed the model's {engine.max_model_tokens}",
        )


def check_decode(job: DecodeJob, engine: EngineDescription) -> None:
    """Check a generation against its engine.

    Raises:
        InvalidArgument: with the field.
    """
    _check_prompt(job.prompt, engine)
    if job.max_tokens < 1:
        raise InvalidArgument.of("max_tokens", f"{job.max_tokens} is less than 1")
    if len(job.prompt) + job.max_tokens > engine.max_model_tokens:
        raise InvalidArgument.of(
            "max_tokens",
            f"{len(job.prompt)} prompt tokens and {job.max_tokens} more exceed the model's "
            f"{engine.max_model_tokens}",
        )
    min_tokens = job.sampling.min_tokens
    if min_tokens is not None and min_tokens > job.max_tokens:
        raise InvalidArgument.of(
            "sampling.min_tokens", f"{min_tokens} exceeds max_tokens, {job.max_tokens}"
        )
    check_sampling(job.sampling)


def check_sampling(sampling: Sampling) -> None:
    """Check the ranges of sampling parameters.

    Raises:
        InvalidArgument: with the field.
    """
    _check_range("temperature", sampling.temperature, 0.0, math.inf)
    _check_range("top_p", sampling.top_p, 0.0, 1.0, open_low=True)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf, open_low=True)
    if sampling.top_k is not None and sampling.top_k < 1 and sampling.top_k != -1:
        raise InvalidArgument.of("sampling.top_k", f"{sampling.top_k} is neither -1 nor >= 1")
    if any(not stop for stop in sampling.stop):
        raise InvalidArgument.of("sampling.stop", "a stop string is empty")
    extra_parameters(sampling)


def extra_parameters(sampling: Sampling) -> dict[str, object]:
    """Return `extra_json` as an object; empty where it is not set.

    Raises:
        InvalidArgument: it is no JSON object.
    """
    if not sampling.extra_json:
        return {}
    try:
        return msgspec.json.decode(sampling.extra_json, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise InvalidArgument.of("sampling.extra_json", f"no JSON object: {error}") from error


def _check_prompt(prompt: object, engine: EngineDescription) -> None:
    assert isinstance(prompt, list | tuple)
    if not prompt:
        raise InvalidArgument.of("prompt_token_ids", "is empty")
    largest = max(prompt)
    if engine.vocab_size and largest >= engine.vocab_size:
        raise InvalidArgument.of(
            "prompt_token_ids", f"{largest} is outside a vocabulary of {engine.vocab_size}"
        )


def _check_range(
    name: str, value: float | None, low: float, high: float, *, open_low: bool = False
) -> None:
    if value is None:
        return
    bracket = "(" if open_low else "["
    too_low = value <= low if open_low else value < low
    if not math.isfinite(value) or too_low or value > high:
        raise InvalidArgument.of(
            f"sampling.{name}", f"{value} is outside {bracket}{low:g}, {high:g}]"
        )
