"""The simulated prefill engine: chunked steps, first come first served, KV held until pulled."""

from collections import deque

from dataplane.core.events import Leg
from enginemodel.model import attention_seconds
from simulator.engine import Job, Load
from simulator.kernel import Kernel, Priority
from simulator.noise import StepNoise, single_steps
from simulator.values import EngineSpec


class PrefillEngine:
    """Computes prompts in steps of at most `max_batched_tokens`.

    A prompt gets the KV blocks of its whole length when its first chunk is computed, and keeps them
    until the decode engine has pulled them. A prompt whose blocks are not free waits, and all
    behind it.
    """

    def __init__(
        self, instance_id: str, spec: EngineSpec, kernel: Kernel, noise: StepNoise
    ) -> None:
        self.instance_id = instance_id
        self.alive = True
        self._kernel = kernel
        self._constants = spec.profile.constants.slowed(spec.scale)
        self._profile = spec.profile
        self._noise = single_steps(noise)
        self._block_tokens = spec.profile.block_tokens
        self._total_blocks = spec.profile.kv_total_tokens // spec.profile.block_tokens
        self._used_blocks = 0
        self._queue: deque[Job] = deque()
        self._computing: list[Job] = []
        self._held: dict[Job, None] = {}
        self._busy = False
        self._step_seconds = 0.0

    def __repr__(self) -> str:
        return (
            f"<PrefillEngine {self.instance_id}, {len(self._queue)} queued, {len(self._held)} held>"
        )

    @property
    def kv_used_tokens(self) -> int:
        """KV in use, in whole blocks; held hand-offs included."""
        return self._used_blocks * self._block_tokens

    @property
    def kv_total_tokens(self) -> int:
        """KV there is, in whole blocks."""
        return self._total_blocks * self._block_tokens

    @property
    def step_seconds(self) -> float:
        """Length of the last step."""
        return self._step_seconds

    def __len__(self) -> int:
        return len(self._queue) + len(self._held)

    def arrive(self, job: Job) -> None:
        """Queue a prompt."""
        if job.gone:
            return
        if not self.alive:
            job.listener.failed(job, Leg.PREFILL, retryable=True)
            return
        if self._blocks_of(job) > self._total_blocks:
            job.listener.failed(job, Leg.PREFILL, retryable=False)
            return
        self._queue.append(job)
        if not self._busy:
            self._start()

    def abort(self, job: Job) -> bool:
        """Drop a prompt; a step that computes it goes on to its end."""
        if job in self._held:
            self.release(job)
        elif job in self._computing:
            job.gone = True
        elif job in self._queue:
            self._queue.remove(job)
            self._free(job)
        else:
            return False
        return True

    def release(self, job: Job) -> None:
        """Free the KV held for a pull."""
        if job in self._held:
            del self._held[job]
            self._free(job)
            if not self._busy and self._queue:
                self._start()

    def kill(self) -> list[Job]:
        """Stop for good; return what was queued or held here."""
        self.alive = False
        lost = [*self._queue, *self._held]
        self._queue.clear()
        self._held.clear()
        self._computing = []
        self._used_blocks = 0
        return lost

    def loads(self, routers: int) -> list[Load]:
        """Return what each router has queued here."""
        loads = [Load() for _ in range(routers)]
        for job in self._queue:
            load = loads[job.router]
            load.prefill_requests += 1
            load.prefill_tokens += job.arrival.prompt_tokens
        return loads

    def _blocks_of(self, job: Job) -> int:
        return -(-job.arrival.prompt_tokens // self._block_tokens)

    def _free(self, job: Job) -> None:
        self._used_blocks -= job.held_blocks
        job.held_blocks = 0

    def _start(self) -> None:
        """Form the next step and plan its end."""
        constants = self._constants
        budget = self._profile.max_batched_tokens
        attention = 0.0
        computing: list[Job] = []
        for job in self._queue:
            if budget <= 0 or len(computing) >= self._profile.max_num_seqs:
                break
            prompt = job.arrival.prompt_tokens
            if not job.done_tokens:
                blocks = self._blocks_of(job)
                if self._used_blocks + blocks > self._total_blocks:
                    break
                job.held_blocks = blocks
                self._used_blocks += blocks
            tokens = min(budget, prompt - job.done_tokens)
            attention += attention_seconds(constants, tokens, job.done_tokens)
            job.done_tokens += tokens
            budget -= tokens
            computing.append(job)
        if not computing:
            return
        self._computing = computing
        linear = constants.p2_seconds_per_token * (self._profile.max_batched_tokens - budget)
        seconds = max(constants.p0_seconds, constants.p1_seconds + linear) + attention
        factor, stall = next(self._noise)
        self._step_seconds = seconds * factor + stall
        self._busy = True
        self._kernel.at(self._kernel.now + self._step_seconds, Priority.ENGINE, self._end)

    def _end(self, _: object) -> None:
        """Hand over the prompts that are complete and go on."""
        self._busy = False
        if not self.alive:
            return
        queue = self._queue
        for job in self._computing:
            if job.done_tokens < job.arrival.prompt_tokens and not job.gone:
                break
            queue.popleft()
            if job.gone:
                self._free(job)
                continue
            self._held[job] = None
            job.holder = self
            job.listener.prefilled(job)
        self._computing = []
        if queue:
            self._start()
