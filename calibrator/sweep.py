"""Measures one profile: its prefill side, its decode side, its hand-offs, each within a time.

Every instance has a worker a side that asks the planner for its next point; an instance that both
prefills and decodes runs one probe at a time. An instance that fails is left out from then on; the
last one of a side to fail ends the sweep.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Generic, Literal, Protocol, TypeVar

from calibrator.agents import random_prompt
from calibrator.cluster import ProfileTargets
from calibrator.concurrently import all_of
from calibrator.design import DecodePoint, PrefillPoint
from calibrator.errors import InstanceLost, ProbeFailed
from calibrator.fit import PartFit
from calibrator.freeing import free
from calibrator.instrument import Instrument
from calibrator.observations import (
    HandoffObservation,
    PrefillObservation,
    StepShape,
    split_into_steps,
    steady_middle,
)
from calibrator.planner import DecodeSide, HandoffSide, Planner, PrefillSide, Side, Task
from calibrator.profile import Observations, ProfileFit, fit_profile
from calibrator.publish import Refusal
from enginemodel.model import EngineConstants
from servicekit.clock import Clock

PointT = TypeVar("PointT")
SideName = Literal["prefill", "decode"]
Worker = tuple[Instrument, ...]
"""What measures together: one instance, or a prefill and a decode instance."""

_PRECISE = 0.01
"""A sweep ends early when every constant's standard error is below this share of it."""
_PRECISE_SCALE = 0.02
_PRECISE_INFLUENCE = 0.005
"""… or moves no prediction by more than that."""
_REFIT_GROWTH = 1.5
_FEWEST_TO_FIT = 8
_TIMEOUT_FACTOR = 20.0
_TIMEOUT_SECONDS = 10.0
_GRACE_FACTOR = 3.0
_HANDOFF_OUTPUT_TOKENS = 2


class Progress(Protocol):
    """Where progress is shown."""

    def __call__(self, profile: str, found: ProfileFit | None, observations: int) -> None:
        """Show how far a profile is."""
        ...


class Compute(Protocol):
    """Runs a long computation without holding the loop up."""

    async def __call__(self, work: Callable[[], ProfileFit]) -> ProfileFit:
        """Return what `work` returns."""
        ...


@dataclass(frozen=True, slots=True)
class Limit:
    """What all sweeps share.

    Attributes:
        slots: How many hand-offs run at once.
        clock: By which time is kept.
        end_seconds: End of the budget, by that clock.
        compute: Where fits run.
    """

    slots: asyncio.Semaphore
    clock: Clock
    end_seconds: float
    compute: Compute


