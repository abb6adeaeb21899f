"""Prompts that a decode engine computes itself, in chunks beside its batch."""

from collections.abc import Iterator

from enginemodel.model import EngineConstants, attention_seconds
from simulator.engine import Job


class PromptChunks:
    """Prompts being computed, first come first served, and what the step under way does of them.

    Attributes:
        jobs: Whose context is being computed.
        planned: Chunks of the step under way, with their tokens.
    """

    def __init__(self, constants: EngineConstants, max_batched_tokens: int) -> None:
        self._constants = constants
        self._max_batched_tokens = max_batched_tokens
        self.jobs: list[Job] = []
        self.planned: list[tuple[Job, int]] = []

    def __repr__(self) -> str:
        return f"<PromptChunks of {len(self.jobs)} prompts>"

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, job: Job) -> None:
        """Compute a job's `recompute_tokens` from the next step on."""
        job.done_tokens = 0
        self.jobs.append(job)

    def plan(self, sequences: int, decode_seconds: float) -> float:
        """Plan the next step beside a batch; return its length without noise.

        Args:
            sequences: In the batch; each takes a token of the step.
            decode_seconds: Length of the step without the chunks.
        """
        constants = self._constants
        budget = max(1, self._max_batched_tokens - sequences)
        total = 0
        attention = 0.0
        for job in self.jobs:
            tokens = min(budget - total, job.recompute_tokens - job.done_tokens)
            if tokens <= 0:
                break
            self.planned.append((job, tokens))
            attention += attention_seconds(constants, tokens, job.done_tokens)
            total += tokens
        linear = constants.p2_seconds_per_token * total
        if sequences:
            return decode_seconds + linear + attention
        return max(constants.p0_seconds, constants.p1_seconds + linear) + attention

    def finish(self) -> Iterator[Job]:
        """Take in what the step computed; yield those that leave: complete, or gone."""
        planned, self.planned = self.planned, []
        for job, tokens in planned:
            job.done_tokens += tokens
            if job.gone or job.done_tokens >= job.recompute_tokens:
                self.jobs.remove(job)
                yield job

    def clear(self) -> None:
        """Give up all."""
        self.jobs.clear()
        self.planned = []
