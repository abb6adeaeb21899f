"""The simulated decode engine: continuous batching that jumps over uneventful steps.

Between two changes of its batch every step is known in closed form (stepping.py), so the engine is
woken only at boundaries where something happens: a sequence ends, a pull may start or is
noticed, blocks run out, or progress is due to be told. What happens at such a boundary follows
vLLM's scheduler as the emulated engine does: running sequences first, the last admitted preempted
when blocks run out, then no admission in that step; arrived pulls before waiting requests; the
head of the queue blocks those behind it. A pull takes its blocks when it starts, is noticed when a
step looks (early, see enginemodel), and runs in the step after.
"""

from collections import deque

from dataplane.core.events import Leg
from simulator.blocks import BatchBlocks
from simulator.chunks import PromptChunks
from simulator.ends import BatchEnds
from simulator.engine import Job, Load
from simulator.kernel import Kernel, Priority
from simulator.noise import StepNoise
from simulator.pulls import Pulls
from simulator.stepping import StepRun
from simulator.values import EngineSpec

COARSE = 4


class DecodeEngine:
    """Generates tokens; computes prompts itself where they come without a hand-off."""

    def __init__(
        self,
        instance_id: str,
        spec: EngineSpec,
        kernel: Kernel,
        noise: StepNoise,
        *,
        serial_link: bool = True,
        report_stride: int = 16,
        learning_steps: int = 512,
    ) -> None:
        """Start idle.

        Args:
            instance_id: Its name.
            spec: Its kind.
            kernel: The clock.
            noise: Of its steps; its own.
            serial_link: Pulls share one link, one after the other.
            report_stride: Steps between two progress reports; COARSE times as many at half load.
            learning_steps: First ones, told one by one: schedulers learn constants from them.
        """
        self.instance_id = instance_id
        self.alive = True
        self.preemptions = 0
        self._kernel = kernel
        self._profile = profile = spec.profile
        constants = profile.constants.slowed(spec.scale)
        self._d0 = constants.d0_seconds
        self._d1 = constants.d1_seconds_per_sequence
        self._d2 = constants.d2_seconds_per_kv_token
        self._stride = report_stride
        self._total_blocks = profile.kv_total_tokens // profile.block_tokens
        self._reserved_blocks = 0
        self._batch = BatchBlocks(profile.block_tokens)
        self._running: dict[Job, None] = {}
        self._ends = BatchEnds()
        self._waiting: deque[Job] = deque()
        self._ready: deque[Job] = deque()
        self._pulls = Pulls(constants, profile.kv_bytes_per_token, serial_link=serial_link)
        self._chunks = PromptChunks(constants, profile.max_batched_tokens)
        self._joined: list[Job] = []
        self._active = False  # the run of steps under way began after `_step` steps
        self._run = StepRun(noise, spec.notice_share)
        self._step = 0
        self._kv_tokens = 0
        self._planned_steps = 0
        self._stamp = 0
        self._learning_steps = learning_steps
        self._report_at = 1 if learning_steps else report_stride

    def __repr__(self) -> str:
        return (
            f"<DecodeEngine {self.instance_id}, {len(self._running)} running, "
            f"{len(self._waiting)} waiting, {len(self._pulls)} pulling>"
        )

    def __len__(self) -> int:
        waiting = len(self._waiting) + len(self._ready) + len(self._pulls)
        return len(self._running) + waiting + len(self._chunks)

    @property
    def kv_used_tokens(self) -> int:
        """KV in use, in whole blocks; running pulls included."""
        used = self._reserved_blocks + self._batch.needed(self._step)
        return used * self._profile.block_tokens

    @property
    def kv_total_tokens(self) -> int:
        """KV there is, in whole blocks."""
        return self._total_blocks * self._profile.block_tokens

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def step_seconds(self) -> float:
        """Length of a step now; 0 while idle."""
        return self._run.first_seconds if self._active else 0.0

    def arrive(self, job: Job) -> None:
        """Queue a sequence: its KV is held by `job.holder`, or it has none yet."""
        if job.gone:
            return
        if not self.alive or (job.holder is not None and not job.holder.alive):
            job.listener.failed(job, Leg.DECODE, retryable=True)
            return
        most_tokens = job.arrival.prompt_tokens + job.arrival.output_tokens
        if most_tokens > self.kv_total_tokens:
            job.listener.failed(job, Leg.DECODE, retryable=False)
            return
        if job.holder is None:
            job.recompute_tokens = job.arrival.prompt_tokens
        self._waiting.append(job)
        now = self._kernel.now
        if not self._active:
            self._boundary(now, now)
        elif len(self._waiting) == 1:
            self._wake_by(now)

    def abort(self, job: Job) -> bool:
        """Drop a sequence; one that runs leaves at the end of the step under way."""
        if job in self._running:
            job.gone = True
            job.finish_step = self._step + self._wake_by(self._kernel.now)
            self._ends.add(job)
        elif job in self._waiting:
            self._waiting.remove(job)
            self._unblock()
        elif job in self._ready:
            self._ready.remove(job)
            self._unreserve(job)
        elif job in self._chunks.jobs:
            job.gone = True
        elif self._pulls.drop(job):
            self._unreserve(job)
            self._unblock()
        else:
            return False
        return True

    def release(self, job: Job) -> None:
        """Nothing is held here for others."""

    def kill(self) -> list[Job]:
        """Stop for good; return all that was here."""
        self.alive = False
        self._stamp += 1
        self._active = False
        lost = [*self._running, *self._not_running()]
        for part in (self._running, self._waiting, self._ready, self._pulls, self._chunks):
            part.clear()
        self._ends.clear()
        self._joined = []
        self._batch = BatchBlocks(self._profile.block_tokens)
        self._reserved_blocks = 0
        return lost

    def loads(self, routers: int) -> list[Load]:
        """Return what each router has here, tokens as of the step under way."""
        loads = [Load() for _ in range(routers)]
        step = self._step
        if self._active and not self._chunks.planned:
            step += max(0, self._run.steps_to(self._kernel.now, self._planned_steps) - 1)
        for job in self._running:
            load = loads[job.router]
            load.decode_requests += 1
            load.decode_kv_tokens += job.arrival.prompt_tokens + step - job.start_step
        for job in self._not_running():
            load = loads[job.router]
            load.decode_requests += 1
            load.decode_kv_tokens += job.arrival.prompt_tokens + job.generated_tokens
        return loads

    def _not_running(self) -> list[Job]:
        return [*self._waiting, *self._ready, *self._pulls.jobs, *self._chunks.jobs]

    # ---- time within a run of steps

    def _wake_by(self, now: float) -> int:
        """Plan to be woken at the next boundary and return how many steps away it is."""
        if not self._active or self._chunks.planned:
            return self._planned_steps
        steps = self._run.steps_to(now, self._planned_steps)
        if steps < self._planned_steps:
            self._plan_wake(steps, self._run.time_after(steps))
        return steps

    def _unblock(self) -> None:
        """Something that others may have waited for is gone: look again at the next boundary."""
        if self._active:
            self._wake_by(self._kernel.now)
        elif self._waiting or self._ready:
            self._boundary(self._kernel.now, self._kernel.now)

    def _plan_wake(self, steps: int, at: float) -> None:
        self._planned_steps = steps
        self._stamp += 1
        self._kernel.at(at, Priority.ENGINE, self._wake, self._stamp)

    def _wake(self, stamp: int) -> None:
        """Take the planned steps and deal with the boundary after them."""
        if stamp != self._stamp:
            return
        now = self._kernel.now
        if not self._active:
            self._boundary(now, now)
            return
        steps = self._planned_steps
        # With chunks a single step is planned, so the first one's begin is what counts.
        looked = self._run.look_of(steps, now) if self._pulls else now
        self._step += steps
        self._run.take(steps)
        self._kv_tokens += steps * len(self._running)
        if self._chunks.planned:
            self._finish_chunks(now)
        self._boundary(now, looked)

    # ---- boundaries

    def _boundary(self, now: float, looked: float) -> None:
        """End, notice, report, preempt, admit; then begin the next run of steps."""
        for job in self._ends.take(self._step):
            if job in self._running:
                self._leave(job)
                if not job.gone:
                    job.listener.finished(job)
        pulls = self._pulls
        if pulls and pulls.next_at <= looked:
            self._ready.extend(pulls.take_complete(looked))
        if self._step >= self._report_at:
            self._report()
        preempted = self._preempt()
        # After a preemption nobody is let in for a step, unless there would be no step at all.
        if (self._ready or self._waiting) and not (preempted and (self._running or self._chunks)):
            self._admit(now)
        if self._running or self._chunks:
            self._begin_run(now, look_again=preempted)
        else:
            self._active = False
            if pulls:
                self._plan_wake(0, max(now, pulls.next_at))

    def _leave(self, job: Job) -> None:
        """Take a sequence out of the batch."""
        del self._running[job]
        prompt_tokens = job.arrival.prompt_tokens
        self._batch.remove(prompt_tokens - job.start_step)
        job.generated_tokens = self._step - job.start_step
        self._kv_tokens -= prompt_tokens + job.generated_tokens

    def _join(self, job: Job) -> None:
        """Let a sequence into the batch whose context is there."""
        job.start_step = start = self._step - job.generated_tokens
        job.finish_step = start + job.arrival.output_tokens
        self._unreserve(job)
        self._running[job] = None
        self._batch.add(job.arrival.prompt_tokens - start)
        self._kv_tokens += job.arrival.prompt_tokens + job.generated_tokens
        self._ends.add(job)

    def _unreserve(self, job: Job) -> None:
        self._reserved_blocks -= job.blocks
        job.blocks = 0

    def _preempt(self) -> bool:
        """Send the last admitted back until the next step's blocks fit; True if any had to go."""
        preempted = False
        running = self._running
        available = self._total_blocks - self._reserved_blocks
        block = self._profile.block_tokens
        if self._kv_tokens + block * len(running) <= available * block:
            return False
        while running and self._batch.needed(self._step) > available:
            job, _ = running.popitem()
            running[job] = None
            self._leave(job)
            job.finish_step = -1
            job.recompute_tokens = job.arrival.prompt_tokens + job.generated_tokens
            job.preemptions += 1
            self.preemptions += 1
            self._waiting.appendleft(job)
            preempted = True
        return preempted

    def _admit(self, now: float) -> None:
        """Let arrived pulls and waiting requests in, in order, until one does not fit."""
        most = self._profile.max_num_seqs
        while self._ready and len(self._running) + len(self._chunks) < most:
            job = self._ready.popleft()
            self._join(job)
            self._joined.append(job)
        block = self._profile.block_tokens
        total = self._total_blocks
        while self._waiting and len(self._running) + len(self._chunks) < most:
            job = self._waiting[0]
            tokens = job.recompute_tokens or job.arrival.prompt_tokens
            blocks = -(-tokens // block)
            most_used = self._kv_tokens // block + len(self._running) + 1 + self._reserved_blocks
            if (
                most_used + blocks > total
                and self._reserved_blocks + self._batch.needed(self._step) + blocks > total
            ):
                return
            self._waiting.popleft()
            self._reserved_blocks += blocks
            job.blocks = blocks
            if job.recompute_tokens:
                self._chunks.add(job)
            else:
                # The prefill engine frees it once it is here.
                ready_at = self._pulls.start(job, now)
                self._kernel.at(ready_at, Priority.ENGINE, self._pulled, job)

    def _pulled(self, job: Job) -> None:
        """Tell the prefill engine that its copy is not needed any more."""
        holder, job.holder = job.holder, None
        if holder is not None:
            holder.release(job)

    def _report(self) -> None:
        """Tell the schedulers how far everybody is."""
        step = self._step
        near_limit = (
            2 * self._kv_tokens > self._total_blocks * self._profile.block_tokens
            or 2 * len(self._running) > self._profile.max_num_seqs
        )
        stride = self._stride * (1 if near_limit else COARSE)
        self._report_at = step + (1 if step < self._learning_steps else stride)
        news: list[tuple[Job, int]] = []
        for job in self._running:
            count = step - job.start_step - job.reported_tokens
            if count > 0:
                job.reported_tokens += count
                news.append((job, count))
        if news:
            news[0][0].listener.progressed(news)

    # ---- steps

    def _begin_run(self, now: float, *, look_again: bool) -> None:
        """Price the next steps and plan the boundary at which something happens next."""
        self._active = True
        run = self._run
        count = len(self._running)
        first_seconds = self._d0 + self._d1 * count + self._d2 * self._kv_tokens
        run.start(now, first_seconds, self._d2 * count)
        if self._chunks:
            at = run.time_after_one(self._chunks.plan(count, first_seconds))
            self._plan_wake(1, at)
            if self._joined:
                self._tell_first(at)
            return
        steps = min(run.steps_left, self._report_at - self._step)
        if look_again and self._waiting:
            steps = 1
        steps = min(steps, self._ends.next_step() - self._step)
        block = self._profile.block_tokens
        available = self._total_blocks - self._reserved_blocks
        if steps > 1 and self._kv_tokens + count * (steps + block) > available * block:
            free = available - self._batch.needed(self._step)
            steps = self._batch.safe_steps(self._step, free, steps)
        if self._pulls and steps > 1:
            steps = min(steps, run.noticing_step(self._pulls.next_at, steps))
        self._plan_wake(steps, run.time_after(steps))
        if self._joined:
            self._tell_first(run.time_after(1))

    def _tell_first(self, at: float) -> None:
        """Announce the first token of those that just joined."""
        for job in self._joined:
            if not job.reported_tokens:
                job.reported_tokens = 1
                job.listener.first_token(job, at)
        self._joined = []

    def _finish_chunks(self, now: float) -> None:
        """Let those whose prompt is complete join; each has its next token."""
        for job in self._chunks.finish():
            if job.gone:
                self._unreserve(job)
                continue
            job.recompute_tokens = 0
            job.generated_tokens += 1
            self._join(job)
            if not job.reported_tokens:
                job.reported_tokens = 1
                job.listener.first_token(job, now)