class ProfileSweep:
    """Measures one profile.

    Args:
        targets: Its instances.
        instruments: Of all instances, by id.
        limit: Concurrency and clock.
        guess: What to expect before anything is fitted.
        rng: Shuffles, draws lengths and seeds.
        progress: Told after each fit.
    """

    def __init__(
        self,
        targets: ProfileTargets,
        instruments: Mapping[str, Instrument],
        limit: Limit,
        *,
        guess: EngineConstants,
        rng: Random,
        progress: Progress,
    ) -> None:
        self.targets = targets
        self.seen = Observations()
        self.lost: dict[str, str] = {}
        self.found: ProfileFit | None = None
        self._instruments = instruments
        self._limit = limit
        self._guess = guess
        self._rng = rng
        self._progress = progress
        self._shortest: dict[str, float] = {}
        self._fitted_at = 0
        self._fitting = asyncio.Lock()

    @property
    def sides(self) -> tuple[SideName, ...]:
        """What there is to sweep beside hand-offs."""
        there: tuple[tuple[SideName, bool], ...] = (
            ("prefill", bool(self.targets.prefills)),
            ("decode", bool(self.targets.decodes)),
        )
        return tuple(name for name, has_instances in there if has_instances)

    async def run_side(
        self, name: SideName, sweep_seconds: float, slots: asyncio.Semaphore
    ) -> None:
        """Sweep one side.

        Args:
            name: Which.
            sweep_seconds: How long it may take.
            slots: How many of its probes run at once.

        Raises:
            InstanceLost: It has no instance left.
        """
        limits = self.targets.limits
        if name == "prefill":
            workers = [(self._instruments[t.instance_id],) for t in self.targets.prefills]
            prefill = self._planner(PrefillSide(limits), sweep_seconds, len(workers))
            await self._sweep(_Side(name, prefill, self._measure_prefill, slots), workers)
        else:
            workers = [(self._instruments[t.instance_id],) for t in self.targets.decodes]
            decode = self._planner(DecodeSide(limits), sweep_seconds, len(workers))
            await self._sweep(_Side(name, decode, self._measure_decode, slots), workers)

    async def run_handoffs(self, pairs: Sequence[tuple[str, str]], sweep_seconds: float) -> None:
        """Pull prompts of many lengths over a sample of pairs of idle engines.

        Args:
            pairs: (prefill, decode) instance ids.
            sweep_seconds: How long it may take.

        Raises:
            InstanceLost: No pair is left.
        """
        side = HandoffSide(self.targets.limits, self.targets.kv_bytes_per_token)
        planner = self._planner(side, sweep_seconds, len(pairs))
        workers = [(self._instruments[p], self._instruments[d]) for p, d in pairs]
        side_of = _Side("handoff", planner, self._measure_handoff, self._limit.slots)
        await self._sweep(side_of, workers)

    def missing_parts(self, *, handoff: bool) -> list[Refusal]:
        """Return a refusal for each part that could be measured but has no observation.

        Args:
            handoff: Whether there are pairs to hand over.
        """
        handoff = handoff and self.targets.kv_bytes_per_token > 0
        wanted = {
            "prefill": (bool(self.targets.prefills), bool(self.seen.prefill)),
            "decode": (bool(self.targets.decodes), bool(self.seen.decode)),
            "handoff": (handoff, bool(self.seen.handoff)),
        }
        return [
            Refusal("NOT_IDENTIFIED", f"{part} was not measured within the budget; give more")
            for part, (there, seen) in wanted.items()
            if there and not seen
        ]

    @property
    def constants(self) -> EngineConstants:
        """The best knowledge now."""
        return self.found.constants if self.found else self._guess

    async def refit(self) -> None:
        """Fit everything seen so far, beside the loop."""
        if not (self.seen.prefill or self.seen.decode):
            return
        snapshot = Observations(
            list(self.seen.prefill), list(self.seen.decode), list(self.seen.handoff)
        )
        self.found = await self._limit.compute(
            lambda: fit_profile(
                snapshot,
                kv_bytes_per_token=self.targets.kv_bytes_per_token,
                fallback=self._guess,
            )
        )
        self._progress(self.targets.profile, self.found, self.seen.count)

    def _planner(self, side: Side[PointT], sweep_seconds: float, workers: int) -> Planner[PointT]:
        return Planner(
            side,
            Random(self._rng.random()),
            self.constants,
            sweep_seconds=sweep_seconds,
            workers=workers,
        )

    async def _sweep(self, side: "_Side[PointT]", workers: Sequence[Worker]) -> None:
        """Let every instance, or pair, work until the planner has no more."""
        begin = self._limit.clock.monotonic()
        await all_of(self._work(side, worker, begin) for worker in workers)
        if workers and all(self._is_lost(worker) for worker in workers):
            reasons = "; ".join(f"{name}: {text}" for name, text in sorted(self.lost.items()))
            raise InstanceLost(
                f"profile {self.targets.profile} has no instance left to measure {side.name} on "
                f"({reasons})"
            )

    async def _work(self, side: "_Side[PointT]", worker: Worker, begin: float) -> None:
        """Measure points on one instance or pair."""
        clock = self._limit.clock
        locks = [i.busy for i in sorted(worker, key=lambda i: i.target.instance_id)]
        while not self._is_lost(worker):
            async with AsyncExitStack() as stack:
                for lock in (*locks, side.slots):
                    await stack.enter_async_context(lock)
                task = side.planner.next(clock.monotonic() - begin)
                if task is None:
                    return
                before = clock.monotonic()
                try:
                    told = await side.measure(worker, task)
                except ProbeFailed as error:
                    side.planner.put_back(task)
                    self.lost[error.instance_id] = error.message
                    return
                side.planner.took(task, clock.monotonic() - before, told=told)
            await self._learn(side)

    def _is_lost(self, worker: Worker) -> bool:
        return any(instrument.target.instance_id in self.lost for instrument in worker)

    async def _learn(self, side: "_Side[PointT]") -> None:
        """Fit again when enough is new, and tell the planner."""
        count = self.seen.count
        due = count >= max(_FEWEST_TO_FIT, self._fitted_at * _REFIT_GROWTH)
        if not due or self._fitting.locked():
            return
        async with self._fitting:
            self._fitted_at = count
            await self.refit()
        if self.found is not None:
            part = self.found.parts.get(side.name)
            side.planner.learn(self.found.constants, precise=is_precise(part))

    async def _measure_prefill(self, worker: Worker, task: Task[PrefillPoint]) -> bool:
        """Run one prefill probe; prompts at once are told apart by when they were done.

        Returns:
            Whether it told anything, as with the other probes.
        """
        (instrument,) = worker
        name, lengths = instrument.target.instance_id, task.point.prompt_tokens
        seen: list[tuple[tuple[StepShape, ...], float, bool]]
        seconds = await instrument.probe_prefill(lengths, self._seed(), self._timeout(task))
        if len(lengths) == 1:
            self._shortest[name] = min(self._shortest.get(name, math.inf), seconds[0])
            seen = [(task.point.steps(instrument.target.limits), seconds[0], True)]
        elif name in self._shortest:
            steps = split_into_steps(lengths, seconds, self._shortest[name])
            # Of several steps the first is left out: others' calls crowd the one around it.
            seen = [((shape,), took, False) for shape, took in steps[1:]]
            seen = seen or [((shape,), took, True) for shape, took in steps]
        else:
            return True
        self.seen.prefill += [
            PrefillObservation(
                instance_id=name,
                steps=steps,
                seconds=duration,
                held_out=task.held_out,
                called=called,
            )
            for steps, duration, called in seen
        ]
        return bool(seen)

    async def _measure_decode(self, worker: Worker, task: Task[DecodePoint]) -> bool:
        """Run one decode probe."""
        (instrument,) = worker
        steps = await instrument.probe_decode(task.point, self._seed(), self._timeout(task))
        name = instrument.target.instance_id
        observation = steady_middle(name, steps, task.point.sequences, held_out=task.held_out)
        if observation is not None:
            self.seen.decode.append(observation)
        return observation is not None

    async def _measure_handoff(self, worker: Worker, task: Task[int]) -> bool:
        """Prefill on one side, pull on the other; whatever happens, the KV is freed."""
        first, second = worker
        tokens, timeout_seconds = task.point, self._timeout(task)
        prompt = random_prompt(tokens, first.target.vocab_size, self._seed())
        held = await first.prefill(prompt, timeout_seconds)
        pulled = False
        try:
            generated = await second.decode(prompt, _HANDOFF_OUTPUT_TOKENS, held, timeout_seconds)
            pulled = True
        finally:
            if not pulled:
                await asyncio.shield(free(held, prompt, first, self._instruments))
        self.seen.handoff.append(
            HandoffObservation(
                prefill_instance_id=first.target.instance_id,
                decode_instance_id=second.target.instance_id,
                prompt_tokens=tokens,
                seconds=generated.first_token_seconds,
                held_out=task.held_out,
            )
        )
        return True

    def _timeout(self, task: Task[PointT]) -> float:
        """Return when a probe is given up: generous, but never far beyond the budget."""
        generous = max(_TIMEOUT_SECONDS, task.predicted_seconds * _TIMEOUT_FACTOR)
        left_seconds = self._limit.end_seconds - self._limit.clock.monotonic()
        return min(generous, max(left_seconds, 0.0) + _GRACE_FACTOR * task.predicted_seconds + 1.0)

    def _seed(self) -> int:
        return self._rng.getrandbits(63)


@dataclass(frozen=True, slots=True)
class _Side(Generic[PointT]):
    """One of the two sweeps."""

    name: str
    planner: Planner[PointT]
    measure: Callable[[Worker, Task[PointT]], Awaitable[bool]]
    slots: asyncio.Semaphore


def is_precise(part: PartFit | None) -> bool:
    """Return whether more points would not change a fit that matters."""
    if part is None:
        return False
    constants = all(
        constant.relative_error <= _PRECISE or constant.influence <= _PRECISE_INFLUENCE
        for constant in part.constants.values()
    )
    return constants and all(error <= _PRECISE_SCALE for error in part.scale_error.values())
