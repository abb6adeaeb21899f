"""Continuous batching as vLLM's scheduler does it: synchronous, clock-free, repeatable.

Whoever drives it owns the time: `begin_step(now)` decides what the next step computes and how long
it takes, `complete_step()` says what came of it. Between the two, requests may be submitted and
aborted; what is aborted gets nothing from the step under way.

Rules, after vLLM's V1 scheduler: running sequences first, in order of admission, each with the
tokens it still misses (a prompt in chunks, else one), within `max_batched_tokens`; when blocks run
out, the last admitted is preempted, loses its KV and recomputes it later; after a preemption
nothing is admitted in that step. Then arrived pulls, then waiting requests in order of arrival,
stopping at the first that does not fit. A pull takes the blocks of its prompt, loads beside the
steps, is noticed only inside a step, and runs in the one after. A prefill leg's KV is held until
it is pulled or its lease ends.
"""

from collections import deque
from dataclasses import replace
from random import Random

from dataplane.core.emulation.pricing import StepClock
from dataplane.core.emulation.sequences import BlockBudget, Held, Phase, Sequence
from dataplane.core.emulation.values import (
    BatchingConfig,
    Idle,
    PullNews,
    SequenceRequest,
    Step,
    StepOutcome,
)
from enginemodel.model import EngineConstants, handoff_seconds


