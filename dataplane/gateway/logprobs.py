"""Log probabilities in the two shapes of the OpenAI API.

Tokens have the names that the engine gave them. Alternatives of equal text are one entry, as in its own
/v1/completions: with vocabularies of bytes, parts of characters have no text and share the empty one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from steelyard.v1 import types_pb2

_LEAST_LOGPROB = -9999.0


def completion_logprobs(
    entries: Sequence[types_pb2.TokenLogprob], wanted: int, offset: int
) -> tuple[dict[str, Any], int]:
    """Return the object of /v1/completions, and where the next token's text begins.

    Args:
        entries: One a token.
        wanted: Alternatives beside the chosen one.
        offset: Where the first token's text begins in the choice's text.
    """
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return (
        {
            "text_offset": offsets,
            "token_logprobs": [entry.logprob for entry in entries],
            "tokens": [entry.token for entry in entries],
            "top_logprobs": [dict(_ranked(entry)[: wanted + 1]) for entry in entries],
        },
        offset,
    )


def chat_logprobs(entries: Iterable[types_pb2.TokenLogprob], wanted: int) -> dict[str, Any]:
    """Return the object of /v1/chat/completions."""
    content = []
    for entry in entries:
        row = _chat_row(entry.token, entry.logprob)
        ranked = [(entry.token, entry.logprob), *_ranked(entry)[1:]]
        row["top_logprobs"] = [_chat_row(*top) for top in ranked[:wanted]]
        content.append(row)
    return {"content": content}


def _ranked(entry: types_pb2.TokenLogprob) -> list[tuple[str, float]]:
    """Return the chosen token, then the others, most probable first, as vLLM lists them."""
    found = {top.token: top.logprob for top in entry.top}
    first = found.pop(entry.token, entry.logprob)
    return [(entry.token, first), *found.items()]


def _chat_row(token: str, logprob: float) -> dict[str, Any]:
    return {
        "token": token,
        "logprob": max(logprob, _LEAST_LOGPROB),
        "bytes": list(token.encode("utf-8", errors="replace")),
    }
