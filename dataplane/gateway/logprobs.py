"""Log probabilities in the two shapes of the OpenAI API.

The engine names tokens as text; of the chosen one we carry its id and its log probability, and its
text is that of the reported token with the same log probability, or else what its id decodes to.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from steelyard.v1 import types_pb2


class DecodesTokens(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode_token(self, token_id: int) -> str:
        """Return one token's text."""
        ...


def token_text(entry: types_pb2.TokenLogprob, tokens: DecodesTokens | None) -> str:
    """Return the text of a chosen token."""
    same = [top.token for top in entry.top if top.logprob == entry.logprob]
    if len(same) == 1 or (same and tokens is None):
        return same[0]
    text = tokens.decode_token(entry.token_id) if tokens is not None else ""
    return same[0] if same and text not in same else text


def completion_logprobs(
    entries: Sequence[types_pb2.TokenLogprob],
    wanted: int,
    offset: int,
    tokens: DecodesTokens | None,
) -> tuple[dict[str, Any], int]:
    """Return the object of /v1/completions, and where the next token's text begins.

    Args:
        entries: One a token.
        wanted: Alternatives beside the chosen one.
        offset: Where the first token's text begins in the choice's text.
        tokens: Names chosen tokens that the engine did not name.
    """
    offsets, names, tops = [], [], []
    for entry in entries:
        name = token_text(entry, tokens)
        offsets.append(offset)
        names.append(name)
        offset += len(name)
        tops.append(dict(_ranked(entry, name)[: wanted + 1]))
    return (
        {
            "text_offset": offsets,
            "token_logprobs": [entry.logprob for entry in entries],
            "tokens": names,
            "top_logprobs": tops,
        },
        offset,
    )


def chat_logprobs(
    entries: Iterable[types_pb2.TokenLogprob], wanted: int, tokens: DecodesTokens | None
) -> dict[str, Any]:
    """Return the object of /v1/chat/completions."""
    content = []
    for entry in entries:
        name = token_text(entry, tokens)
        row = _chat_row(name, entry.logprob)
        row["top_logprobs"] = [_chat_row(*top) for top in _ranked(entry, name)[:wanted]]
        content.append(row)
    return {"content": content}


def _ranked(entry: types_pb2.TokenLogprob, name: str) -> list[tuple[str, float]]:
    """Return the chosen token, then the others, most probable first, as vLLM lists them."""
    others = [
        (top.token, top.logprob)
        for top in entry.top
        if not (top.token == name and top.logprob == entry.logprob)
    ]
    return [(name, entry.logprob), *others]


def _chat_row(token: str, logprob: float) -> dict[str, Any]:
    return {
        "token": token,
        "logprob": max(logprob, -9999.0),
        "bytes": list(token.encode("utf-8", errors="replace")),
    }