class BatchingEngine:
    """One emulated engine; see the module for its rules."""

    def __init__(self, config: BatchingConfig, rng: Random) -> None:
        self._config = config
        self._clock = StepClock(config, rng)
        self._blocks = BlockBudget(config.kv_total_tokens, config.block_tokens)
        self._live: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()
        self._pulling: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._held: dict[str, Held] = {}
        self._news = PullNews()
        self._step: Step | None = None
        self._scheduled: list[tuple[Sequence, int]] = []
        self._preemptions = 0

    def __repr__(self) -> str:
        """Show who is where."""
        return (
            f"BatchingEngine(running={len(self._running)}, waiting={self.waiting}, "
            f"held={len(self._held)}, {self._blocks!r})"
        )

    def reprice(self, constants: EngineConstants) -> None:
        """Take other times from the next step and pull on: an engine that slows while it runs."""
        self._config = replace(self._config, constants=constants)
        self._clock.reprice(constants)

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that are not in the batch yet: waiting, pulling or ready."""
        return len(self._live) - len(self._running)

    @property
    def kv_used_tokens(self) -> int:
        """KV in use, in whole blocks; held hand-offs and running pulls included."""
        return self._blocks.used_tokens

    @property
    def kv_total_tokens(self) -> int:
        """KV there is, in whole blocks."""
        return self._blocks.total_tokens

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens accepted and not computed; recomputation after a preemption included."""
        waiting = (s for s in self._waiting if not s.pull)
        running = (s for s in self._running if s.missing_tokens > 1)
        return sum(s.missing_tokens for s in (*waiting, *running))

    @property
    def preemptions(self) -> int:
        """Preemptions so far."""
        return self._preemptions

    @property
    def held(self) -> int:
        """Hand-offs held now."""
        return len(self._held)

    def submit(self, request: SequenceRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: the id is live already, or the request can never fit in the KV cache.
        """
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id} is live already")
        most_tokens = request.prompt_tokens + request.output_tokens
        if most_tokens > self._blocks.total_tokens:
            raise ValueError(f"{most_tokens} tokens exceed a KV cache of {self.kv_total_tokens}")
        sequence = Sequence.of(request)
        self._live[request.request_id] = sequence
        self._waiting.append(sequence)

    def content_arrived(self, request_id: str, output_tokens: int) -> None:
        """Tell what a pull that was started brings; ignored where the request is gone."""
        sequence = self._pulling.get(request_id)
        if sequence is not None:
            sequence.output_tokens = output_tokens
            sequence.content_known = True

    def abort(self, request_id: str) -> bool:
        """End a request in any phase and free its KV; False where it is not live."""
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.pull:
            self._news.done.append(request_id)
        if sequence.phase is Phase.RUNNING:
            self._running.remove(sequence)
        elif sequence.phase is Phase.PULLING:
            del self._pulling[request_id]
        elif sequence.phase is Phase.READY:
            self._ready.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._leave(sequence)
        return True

    def holds(self, request_id: str) -> bool:
        """Say whether the KV of a request is held."""
        return request_id in self._held

    def free_held(self, request_id: str) -> bool:
        """Free the KV of a hand-off: it was pulled, or nobody will; False where none is held."""
        held = self._held.pop(request_id, None)
        if held is None:
            return False
        self._blocks.free(held.blocks)
        return True

    def extend_held(self, request_id: str, now_seconds: float) -> bool:
        """Renew the lease of a hand-off; False where none is held."""
        held = self._held.get(request_id)
        if held is None:
            return False
        self._held[request_id] = Held(held.blocks, now_seconds + self._config.lease_seconds)
        return True

    def expire(self, now_seconds: float) -> list[str]:
        """Free the KV of every hand-off whose lease has ended, and name them."""
        expired = [id_ for id_, held in self._held.items() if held.expire_seconds <= now_seconds]
        for request_id in expired:
            self.free_held(request_id)
        return expired

    def take_news(self) -> PullNews:
        """Return what happened to pulls since the last time."""
        news, self._news = self._news, PullNews()
        return news

    def begin_step(self, now_seconds: float) -> Step | Idle:
        """Decide the next step.

        Raises:
            RuntimeError: a step is under way.
        """
        if self._step is not None:
            raise RuntimeError("a step is under way")
        if self._held:
            self.expire(now_seconds)
        scheduled = self._schedule(now_seconds)
        if not scheduled:
            self._notice(now_seconds)
            scheduled = self._schedule(now_seconds)
        if not scheduled:
            return Idle(self._next_event_seconds())
        self._scheduled = scheduled
        self._step = self._clock.step(
            now_seconds,
            (
                (tokens, s.computed_tokens, tokens == 1 and s.computed_tokens > 0)
                for s, tokens in scheduled
            ),
        )
        return self._step

    def complete_step(self) -> StepOutcome:
        """Finish the step under way.

        Raises:
            RuntimeError: no step is under way.
        """
        step, scheduled = self._step, self._scheduled
        if step is None:
            raise RuntimeError("no step is under way")
        self._step, self._scheduled = None, []
        outcome = StepOutcome()
        for sequence, tokens in scheduled:
            if sequence.phase is Phase.GONE:
                continue
            sequence.computed_tokens += tokens
            if sequence.missing_tokens > 0:
                continue
            sequence.generated_tokens += 1
            outcome.progressed.append(sequence.request_id)
            if sequence.generated_tokens >= sequence.output_tokens:
                self._finish(sequence, step.end_seconds, outcome)
        if outcome.finished:
            self._running = [s for s in self._running if s.phase is Phase.RUNNING]
        if self._pulling:
            self._notice(step.begin_seconds + self._config.notice_share * step.duration_seconds)
        return outcome

    def _finish(self, sequence: Sequence, now_seconds: float, outcome: StepOutcome) -> None:
        """End a sequence; its KV is freed, or held for its decode engine."""
        request_id = sequence.request_id
        del self._live[request_id]
        outcome.finished.append(request_id)
        if sequence.hold:
            outcome.held.append(request_id)
            self._held[request_id] = Held(sequence.blocks, now_seconds + self._config.lease_seconds)
            sequence.blocks = 0
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence's blocks back."""
        sequence.phase = Phase.GONE
        self._blocks.take_back(sequence)

    def _schedule(self, now_seconds: float) -> list[tuple[Sequence, int]]:
        """Choose who computes how many tokens in the next step."""
        scheduled: list[tuple[Sequence, int]] = []
        budget_tokens = self._config.max_batched_tokens
        preemptions_before = self._preemptions
        index = 0
        while index < len(self._running) and budget_tokens > 0:
            sequence = self._running[index]
            tokens = min(sequence.missing_tokens, budget_tokens)
            if self._grow_or_preempt(sequence, sequence.computed_tokens + tokens):
                scheduled.append((sequence, tokens))
                budget_tokens -= tokens
                index += 1
        if self._preemptions == preemptions_before:
            self._admit(now_seconds, budget_tokens, scheduled)
        return scheduled

    def _grow_or_preempt(self, sequence: Sequence, tokens: int) -> bool:
        """Get blocks, preempting from the tail; False where the sequence itself had to go."""
        while not self._blocks.grow(sequence, tokens):
            victim = self._running.pop()
            victim.phase = Phase.WAITING
            victim.computed_tokens = 0
            self._blocks.take_back(victim)
            self._waiting.appendleft(victim)
            self._preemptions += 1
            if victim is sequence:
                return False
        return True

    def _admit(
        self, now_seconds: float, budget_tokens: int, scheduled: list[tuple[Sequence, int]]
    ) -> None:
        """Let arrived pulls and waiting requests in, in order, until one does not fit."""
        for queue in (self._ready, self._waiting):
            while queue and budget_tokens > 0 and len(self._running) < self._config.max_num_seqs:
                sequence = queue[0]
                if sequence.pull:
                    if not self._start_pull(sequence, now_seconds):
                        return
                    queue.popleft()
                    continue
                tokens = min(sequence.missing_tokens, budget_tokens)
                if not self._blocks.grow(sequence, sequence.computed_tokens + tokens):
                    return
                queue.popleft()
                sequence.phase = Phase.RUNNING
                self._running.append(sequence)
                scheduled.append((sequence, tokens))
                budget_tokens -= tokens

    def _start_pull(self, sequence: Sequence, now_seconds: float) -> bool:
        """Give a pull the blocks of its prompt and start its transfer; False without blocks."""
        if not self._blocks.grow(sequence, sequence.prompt_tokens):
            return False
        sequence.phase = Phase.PULLING
        sequence.ready_seconds = now_seconds + handoff_seconds(
            self._config.constants, sequence.prompt_tokens, self._config.kv_bytes_per_token
        )
        self._pulling[sequence.request_id] = sequence
        self._news.started.append(sequence.request_id)
        return True

    def _notice(self, now_seconds: float) -> None:
        """Make pulls that are complete by now ready; the last prompt token is computed again."""
        arrived = [
            s for s in self._pulling.values() if s.content_known and s.ready_seconds <= now_seconds
        ]
        for sequence in arrived:
            del self._pulling[sequence.request_id]
            sequence.pull = False
            sequence.phase = Phase.READY
            sequence.computed_tokens = sequence.prompt_tokens - 1
            self._ready.append(sequence)
            self._news.done.append(sequence.request_id)

    def _next_event_seconds(self) -> float | None:
        """Return when an idle engine has something to do again: a pull or the end of a lease."""
        times = [s.ready_seconds for s in self._pulling.values() if s.content_known]
        times += [held.expire_seconds for held in self._held.values()]
        return min(times, default=None)
