"""When the sequences of a decode batch end."""

from collections.abc import Iterator
from heapq import heappop, heappush

from simulator.engine import Job


class BatchEnds:
    """Sequences by the step after which they end; one whose `finish_step` changed is put in anew."""

    __slots__ = ("_heap", "_order")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Job]] = []
        self._order = 0

    def add(self, job: Job) -> None:
        """Take in a sequence that ends at its `finish_step`."""
        self._order += 1
        heappush(self._heap, (job.finish_step, self._order, job))

    def take(self, step: int) -> Iterator[Job]:
        """Remove and yield those that end by a step, as they came in."""
        heap = self._heap
        while heap and heap[0][0] <= step:
            at, _, job = heappop(heap)
            if job.finish_step == at:
                yield job

    def next_step(self) -> int:
        """Return the step after which the next one ends; there has to be one."""
        heap = self._heap
        while heap[0][2].finish_step != heap[0][0]:
            heappop(heap)
        return heap[0][0]

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()
