"""Calibration probes: run directly on an engine, timed by what comes out of it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from dataplane.agent.engine import Chunk, DecodeJob, Engine, EngineDescription, Sampling
from servicekit.clock import Clock

_FIRST_PROBE_ID = 10
"""Ids below it are special in most vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """One engine step, seen from token gaps.

    Attributes:
        duration_seconds: From the step before.
        sequences: That got a token.
        kv_tokens: They held, the new token included.
        unsteady: A sequence joined or left, so it speaks of no steady batch.
    """

    duration_seconds: float
    sequences: int
    kv_tokens: int
    unsteady: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens of one stream that arrived together."""

    at_seconds: float
    stream: int
    tokens: int


def steps_seen(arrivals: Sequence[Arrival], context_tokens: int) -> list[StepSeen]:
    """Put the arrivals of many streams together into steps of the whole batch.

    A step ends where a stream that has already got its tokens gets more. Tokens that arrive
    together (an engine faster than its reader) count as that many steps of equal length.

    Args:
        arrivals: Of all streams, in order of time.
        context_tokens: What each sequence started from.
    """
    groups: list[dict[int, Arrival]] = []
    for arrival in arrivals:
        if not groups or arrival.stream in groups[-1]:
            groups.append({})
        groups[-1][arrival.stream] = arrival
    generated: dict[int, int] = {}
    seen: list[StepSeen] = []
    before: dict[int, Arrival] = {}
    for group in groups:
        for stream, arrival in group.items():
            generated[stream] = generated.get(stream, 0) + arrival.tokens
        if before:
            seen.append(_step(before, group, generated, context_tokens))
        before = group
    return seen


def _step(
    before: dict[int, Arrival],
    group: dict[int, Arrival],
    generated: dict[int, int],
    context_tokens: int,
) -> StepSeen:
    steps = max(arrival.tokens for arrival in group.values())
    even = all(arrival.tokens == steps for arrival in group.values())
    seconds = _middle(group) - _middle(before)
    middle_tokens = sum(generated[stream] for stream in group) - len(group) * (steps - 1) // 2
    return StepSeen(
        duration_seconds=max(seconds, 0.0) / steps,
        sequences=len(group),
        kv_tokens=context_tokens * len(group) + middle_tokens,
        unsteady=not even or group.keys() != before.keys(),
    )


def _middle(group: dict[int, Arrival]) -> float:
    """Return the median arrival: late readers at either end do not move it."""
    times = sorted(arrival.at_seconds for arrival in group.values())
    return times[len(times) // 2]


class Prober:
    """Runs probes on an engine that is otherwise idle; leaves nothing on it."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._runs = 0

    async def prefill_seconds(
        self, prompt_tokens: Sequence[int], seed: int, description: EngineDescription
    ) -> list[float]:
        """Send prompts at once; return for each the time to its first token.

        They are plain generations of one token: the same work as a prefill leg, and no KV is held
        afterwards.
        """
        prompts = self._prompts(prompt_tokens, seed, description)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._first_token(prompt)) for prompt in prompts]
        return [task.result() for task in tasks]

    async def decode_steps(
        self,
        *,
        sequences: int,
        context_tokens: int,
        output_tokens: int,
        seed: int,
        description: EngineDescription,
    ) -> list[StepSeen]:
        """Run generations together; return the steps seen."""
        prompts = self._prompts([context_tokens] * sequences, seed, description)
        arrivals: list[Arrival] = []
        async with asyncio.TaskGroup() as group:
            for stream, prompt in enumerate(prompts):
                group.create_task(self._generate(stream, prompt, output_tokens, arrivals))
        return steps_seen(arrivals, context_tokens)

    def _prompts(
        self, prompt_tokens: Sequence[int], seed: int, description: EngineDescription
    ) -> list[list[int]]:
        """Make random prompts, so that no prefix cache helps."""
        rng = Random(seed)
        last = max(description.vocab_size - 1, _FIRST_PROBE_ID)
        return [
            [rng.randint(_FIRST_PROBE_ID, last) for _ in range(tokens)] for tokens in prompt_tokens
        ]

    async def _first_token(self, prompt: list[int]) -> float:
        begin = self._clock.monotonic()
        await self._run(prompt, 1, lambda _: None)
        return self._clock.monotonic() - begin

    async def _generate(
        self, stream: int, prompt: list[int], output_tokens: int, arrivals: list[Arrival]
    ) -> None:
        def note(chunk: Chunk) -> None:
            if chunk.token_ids:
                now = self._clock.monotonic()
                arrivals.append(Arrival(now, stream, len(chunk.token_ids)))

        await self._run(prompt, output_tokens, note)

    async def _run(self, prompt: list[int], max_tokens: int, note: Callable[[Chunk], None]) -> None:
        """Generate exactly `max_tokens`; whatever happens, nothing stays on the engine."""
        self._runs += 1
        job = DecodeJob(
            request_id=f"probe-{id(self):x}-{self._runs}",
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=Sampling(temperature=0.0, ignore_eos=True),
        )
        stream = await self._engine.decode(job)
        try:
            while True:
                chunk = await stream.read()
                note(chunk)
                if chunk.finish is not None:
                    return
        finally:
            await stream.close()
