"""From a body to how the engines sample, with the ranges that vLLM keeps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from steelyard.v1 import types_pb2

from dataplane.gateway.bodies import PASSED_THROUGH, SamplingBody
from dataplane.gateway.errors import refused

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 4
MAX_CHOICES = 128
MAX_GENERATIONS = 1024
"""Of one HTTP request: its prompts times its choices."""
_FIELDS = (
    # name, least, most, least itself is allowed
    ("temperature", 0.0, 2.0, True),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, True),
    ("presence_penalty", -2.0, 2.0, True),
    ("frequency_penalty", -2.0, 2.0, True),
    ("repetition_penalty", 0.0, math.inf, False),
)


def sampling_params(
    body: SamplingBody, raw: Mapping[str, Any], logprobs: int | None
) -> types_pb2.SamplingParams:
    """Return how to sample.

    Args:
        body: Its fields, typed.
        raw: The object it came as, for what is passed through.
        logprobs: Alternatives a token to report; None for no log probabilities.

    Raises:
        HttpFault: A field is out of its range; names it.
    """
    sampling = types_pb2.SamplingParams(
        stop=stop_strings(body),
        stop_token_ids=_token_ids(body.stop_token_ids),
        ignore_eos=bool(body.ignore_eos),
    )
    for name, least, most, inclusive in _FIELDS:
        value = getattr(body, name)
        if value is not None:
            _check_range(name, value, least, most, inclusive=inclusive)
            setattr(sampling, name, value)
    _set_integers(sampling, body)
    if logprobs is not None:
        sampling.logprobs = checked_logprobs(logprobs)
    extra = {name: raw[name] for name in PASSED_THROUGH if raw.get(name) is not None}
    if extra:
        sampling.extra_json = msgspec.json.encode(extra).decode()
    return sampling


def choices_of(body: SamplingBody) -> int:
    """Return how many continuations of each prompt are wanted.

    Raises:
        HttpFault: Not a number of continuations, or several of a greedy one.
    """
    count = 1 if body.n is None else body.n
    if not 1 <= count <= MAX_CHOICES:
        raise refused("n", f"must be at least 1 and at most {MAX_CHOICES}, got {count}")
    if count > 1 and body.temperature is not None and body.temperature < 1e-5:
        raise refused("n", f"must be 1 when using greedy sampling, got {count}")
    return count


def check_generations(prompts: int, choices: int) -> None:
    """Refuse a request that would run too many at once.

    Raises:
        HttpFault: It names `n`.
    """
    if prompts * choices > MAX_GENERATIONS:
        raise refused(
            "n",
            f"makes {prompts * choices} generations of {prompts} prompts; "
            f"at most {MAX_GENERATIONS} run in one request",
        )


def stop_strings(body: SamplingBody) -> Sequence[str]:
    """Return the stop strings.

    Raises:
        HttpFault: One is empty, or there are too many.
    """
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stop):
        raise refused("stop", "cannot contain an empty string")
    if len(stop) > MAX_STOP_STRINGS:
        raise refused("stop", f"has {len(stop)} strings; at most {MAX_STOP_STRINGS} are taken")
    return stop


def check_stream_options(body: SamplingBody) -> None:
    """Refuse options of a stream where none is asked for.

    Raises:
        HttpFault: As vLLM does.
    """
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "can only be defined when `stream=True`")


def checked_logprobs(count: int) -> int:
    """Return a number of alternatives that engines report.

    Raises:
        HttpFault: It is negative or above their limit.
    """
    if not 0 <= count <= MAX_LOGPROBS:
        raise refused("logprobs", f"must be at least 0 and at most {MAX_LOGPROBS}, got {count}")
    return count


def _set_integers(sampling: types_pb2.SamplingParams, body: SamplingBody) -> None:
    if body.top_k is not None:
        if body.top_k < -1:
            raise refused("top_k", f"must be 0 (disable), or at least 1, got {body.top_k}")
        sampling.top_k = body.top_k or -1
    if body.seed is not None:
        if not -(1 << 63) <= body.seed < 1 << 63:
            raise refused("seed", "does not fit into 64 bits")
        sampling.seed = body.seed
    if body.min_tokens is not None:
        if not 0 <= body.min_tokens < 1 << 32:
            raise refused("min_tokens", f"must be at least 0, got {body.min_tokens}")
        if body.min_tokens:
            sampling.min_tokens = body.min_tokens


def _check_range(name: str, value: float, least: float, most: float, *, inclusive: bool) -> None:
    above = value >= least if inclusive else value > least
    if not (above and value <= most and math.isfinite(value)):
        bracket = "[" if inclusive else "("
        upper = "inf)" if math.isinf(most) else f"{most:g}]"
        raise refused(name, f"must be in {bracket}{least:g}, {upper}, got {value}")


def _token_ids(ids: Sequence[int] | None) -> Sequence[int]:
    if ids and not all(0 <= token_id < 1 << 32 for token_id in ids):
        raise refused("stop_token_ids", "has an id outside any vocabulary")
    return ids or ()
