"""Poisson traffic on emulated engines in virtual time, and what the control plane hears of it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from dataplane.core.emulation.batching import BatchingEngine
from dataplane.core.emulation.values import BatchingConfig, Idle, SequenceRequest, Step
from enginemodel.model import EngineConstants
from enginemodel.profiles import EngineProfile


@dataclass(frozen=True)
class Heard:
    """One finished request, as one side of it shows."""

    now: float
    tokens: int = 0
    seconds: float = 0.0
    sequences: float = 0.0
    kv_tokens: float = 0.0


class Traffic:
    """One engine under Poisson arrivals; `slow_from` makes it slower from then on."""

    def __init__(
        self,
        profile: EngineProfile,
        *,
        seed: int,
        slow_from: float = math.inf,
        slowness: float = 1.4,
    ) -> None:
        self._profile = profile
        self._rng = Random(seed)
        self._slow_from, self._slowness = slow_from, slowness

    def prefills(self, until: float, rate: float) -> Iterator[Heard]:
        """Yield prompts that found the engine free, with their time."""
        now, engine, arrived = 0.0, self._engine(self._profile.constants), {}
        slow, busy_until = False, 0.0
        due = self._rng.expovariate(rate)
        while now < until:
            if now >= self._slow_from and not slow and not arrived:
                engine = self._engine(self._profile.constants.slowed(self._slowness))
                slow = True
            while due <= now:
                tokens = min(max(round(self._rng.lognormvariate(5.5, 1.0)), 8), 4000)
                name = f"{due:.9f}"
                arrived[name] = (due, tokens, not arrived and due >= busy_until)
                engine.submit(SequenceRequest(request_id=name, prompt_tokens=tokens))
                due += self._rng.expovariate(rate)
            step = engine.begin_step(now)
            if isinstance(step, Idle):
                now = due
                continue
            now = busy_until = step.end_seconds
            for name in engine.complete_step().finished:
                began, tokens, free = arrived.pop(name)
                if free:
                    yield Heard(now, tokens=tokens, seconds=now - began)

    def decodes(self, until: float, rate: float) -> Iterator[Heard]:
        """Yield finished generations, with the batch that telemetry showed meanwhile."""
        now, engine = 0.0, self._engine(self._profile.constants)
        slow = False
        live: dict[str, list[float]] = {}
        due = self._rng.expovariate(rate)
        reports: list[tuple[float, float, float]] = []
        while now < until:
            if now >= self._slow_from and not slow and not live:
                engine = self._engine(self._profile.constants.slowed(self._slowness))
                slow = True
            while due <= now and (slow or now < self._slow_from):
                prompt = round(self._rng.uniform(20, 600))
                output = min(max(round(self._rng.lognormvariate(4.3, 0.6)), 8), 400)
                live[f"{due:.9f}"] = []
                engine.submit(
                    SequenceRequest(
                        request_id=f"{due:.9f}",
                        prompt_tokens=prompt,
                        output_tokens=output,
                        pull=True,
                    )
                )
                engine.content_arrived(f"{due:.9f}", output)
                due += self._rng.expovariate(rate)
            due = max(due, now)
            step = engine.begin_step(now)
            for name in engine.take_news().started:
                engine.content_arrived(name, 100)
            if isinstance(step, Idle):
                now = min(step.until_seconds or due, max(due, now + 1e-6))
                continue
            now = step.end_seconds
            outcome = engine.complete_step()
            reports.append((now, *self._report(engine, step)))
            for name in outcome.progressed:
                live[name].append(now)
            for name in outcome.finished:
                times = live.pop(name)
                if len(times) > 1:
                    window = [r for r in reports[-600:] if times[0] <= r[0] <= times[-1]]
                    yield Heard(
                        now,
                        seconds=(times[-1] - times[0]) / (len(times) - 1),
                        sequences=sum(r[1] for r in window) / len(window),
                        kv_tokens=sum(r[2] for r in window) / len(window),
                    )

    def _report(self, engine: BatchingEngine, step: Step) -> tuple[float, float]:
        """What the engine says of its load: whole blocks, pulls under way included."""
        return max(engine.running, step.sequences), engine.kv_used_tokens

    def _engine(self, constants: EngineConstants) -> BatchingEngine:
        profile = self._profile
        config = BatchingConfig(
            constants=constants,
            kv_total_tokens=profile.kv_total_tokens,
            kv_bytes_per_token=profile.kv_bytes_per_token,
            block_tokens=profile.block_tokens,
            max_num_seqs=profile.max_num_seqs,
            max_batched_tokens=profile.max_batched_tokens,
            jitter_sigma=0.05,
            stall_probability=0.01,
            stall_seconds=0.02,
        )
        return BatchingEngine(config, self._rng)
