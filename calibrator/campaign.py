"""One calibration from the roster to the result: gates, sweeps, hand-offs, fits, refusals."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from calibrator.agents import AgentClient
from calibrator.cluster import ProfileTargets, Target, by_profile, pairs_of
from calibrator.concurrently import all_of
from calibrator.errors import GateFailed, PublicationRefused
from calibrator.gate_result import GateResult
from calibrator.gates import Gates
from calibrator.profile import ProfileFit
from calibrator.publish import Rules, draft, refusals
from calibrator.result import ProfileResult
from calibrator.slo import ClassTargets, LightLoad, light_load, targets
from calibrator.sweep import Compute, Limit, ProfileSweep, Progress
from controlplane.core.values import Constants
from servicekit.clock import Clock

_HANDOFF_SHARE = 0.2
"""Of the time left after the gates, for hand-offs."""
_SIDE_WEIGHTS = {"prefill": 1.0, "decode": 2.0}
"""How sides share the time where they cannot run at once."""
_FINISH_SHARE = 0.03
"""Of the budget, kept for the last fit and for publication."""


class KnowsConstants(Protocol):
    """Where the constants come from that hold now."""

    async def current(self, profile: str) -> Constants:
        """Return a profile's current constants."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the operator asked for.

    Attributes:
        budget_seconds: Time for everything, > 0.
        seed: Of order, lengths and prompts.
        parallel: Probes at once over the whole cluster, >= 1.
        handoff_pairs: Pairs that hand-offs are measured on, for each profile of decode engines.
        rules: What may be published.
        tight_factor: Tight targets as a multiple of light load.
        loose_factor: Loose targets as a multiple of tight.
        reason: Why this is done, in words; published with the constants.
    """

    budget_seconds: float
    seed: int
    parallel: int
    handoff_pairs: int = 8
    rules: Rules = field(default_factory=Rules)
    tight_factor: float = 3.0
    loose_factor: float = 3.0
    reason: str = "steelyard calibrate"


@dataclass(slots=True)
class Findings:
    """What a campaign has found so far; also what an aborted one leaves behind."""

    gates: list[GateResult] = field(default_factory=list)
    round_trips: dict[str, float] = field(default_factory=dict)
    sweeps: list[ProfileSweep] = field(default_factory=list)
    profiles: list[ProfileResult] = field(default_factory=list)
    drafts: list[Constants] = field(default_factory=list)
    slo: dict[str, ClassTargets] = field(default_factory=dict)


class Campaign:
    """Runs one calibration; leaves nothing on the engines, whatever happens.

    Args:
        plan: What was asked for.
        clients: Of all instances, by id.
        control: Knows the constants that hold.
        found: Filled as the campaign goes on, so that an aborted one leaves something to read.
        clock: Keeps the budget.
        compute: Where fits run.
        progress: Told after each fit.
    """

    def __init__(
        self,
        plan: Plan,
        clients: Mapping[str, AgentClient],
        control: KnowsConstants,
        found: Findings,
        *,
        clock: Clock,
        compute: Compute,
        progress: Progress,
    ) -> None:
        self.found = found
        self._ready: Sequence[Target] = ()
        self._plan = plan
        self._clients = clients
        self._control = control
        self._clock = clock
        self._compute = compute
        self._progress = progress
        self._begin = clock.monotonic()
        self._slots = asyncio.Semaphore(plan.parallel)

    async def run(self, ready: Sequence[Target], *, announce: Callable[[str], None]) -> None:
        """Measure and judge; what is found lies in `found`.

        Args:
            ready: Instances to measure, at least one.
            announce: Told what goes on.

        Raises:
            GateFailed: The cluster answers wrongly.
            InstanceLost: The last instance of a kind died.
        """
        self._ready = ready
        gates = Gates(self._clients, self._slots, self._clock)
        try:
            announce("gates")
            await self._pass_gates(gates, ready)
            self.found.round_trips = await gates.round_trips(ready)
            announce("sweeps")
            await self._sweep(ready)
            announce("hand-offs")
            await self._hand_over(ready)
        finally:
            await asyncio.shield(_reset(gates, ready, self.found.sweeps))
        announce("fits")
        await all_of(sweep.refit() for sweep in self.found.sweeps)
        await self._judge()

    @property
    def elapsed_seconds(self) -> float:
        """Time since the campaign was made."""
        return self._clock.monotonic() - self._begin

    async def _pass_gates(self, gates: Gates, ready: Sequence[Target]) -> None:
        try:
            async with asyncio.timeout(self._plan.budget_seconds):
                self.found.gates = await gates.run(ready)
        except TimeoutError as error:
            raise GateFailed(
                f"the gates were not through within the budget of {self._plan.budget_seconds:g} s"
            ) from error
        failed = [gate for gate in self.found.gates if not gate.passed]
        if failed:
            raise GateFailed("; ".join(f"gate {gate.name}: {gate.detail}" for gate in failed))

    async def _sweep(self, ready: Sequence[Target]) -> None:
        """Sweep all profiles: side by side where there are slots for it, else in turn."""
        end_seconds = self._begin + self._plan.budget_seconds
        limit = Limit(self._slots, self._clock, end_seconds, self._compute)
        rng = Random(self._plan.seed)
        for group in by_profile(ready):
            guess = (await self._control.current(group.profile)).constants
            sweep = ProfileSweep(
                group,
                self._clients,
                limit,
                guess=guess,
                rng=Random(rng.random()),
                progress=self._progress,
            )
            self.found.sweeps.append(sweep)
        left_seconds = self._left_seconds() * ((1 - _HANDOFF_SHARE) if pairs_of(ready) else 1.0)
        sides = [(sweep, name) for sweep in self.found.sweeps for name in sweep.sides]
        if self._plan.parallel >= len(sides):
            # Each side has slots of its own: decode probes are much longer, and would starve others.
            share = self._plan.parallel // max(len(sides), 1)
            await all_of(
                sweep.run_side(name, left_seconds, asyncio.Semaphore(share))
                for sweep, name in sides
            )
            return
        unit_seconds = left_seconds / sum(_SIDE_WEIGHTS[name] for _, name in sides)
        for sweep, name in sides:
            await sweep.run_side(name, _SIDE_WEIGHTS[name] * unit_seconds, self._slots)

    async def _hand_over(self, ready: Sequence[Target]) -> None:
        """Measure hand-offs for each profile of decode engines, on a sample of its pairs."""
        await all_of(sweep.refit() for sweep in self.found.sweeps)
        lost = {name for sweep in self.found.sweeps for name in sweep.lost}
        pairs = [
            (prefill, decode)
            for prefill, decode in pairs_of(ready)
            if not {prefill.instance_id, decode.instance_id} & lost
        ]
        samples: list[tuple[ProfileSweep, list[tuple[str, str]]]] = []
        for sweep in self.found.sweeps:
            mine = [
                (prefill.instance_id, decode.instance_id)
                for prefill, decode in pairs
                if decode.profile == sweep.targets.profile
            ]
            if mine and sweep.targets.kv_bytes_per_token > 0:
                samples.append((sweep, mine[: self._plan.handoff_pairs]))
        for index, (sweep, sample) in enumerate(samples):
            left_seconds = self._left_seconds() / (len(samples) - index)
            await sweep.run_handoffs(sample, left_seconds)

    async def _judge(self) -> None:
        """Turn fits into drafts, with the reasons that speak against them."""
        handing = {decode.profile for _, decode in pairs_of(self._ready)}
        for sweep in self.found.sweeps:
            group, found = sweep.targets, sweep.found
            if found is None:
                raise PublicationRefused(
                    f"profile {group.profile}: no probe was answered within the budget of "
                    f"{self._plan.budget_seconds:g} s; give more"
                )
            constants = draft(
                group.profile,
                found,
                fingerprint=group.fingerprint,
                sample_count=sweep.seen.count,
                reason=self._plan.reason,
            )
            current = await self._control.current(group.profile)
            self.found.drafts.append(constants)
            self.found.profiles.append(
                ProfileResult(
                    profile=group.profile,
                    fingerprint=group.fingerprint,
                    instances=tuple(target.instance_id for target in group.targets),
                    lost_instances=dict(sweep.lost),
                    found=found,
                    refusals=[
                        *refusals(found, constants, current, self._plan.rules),
                        *sweep.missing_parts(handoff=group.profile in handing),
                    ],
                    version=0,
                    observations=sweep.seen.count,
                )
            )
        pools = _light_loads([(sweep.targets, sweep.found) for sweep in self.found.sweeps])
        if pools:
            self.found.slo = targets(
                pools,
                tight_factor=self._plan.tight_factor,
                loose_factor=self._plan.loose_factor,
            )

    def _left_seconds(self) -> float:
        """Time for probes: the budget without what the end takes."""
        return self._plan.budget_seconds * (1 - _FINISH_SHARE) - self.elapsed_seconds


def _light_loads(fitted: Sequence[tuple[ProfileTargets, ProfileFit | None]]) -> list[LightLoad]:
    """Return the light load of every pair of profiles that serve one model together."""
    loads: list[LightLoad] = []
    for first, prefill in fitted:
        for second, decode in fitted:
            models = {t.pool for t in first.prefills} & {t.pool for t in second.decodes}
            if models and prefill is not None and decode is not None:
                loads.append(
                    light_load(
                        prefill.constants,
                        decode.constants,
                        kv_bytes_per_token=second.kv_bytes_per_token,
                        chunk_tokens=first.limits.max_batched_tokens,
                    )
                )
    return loads


async def _reset(gates: Gates, ready: Sequence[Target], sweeps: Sequence[ProfileSweep]) -> None:
    """Empty the caches of whoever still answers."""
    lost = {name for sweep in sweeps for name in sweep.lost}
    await gates.reset_quietly([target for target in ready if target.instance_id not in lost])
