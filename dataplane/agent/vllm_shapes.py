"""JSON of vLLM's OpenAI server: what is sent, what is read, and nothing else of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dataplane.agent.engine import (
    Alternative,
    DecodeJob,
    Finish,
    Logprob,
    PrefillJob,
    Sampling,
    TokenUsage,
)
from dataplane.agent.validation import extra_parameters
from servicekit.errors import InvalidArgument

RESERVED = frozenset(
    [
        "model",
        "prompt",
        "max_tokens",
        "stream",
        "stream_options",
        "kv_transfer_params",
        "return_token_ids",
        "echo",
        "n",
        "best_of",
        "suffix",
        "request_id",
        "return_tokens_as_token_ids",
        "logprobs",
        "prompt_logprobs",
    ]
)
"""Fields that `extra_json` must not set: the agent lives by them."""

REFUSED_MAX_TOKENS = 1 << 30
"""More than any model has: vLLM refuses the request, and tells the prefill engine so."""

_PREFILL_KV_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt came from."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None

    def value(self) -> TokenUsage:
        """Return it as the seam has it."""
        details = self.prompt_tokens_details
        cached = details.cached_tokens if details else None
        return TokenUsage(self.prompt_tokens, self.completion_tokens or 0, cached or 0)


class ChoiceLogprobs(msgspec.Struct):
    """Log probabilities, one entry a token in each list."""

    token_logprobs: list[float | None]
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    """One completion, or a piece of it."""

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChoiceLogprobs | None = None


class StreamError(msgspec.Struct):
    """What an error says."""

    message: str = ""
    type: str = ""
    param: str | None = None
    code: int | str | None = None


class StreamEvent(msgspec.Struct):
    """One `data:` line of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: StreamError | None = None


class PrefillAnswer(msgspec.Struct):
    """The answer to a prefill leg; its hand-off is kept as the bytes that came."""

    choices: list[Choice]
    usage: Usage
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class HandoffFields(msgspec.Struct):
    """The part of a hand-off that is checked before an engine sees it."""

    remote_engine_id: str = ""
    remote_num_tokens: int | None = None
    remote_block_ids: list[list[int]] | None = None


class ErrorAnswer(msgspec.Struct):
    """The body of a refusal."""

    error: StreamError


_HANDOFF = msgspec.json.Decoder(HandoffFields)


def prefill_body(job: PrefillJob, model: str) -> bytes:
    """Make the prefill leg: one token, nothing streamed (a streamed leg loses the hand-off).

    Raises:
        InvalidArgument: extra_json sets a reserved field.
    """
    body: dict[str, Any] = _extra(job.sampling)
    body |= {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": False,
        "kv_transfer_params": _PREFILL_KV_PARAMS,
    }
    return msgspec.json.encode(body)


def decode_body(job: DecodeJob, model: str) -> bytes:
    """Make a streamed generation; the hand-off goes in as the bytes that the prefill engine gave.

    Raises:
        InvalidArgument: extra_json sets a reserved field.
    """
    body: dict[str, Any] = _extra(job.sampling)
    body |= _sampling(job.sampling)
    body |= {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if job.sampling.logprobs is not None:
        body["logprobs"] = job.sampling.logprobs
        # Texts of alternatives may collide; ids do not, but say nothing to who wants text.
        body["return_tokens_as_token_ids"] = not job.want_text
    if job.engine_params is not None:
        body["kv_transfer_params"] = msgspec.Raw(job.engine_params)
    return msgspec.json.encode(body)


def refused_body(engine_params: bytes, model: str, token_id: int) -> bytes:
    """Make a request that vLLM refuses, which makes it tell the prefill engine to free the KV."""
    body = {
        "model": model,
        "prompt": [token_id],
        "max_tokens": REFUSED_MAX_TOKENS,
        "kv_transfer_params": msgspec.Raw(engine_params),
    }
    return msgspec.json.encode(body)


def nudge_body(model: str, token_id: int) -> bytes:
    """Make the smallest ordinary request: an idle engine sends its notifications with a step."""
    return msgspec.json.encode({"model": model, "prompt": [token_id], "max_tokens": 1})


def handoff_fields(engine_params: bytes) -> HandoffFields:
    """Read what is checked of a hand-off.

    Raises:
        InvalidArgument: it is no JSON object of that kind.
    """
    try:
        return _HANDOFF.decode(engine_params)
    except msgspec.DecodeError as error:
        raise InvalidArgument.of("handoff.engine_params", f"unreadable: {error}") from error


def finish_of(reason: str) -> Finish:
    """Translate a finish reason; unknown ones count as aborted."""
    return {"stop": Finish.STOP, "length": Finish.LENGTH}.get(reason, Finish.ABORT)


def logprobs_of(logprobs: ChoiceLogprobs, token_ids: Sequence[int]) -> list[Logprob]:
    """Translate log probabilities; one that vLLM leaves out counts as impossible."""
    tops = logprobs.top_logprobs or [None] * len(token_ids)
    names = logprobs.tokens or [""] * len(token_ids)
    return [
        Logprob(token_id, _finite(logprob), _alternatives(top or {}), name)
        for token_id, logprob, top, name in zip(
            token_ids, logprobs.token_logprobs, tops, names, strict=False
        )
    ]


def _alternatives(top: Mapping[str, float]) -> list[Alternative]:
    ordered = sorted(top.items(), key=lambda item: -item[1])
    return [Alternative(token, logprob) for token, logprob in ordered]


def _finite(logprob: float | None) -> float:
    return -9999.0 if logprob is None else logprob


def _extra(sampling: Sampling) -> dict[str, Any]:
    extra = extra_parameters(sampling)
    taken = sorted(RESERVED & extra.keys())
    if taken:
        raise InvalidArgument.of(
            "sampling.extra_json", f"sets {', '.join(taken)}, which is reserved"
        )
    return dict(extra)


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """Return the parameters that are set, by vLLM's names, which are ours."""
    names = (
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "seed", "min_tokens",
    )  # fmt: skip
    body = {name: value for name in names if (value := getattr(sampling, name)) is not None}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    return body
