"""Emulated engines measured in virtual time: hours of probes in a second of ours."""

import asyncio
import heapq
from dataclasses import replace
from random import Random

from calibrator.agents import Generated, Prefilled
from calibrator.cluster import ProfileTargets, Target
from calibrator.concurrently import all_of
from calibrator.design import DecodePoint, Limits
from calibrator.errors import ProbeFailed
from calibrator.observations import StepSeen
from calibrator.sweep import Limit, ProfileSweep
from dataplane.core.emulation.batching import BatchingEngine
from dataplane.core.emulation.values import BatchingConfig, Idle, SequenceRequest
from enginemodel.model import EngineConstants, decode_step_seconds, handoff_seconds
from enginemodel.profiles import EngineProfile


class VirtualClock:
    """Jumps to the next sleeper whenever everybody waits."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future]] = []
        self._count = 0

    def monotonic(self) -> float:
        return self._now

    def unix(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._count += 1
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, self._count, future))
        await future

    async def run(self, work) -> None:
        """Run a coroutine to its end, jumping whenever it waits."""
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(8):
                await asyncio.sleep(0)
            if self._sleepers and not task.done():
                self._now, _, future = heapq.heappop(self._sleepers)
                if not future.done():
                    future.set_result(None)
        await task


class VirtualInstrument:
    """One emulated engine with known constants, jitter and stalls."""

    def __init__(
        self,
        target: Target,
        constants: EngineConstants,
        clock: VirtualClock,
        *,
        seed: int,
        dies_after: int | None = None,
        jitter_sigma: float = 0.05,
        stall_probability: float = 0.01,
        call_seconds: float = 0.0,
    ) -> None:
        self.target = target
        self.busy = asyncio.Lock()
        self.probes = 0
        self.held = 0
        self._constants = constants
        self._clock = clock
        self._rng = Random(seed)
        self._dies_after = dies_after
        self._jitter, self._stalls = jitter_sigma, stall_probability
        self._call_seconds = call_seconds

    def engine(self) -> BatchingEngine:
        limits = self.target.limits
        config = BatchingConfig(
            constants=self._constants,
            kv_total_tokens=limits.kv_total_tokens,
            kv_bytes_per_token=self.target.kv_bytes_per_token,
            block_tokens=16,
            max_num_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_batched_tokens,
            jitter_sigma=self._jitter,
            stall_probability=self._stalls,
            stall_seconds=self._rng.uniform(0.010, 0.030),
        )
        return BatchingEngine(config, self._rng)

    async def probe_prefill(self, prompt_tokens, seed, timeout_seconds):
        """A call comes around the steps; the first prompt to come runs alone, held up by the others."""
        await self._count_probe()
        engine, times = self.engine(), {}
        late = [
            SequenceRequest(request_id=str(index), prompt_tokens=tokens)
            for index, tokens in enumerate(prompt_tokens)
        ]
        engine.submit(late.pop(0))
        crowd_seconds = 0.2 * self._call_seconds * len(late)
        now = 0.0
        while True:
            while late and (now > 0 or self._call_seconds == 0):
                engine.submit(late.pop(0))
            if isinstance(step := engine.begin_step(now), Idle):
                break
            now = step.end_seconds
            for request_id in engine.complete_step().finished:
                times[int(request_id)] = now
        await self._clock.sleep(now + self._call_seconds + 0.002)
        around_seconds = self._call_seconds + crowd_seconds
        return [times[index] + around_seconds for index in range(len(prompt_tokens))]

    async def probe_decode(self, point: DecodePoint, seed, timeout_seconds):
        await self._count_probe()
        engine, now, steps = self.engine(), 0.0, []
        generated = dict.fromkeys(map(str, range(point.sequences)), 0)
        for request_id in generated:
            engine.submit(
                SequenceRequest(
                    request_id=request_id,
                    prompt_tokens=point.context_tokens,
                    output_tokens=point.output_tokens,
                )
            )
        before: set[str] = set()
        while not isinstance(step := engine.begin_step(now), Idle):
            now = step.end_seconds
            progressed = engine.complete_step().progressed
            for request_id in progressed:
                generated[request_id] += 1
            kv_tokens = sum(point.context_tokens + generated[r] for r in progressed)
            if progressed:
                unsteady = set(progressed) != before
                steps.append(StepSeen(step.duration_seconds, len(progressed), kv_tokens, unsteady))
                before = set(progressed)
        await self._clock.sleep(now + 0.002)
        return steps

    async def prefill(self, prompt, timeout_seconds=60.0):
        seconds = (await self.probe_prefill([len(prompt)], 0, timeout_seconds))[0]
        self.held += 1
        return Prefilled("r", object(), len(prompt), 0, seconds)

    async def decode(self, prompt, max_tokens, held=None, timeout_seconds=60.0):
        await self._count_probe()
        step = decode_step_seconds(self._constants, 1, len(prompt))
        step *= self._rng.lognormvariate(0.0, self._jitter)
        moved = handoff_seconds(self._constants, len(prompt), self.target.kv_bytes_per_token)
        await self._clock.sleep(moved + max_tokens * step)
        return Generated((1,) * max_tokens, len(prompt), max_tokens, moved + step)

    async def release(self, held, prompt):
        self.held -= 1
        return True

    async def _count_probe(self) -> None:
        self.probes += 1
        if self._dies_after is not None and self.probes > self._dies_after:
            await self._clock.sleep(0.001)
            raise ProbeFailed(self.target.instance_id, "UNAVAILABLE: connection refused")


def target_of(name: str, profile: EngineProfile, role: str) -> Target:
    """Return a target of one engine of a profile."""
    return Target(
        instance_id=name,
        address="",
        epoch="e",
        prefills=role in {"prefill", "mixed"},
        decodes=role in {"decode", "mixed"},
        model="m",
        profile=profile.name,
        pairing_key="k",
        block_tokens=16,
        vocab_size=1000,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        limits=Limits(
            profile.max_model_tokens,
            profile.max_batched_tokens,
            profile.max_num_seqs,
            profile.kv_total_tokens,
        ),
        fingerprint="f",
        handoff_lease_seconds=30.0,
    )


async def inline(work):
    """Do work at once, in place of a thread."""
    return work()


async def calibrate(
    profile: EngineProfile,
    budget_seconds: float,
    *,
    seed: int = 0,
    slowness: dict[str, float] | None = None,
    dies_after: dict[str, int] | None = None,
    guess: EngineConstants | None = None,
    prefills: int = 2,
    decodes: int = 4,
    **noise,
) -> tuple[ProfileSweep, float, dict[str, VirtualInstrument]]:
    """Sweep a pool of one profile; returns the sweep, virtual seconds taken and the engines."""
    slowness, dies_after = slowness or {}, dies_after or {}
    targets = [target_of(f"prefill-{i}", profile, "prefill") for i in range(prefills)]
    targets += [target_of(f"decode-{i}", profile, "decode") for i in range(decodes)]
    clock = VirtualClock()
    instruments = {
        t.instance_id: VirtualInstrument(
            t,
            profile.constants.slowed(slowness.get(t.instance_id, 1.0)),
            clock,
            seed=seed * 100 + index,
            dies_after=dies_after.get(t.instance_id),
            **noise,
        )
        for index, t in enumerate(targets)
    }
    sweep = ProfileSweep(
        ProfileTargets(profile.name, tuple(targets)),
        instruments,
        Limit(asyncio.Semaphore(len(targets)), clock, budget_seconds, inline),
        guess=guess or replace(profile.constants, d0_seconds=0.05, p2_seconds_per_token=2e-4),
        rng=Random(seed),
        progress=lambda *_: None,
    )

    async def work() -> None:
        await all_of(
            sweep.run_side(name, 0.8 * budget_seconds, asyncio.Semaphore(8)) for name in sweep.sides
        )
        pairs = [("prefill-0", "decode-0"), ("prefill-1", "decode-1"), ("prefill-0", "decode-2")]
        pairs = [pair for pair in pairs if set(pair) <= instruments.keys()]
        await sweep.run_handoffs(pairs, budget_seconds - clock.monotonic())
        await sweep.refit()

    await clock.run(work())
    return sweep, clock.monotonic(), instruments
