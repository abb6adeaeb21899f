"""/v1/chat/completions: what its answers look like."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.v1 import types_pb2

from dataplane.gateway.completions import running_usage
from dataplane.gateway.logprobs import chat_logprobs
from dataplane.gateway.rendering import Shape, encode, finish_reason, sse, stop_reason
from dataplane.gateway.running import Progress, UsageTotals

OBJECT = "chat.completion"
CHUNK_OBJECT = "chat.completion.chunk"


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[types_pb2.TokenLogprob] = field(default_factory=list)
    begun: bool = False
    finish: str | None = None
    stop: int | str | None = None


class ChatRenderer:
    """Writes chat completions as vLLM does.

    Args:
        shape: What is shown.
        prompt: Token ids of the conversation.
        role: Who speaks.
    """

    def __init__(self, shape: Shape, prompt: Sequence[int], role: str) -> None:
        self._shape = shape
        self._prompt = prompt
        self._role = role
        self._id = ""
        self._head = b""
        self._states = [_Choice() for _ in range(shape.choices)]
        self._plain = (
            shape.logprobs is None and not shape.return_token_ids and not shape.running_usage
        )

    def begin(self, answer_id: str) -> None:
        """Take the id that all of the answer carries."""
        self._id = f"chatcmpl-{answer_id}"
        head = encode(self._base(CHUNK_OBJECT))
        self._head = b"data: " + head[:-1] + b',"choices":[{"index":'

    def event(self, progress: Progress) -> bytes:
        """Return the events for something new; a choice's first one has its role before it."""
        response = progress.response
        state = self._states[progress.job.index]
        role = b"" if state.begun else self._role_event(progress)
        state.begun = True
        if self._plain and not response.finish_reason:
            return (
                b'%b%b%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null,'
                b'"token_ids":null}]}\n\n'
                % (role, self._head, progress.job.index, encode(response.text))
            )
        return role + sse(self._full_event(progress))

    def gather(self, progress: Progress) -> None:
        """Keep something new for a whole answer."""
        state, response = self._states[progress.job.index], progress.response
        if response.text:
            state.text.append(response.text)
        if self._shape.return_token_ids:
            state.token_ids += response.token_ids
        state.entries += response.logprobs
        if response.finish_reason:
            state.finish = finish_reason(response.finish_reason)
            state.stop = stop_reason(progress.job, response.stop_reason)

    def last_event(self, usage: UsageTotals) -> bytes:
        """Return the event with token counts of a stream."""
        return sse(self._base(CHUNK_OBJECT) | {"choices": [], "usage": usage.row()})

    def whole(self, usage: UsageTotals) -> bytes:
        """Return the body of a whole answer."""
        wants_ids = self._shape.return_token_ids
        return encode(
            self._base(OBJECT)
            | {
                "choices": [self._whole_choice(index) for index in range(len(self._states))],
                "service_tier": None,
                "system_fingerprint": None,
                "usage": usage.row(),
                "prompt_logprobs": None,
                "prompt_token_ids": self._prompt if wants_ids else None,
                "kv_transfer_params": None,
            }
        )

    def _base(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._shape.created,
            "model": self._shape.model,
        }

    def _role_event(self, progress: Progress) -> bytes:
        choice = {
            "index": progress.job.index,
            "delta": {"role": self._role, "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        ids = self._prompt if self._shape.return_token_ids else None
        event = self._base(CHUNK_OBJECT) | {"choices": [choice], "prompt_token_ids": ids}
        if self._shape.running_usage:
            prompt = progress.served.taken.request.prompt_tokens
            event["usage"] = {
                "prompt_tokens": prompt,
                "total_tokens": prompt,
                "completion_tokens": 0,
            }
        return sse(event)

    def _full_event(self, progress: Progress) -> dict[str, Any]:
        job, response = progress.job, progress.response
        choice: dict[str, Any] = {
            "index": job.index,
            "delta": {"content": response.text},
            "logprobs": self._logprobs(response.logprobs),
            "finish_reason": finish_reason(response.finish_reason),
        }
        if response.finish_reason:
            choice["stop_reason"] = stop_reason(job, response.stop_reason)
        choice["token_ids"] = list(response.token_ids) if self._shape.return_token_ids else None
        event = self._base(CHUNK_OBJECT) | {"choices": [choice]}
        if self._shape.running_usage:
            event["usage"] = running_usage(progress)
        return event

    def _whole_choice(self, index: int) -> dict[str, Any]:
        state = self._states[index]
        return {
            "index": index,
            "message": {
                "role": self._role,
                "content": "".join(state.text),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": self._logprobs(state.entries),
            "finish_reason": state.finish,
            "stop_reason": state.stop,
            "token_ids": state.token_ids if self._shape.return_token_ids else None,
        }

    def _logprobs(self, entries: Sequence[types_pb2.TokenLogprob]) -> dict[str, Any] | None:
        if self._shape.logprobs is None or not entries:
            return None
        return chat_logprobs(entries, self._shape.logprobs)
