"""/v1/completions: bodies in, text completions out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.v1 import types_pb2

from dataplane.gateway.logprobs import completion_logprobs
from dataplane.gateway.rendering import Shape, encode, finish_reason, sse, stop_reason
from dataplane.gateway.running import Progress, UsageTotals

OBJECT = "text_completion"


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[types_pb2.TokenLogprob] = field(default_factory=list)
    offset: int = 0
    begun: bool = False
    finish: str | None = None
    stop: int | str | None = None


class CompletionRenderer:
    """Writes text completions as vLLM does.

    Args:
        shape: What is shown.
        prompts: Token ids of each prompt.
        echoes: Text of each prompt to repeat; empty where none is wanted.
    """

    def __init__(
        self, shape: Shape, prompts: Sequence[Sequence[int]], echoes: Sequence[str]
    ) -> None:
        self._shape = shape
        self._prompts = prompts
        self._echoes = echoes
        self._id = ""
        self._head = b""
        self._states = [_Choice() for _ in range(len(prompts) * shape.choices)]
        self._plain = (
            shape.logprobs is None
            and not shape.return_token_ids
            and not shape.running_usage
            and not echoes
        )

    def begin(self, answer_id: str) -> None:
        """Take the id that all of the answer carries."""
        self._id = f"cmpl-{answer_id}"
        head = encode(self._base())
        self._head = b"data: " + head[:-1] + b',"choices":[{"index":'

    def event(self, progress: Progress) -> bytes:
        """Return the event for something new of a stream."""
        response = progress.response
        if self._plain and not response.finish_reason:
            # What nearly all events are, written without building an object.
            return (
                b'%b%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null,'
                b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
                % (self._head, progress.job.index, encode(response.text))
            )
        return sse(self._full_event(progress))

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
        return sse(self._base() | {"choices": [], "usage": usage.row()})

    def whole(self, usage: UsageTotals) -> bytes:
        """Return the body of a whole answer."""
        choices = [self._whole_choice(index) for index in range(len(self._states))]
        return encode(
            self._base()
            | {
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": None,
                "usage": usage.row(),
                "kv_transfer_params": None,
            }
        )

    def _base(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": OBJECT,
            "created": self._shape.created,
            "model": self._shape.model,
        }

    def _full_event(self, progress: Progress) -> dict[str, Any]:
        job, response = progress.job, progress.response
        state = self._states[job.index]
        first, state.begun = not state.begun, True
        text = response.text
        if first and self._echoes:
            text = self._echoes[job.prompt] + text
            state.offset = len(self._echoes[job.prompt])
        logprobs = None
        if self._shape.logprobs is not None:
            logprobs, state.offset = completion_logprobs(
                response.logprobs, self._shape.logprobs, state.offset
            )
        wants_ids = self._shape.return_token_ids
        choice = {
            "index": job.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(response.finish_reason),
            "stop_reason": stop_reason(job, response.stop_reason),
            "prompt_token_ids": self._prompts[job.prompt] if wants_ids and first else None,
            "token_ids": list(response.token_ids) if wants_ids else None,
        }
        event = self._base() | {"choices": [choice]}
        if self._shape.running_usage:
            event["usage"] = running_usage(progress)
        return event

    def _whole_choice(self, index: int) -> dict[str, Any]:
        state, prompt = self._states[index], index // self._shape.choices
        echo = self._echoes[prompt] if self._echoes else ""
        logprobs = None
        if self._shape.logprobs is not None:
            logprobs, _ = completion_logprobs(state.entries, self._shape.logprobs, len(echo))
        wants_ids = self._shape.return_token_ids
        return {
            "index": index,
            "text": echo + "".join(state.text),
            "logprobs": logprobs,
            "finish_reason": state.finish,
            "stop_reason": state.stop,
            "token_ids": state.token_ids if wants_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompts[prompt] if wants_ids else None,
        }


def running_usage(progress: Progress) -> dict[str, object]:
    """Return one job's token counts so far."""
    record = progress.served.record
    prompt = progress.served.taken.request.prompt_tokens
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + record.completion_tokens,
        "completion_tokens": record.completion_tokens,
    }
