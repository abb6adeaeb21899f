"""What both endpoints' answers have in common, and the protocol by which they are written."""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from steelyard.v1 import types_pb2

from dataplane.gateway.running import Job, Progress, UsageTotals

DONE = b"data: [DONE]\n\n"
_FINISH = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
}
encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an answer looks like.

    Attributes:
        model: As clients call it.
        created: Seconds since 1970.
        choices: Continuations of each prompt.
        logprobs: Alternatives a token to show; None for no log probabilities.
        return_token_ids: Whether ids go along with text.
        include_usage: Whether a stream ends with token counts.
        running_usage: Whether every event carries token counts.
    """

    model: str
    created: int
    choices: int
    logprobs: int | None
    return_token_ids: bool
    include_usage: bool
    running_usage: bool


class Renderer(Protocol):
    """Writes one HTTP request's answer."""

    def begin(self, answer_id: str) -> None:
        """Take the id that all of the answer carries."""
        ...

    def event(self, progress: Progress) -> bytes:
        """Return the events for something new of a stream."""
        ...

    def gather(self, progress: Progress) -> None:
        """Keep something new for a whole answer."""
        ...

    def last_event(self, usage: UsageTotals) -> bytes:
        """Return the event with token counts of a stream."""
        ...

    def whole(self, usage: UsageTotals) -> bytes:
        """Return the body of a whole answer."""
        ...


def finish_reason(response_reason: int) -> str | None:
    """Return why a choice ended; None while it has not."""
    return _FINISH.get(response_reason)  # type: ignore[call-overload, no-any-return]


def stop_reason(job: Job, reason: str) -> int | str | None:
    """Return the stop string, or the id of the stop token, that ended a choice."""
    if not reason:
        return None
    if reason in job.message.sampling.stop:
        return reason
    return int(reason) if reason.lstrip("-").isdigit() else reason


def sse(value: Any) -> bytes:
    """Return one event."""
    return b"data: %b\n\n" % encode(value)
