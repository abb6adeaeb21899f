"""The bodies that clients send: every field that is read, by its name in the OpenAI API or in vLLM's.

Types are as lenient as vLLM's own ("5" is 5, null is left out); names that nobody knows are ignored,
as there. Fields that are known and not supported are refused, each with its reason.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from dataplane.gateway.errors import HttpFault, fault_of_shape, refused

Body = TypeVar("Body", bound="SamplingBody")

PASSED_THROUGH = (
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "response_format",
    "structured_outputs",
    "vllm_xargs",
    "cache_salt",
    "priority",
)
"""Fields that go to both engines unread: whether they can be served, the engine says."""

REFUSED = {
    "suffix": "is not supported",
    "prompt_embeds": "are not supported: the hand-off is bound to token ids",
    "prompt_logprobs": "are not supported: the prompt is computed on another engine",
    "use_beam_search": "is not supported: beams cannot move between engines",
    "kv_transfer_params": "is the router's own",
    "ec_transfer_params": "is the router's own",
    "chat_template": "is not taken from requests: templates come with the model",
    "audio": "is not supported",
    "return_tokens_as_token_ids": "is not supported; ask for return_token_ids",
    "mm_processor_kwargs": "is not supported",
}
"""Refused where they are given and are neither null nor false."""


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(msgspec.Struct):
    """What both endpoints share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None


class CompletionBody(SamplingBody):
    """The body of /v1/completions."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(SamplingBody):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None


class TokenizeBody(msgspec.Struct):
    """The body of /tokenize: a text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


def read_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is.

    Raises:
        HttpFault: It is something else.
    """
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise HttpFault(400, f"the body is no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise HttpFault(400, "the body is no JSON object")
    return raw


def shaped(raw: Mapping[str, Any], kind: type[Body]) -> Body:
    """Return the fields that are read.

    Raises:
        HttpFault: A field has another type, or is not supported.
    """
    for field in REFUSED.keys() & raw.keys():
        if raw[field] not in (None, False, [], {}):
            raise refused(field, REFUSED[field])
    return convert(raw, kind)


Any_ = TypeVar("Any_")


def convert(raw: Mapping[str, Any], kind: type[Any_]) -> Any_:
    """Return an object's fields, as leniently as vLLM reads them.

    Raises:
        HttpFault: A field has another type.
    """
    try:
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError as error:
        raise fault_of_shape(error) from error
