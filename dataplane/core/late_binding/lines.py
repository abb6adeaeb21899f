"""Prefill engines as late binding sees them: what was sent, and when it will be nearly done."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from dataplane.core.cluster import Instance
from dataplane.core.late_binding.calibration import Multiplier
from dataplane.core.late_binding.pace import Pace, pace_of
from enginemodel.model import EngineConstants


@dataclass(slots=True, eq=False)
class Batch:
    """Prompts sent at one instant, which an engine takes into one step or a few.

    Attributes:
        sent_at: When.
        tokens: Prompt tokens, cached ones left out.
        squares: Sum of the squares of the same.
        open: Prompts not known to be done.
        seconds: Predicted time of the batch alone.
        clean: False once it tells nothing about the engine's pace: a prompt was cancelled or
            failed, or its length turned out otherwise.
    """

    sent_at: float
    tokens: int = 0
    squares: int = 0
    open: int = 0
    seconds: float = 0.0
    clean: bool = True


@dataclass(slots=True, eq=False)
class Line:
    """One engine that prefills: PREFILL, or MIXED, where prompt and output stay together."""

    instance: Instance
    constants: EngineConstants
    multiplier: Multiplier
    pace: Pace
    order: int = 0
    ahead_seconds: float = 0.0
    batches: "deque[Batch]" = field(default_factory=deque)
    head_at: float = 0.0
    rest_seconds: float = 0.0
    other_seconds: float = 0.0
    ready_at: float = -inf
    version: int = 0
    usable: bool = True

    def set_constants(self, instance: Instance, constants: EngineConstants) -> None:
        """Take over what a new roster says."""
        self.instance = instance
        self.constants = constants
        self.pace = pace_of(constants, self.multiplier.value)

    def remaining_seconds(self, now: float) -> float:
        """Return the predicted work ahead of a prompt sent now."""
        ahead = self.rest_seconds + self.other_seconds
        if self.batches:
            ahead += max(0.0, self.batches[0].seconds - max(0.0, now - self.head_at))
        return ahead

    def send(self, now: float, arrives_at: float, batch: Batch | None, tokens: int) -> Batch:
        """Add a prompt to the batch of this instant, or begin one."""
        if batch is None:
            batch = Batch(now)
            if not self.batches:
                self.head_at = arrives_at
            self.batches.append(batch)
        batch.tokens += tokens
        batch.squares += tokens * tokens
        batch.open += 1
        self._reprice(batch)
        return batch

    def leave(self, batch: Batch, tokens: int) -> None:
        """Take out a prompt that was cancelled or failed."""
        if batch not in self.batches:
            return
        batch.clean = False
        batch.open -= 1
        batch.tokens -= tokens
        batch.squares -= tokens * tokens
        if batch.open:
            self._reprice(batch)
        else:
            self._drop(batch, self.head_at)

    def done(self, batch: Batch, left_engine_at: float, latency_seconds: float) -> float | None:
        """Take in that one prompt of a batch is done.

        Args:
            batch: Its batch.
            left_engine_at: When the engine was done with it.
            latency_seconds: Of a dispatch, one way.

        Returns:
            The time the whole batch took, where this was its last prompt and the time tells
            something; compare it with the batch's `seconds`.
        """
        if batch not in self.batches:
            return None
        batch.open -= 1
        if batch.open:
            return None
        taken = left_engine_at - max(self.head_at, batch.sent_at + latency_seconds)
        tells = batch.clean and batch is self.batches[0] and self.other_seconds == 0.0
        self._drop(batch, left_engine_at)
        return taken if tells and taken > 0.0 else None

    def learn(self, taken_seconds: float, predicted_seconds: float) -> None:
        """Correct the pace by a batch's time."""
        self.multiplier.observe(taken_seconds, predicted_seconds)
        self.pace = pace_of(self.constants, self.multiplier.value)

    def refresh_ready(self) -> None:
        """Recompute from when on the engine is to be given more."""
        self.version += 1
        ahead = self.rest_seconds + self.other_seconds
        if not self.usable or (ahead >= self.ahead_seconds and ahead > 0.0):
            self.ready_at = inf
        elif self.batches:
            self.ready_at = self.head_at + self.batches[0].seconds + ahead - self.ahead_seconds
        else:
            self.ready_at = -inf

    def _reprice(self, batch: Batch) -> None:
        before = batch.seconds
        chunk = self.instance.max_batched_tokens
        batch.seconds = self.pace.batch_seconds(batch.tokens, batch.squares, chunk)
        if batch is not self.batches[0]:
            self.rest_seconds += batch.seconds - before

    def _drop(self, batch: Batch, now: float) -> None:
        was_first = batch is self.batches[0]
        self.batches.remove(batch)
        if was_first:
            self.head_at = now
        self.rest_seconds = sum((b.seconds for b in self.batches), 0.0) - (
            self.batches[0].seconds if self.batches else 0.0
        )


class ReadyLines:
    """Lines by when they are to be given more; idle ones first, the fastest and least recent."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int, int, Line]] = []
        self._stamp = 0

    def rebuild(self, lines: Iterable[Line]) -> None:
        """Start anew with these lines."""
        self._heap = []
        for line in lines:
            line.refresh_ready()
            if line.ready_at < inf:
                self._heap.append(self._entry(line))
        heapify(self._heap)

    def update(self, line: Line) -> None:
        """Take in that a line has changed."""
        line.refresh_ready()
        if line.ready_at < inf:
            heappush(self._heap, self._entry(line))

    def used(self, line: Line) -> None:
        """Put a line behind its equals."""
        self._stamp += 1
        line.order = self._stamp

    def pop(self, now: float) -> Line | None:
        """Take out the first line to be given more now; `update` puts it back."""
        while self._heap and self._heap[0][0] <= now:
            _, _, _, version, line = heappop(self._heap)
            if version == line.version and line.usable:
                return line
        return None

    def next_at(self) -> float:
        """Return when the next line is to be given more; infinity where that needs an event."""
        heap = self._heap
        while heap and heap[0][3] != heap[0][4].version:
            heappop(heap)
        return heap[0][0] if heap else inf

    def _entry(self, line: Line) -> tuple[float, float, int, int, Line]:
        return (line.ready_at, line.pace.linear, line.order, line.version, line)
