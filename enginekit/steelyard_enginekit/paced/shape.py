"""What a step computes, read from vLLM's scheduler output."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class NewRequest(Protocol):
    """The part of vLLM's `NewRequestData` that tells a step's shape."""

    req_id: str
    num_computed_tokens: int


class CachedRequests(Protocol):
    """The same of `CachedRequestData`: requests that the worker has seen before."""

    req_ids: list[str]
    num_computed_tokens: list[int]


class Scheduled(Protocol):
    """The same of `SchedulerOutput`."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step; 0 for a step that only looks after transfers."""
        ...

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens by request."""
        ...

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]:
        """Requests that the worker has not seen."""
        ...

    @property
    def scheduled_cached_reqs(self) -> CachedRequests:
        """Requests that it has."""
        ...


@dataclass(frozen=True, slots=True)
class StepShape:
    """What prices a step.

    Attributes:
        chunks: (tokens, context tokens before them) of each prompt part.
        sequences: Sequences that decode.
        kv_tokens: Their context, the new token included.
        requests: Who is in it.
    """

    chunks: tuple[tuple[int, int], ...]
    sequences: int
    kv_tokens: int
    requests: frozenset[str]


def step_shape(scheduled: Scheduled) -> StepShape:
    """Return the shape of a step.

    One token after others is a decode: that is also the first step of a request whose KV was
    pulled, which computes the last prompt token again.
    """
    chunks: list[tuple[int, int]] = []
    sequences = kv_tokens = 0
    tokens_of = scheduled.num_scheduled_tokens
    for request_id, computed_tokens in _parts(scheduled):
        tokens = tokens_of[request_id]
        if tokens == 1 and computed_tokens > 0:
            sequences += 1
            kv_tokens += computed_tokens + 1
        else:
            chunks.append((tokens, computed_tokens))
    return StepShape(tuple(chunks), sequences, kv_tokens, frozenset(tokens_of))


def _parts(scheduled: Scheduled) -> Iterable[tuple[str, int]]:
    cached = scheduled.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request in scheduled.scheduled_new_reqs:
        yield request.req_id, request.num_computed_tokens
