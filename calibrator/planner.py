"""The order of a sweep: grid, refinement, held-out points, always within the time that is left."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, Protocol, TypeVar

import numpy as np

from calibrator.design import (
    DecodePoint,
    Limits,
    PrefillPoint,
    choose,
    decode_cost_seconds,
    decode_grid,
    decode_rows,
    handoff_cost_seconds,
    handoff_grid,
    handoff_rows,
    prefill_cost_seconds,
    prefill_grid,
    prefill_rows,
    random_decode,
    random_prefill,
)
from calibrator.robust import Array
from enginemodel.model import EngineConstants

PointT = TypeVar("PointT")

_HELDOUT_FROM = 0.8
"""Share of a sweep's time after which only held-out points are measured."""
_GRID_UNTIL = 0.5
"""Share of a sweep's time in which the grid must be done."""
_COSTLIEST_SHARE = 0.1
"""No point may cost more than this share of a sweep's time, or twice the cheapest."""
_HELDOUT_POINTS = 40
_BATCH = 12
_MOST_VOID = 2
_PROBE_OVERHEAD_SECONDS = 0.004
"""What a probe takes beside its steps; keeps the design from living on the shortest points."""
_PACE_WEIGHT = 0.2


class Side(Protocol[PointT]):
    """What differs between sweeping prefill and sweeping decode."""

    def grid(self, *, fine: bool) -> list[PointT]:
        """Return the points of a coarse or a fine grid."""
        ...

    def random(self, rng: Random) -> PointT | None:
        """Return a random point."""
        ...

    def cost_seconds(self, constants: EngineConstants, point: PointT) -> float:
        """Return what measuring a point takes."""
        ...

    def rows(self, constants: EngineConstants, points: Sequence[PointT]) -> Array:
        """Return the share of each constant in each point's time, shape (n, constants)."""
        ...


@dataclass(frozen=True, slots=True)
class PrefillSide:
    """Sweeps prompts."""

    limits: Limits

    def grid(self, *, fine: bool) -> list[PrefillPoint]:
        """Return prompts alone and together."""
        return prefill_grid(self.limits, 2**0.5 if fine else 2.0)

    def random(self, rng: Random) -> PrefillPoint | None:
        """Return a prompt of random length."""
        return random_prefill(self.limits, rng)

    def cost_seconds(self, constants: EngineConstants, point: PrefillPoint) -> float:
        """Return the time of its steps."""
        return prefill_cost_seconds(constants, point, self.limits)

    def rows(self, constants: EngineConstants, points: Sequence[PrefillPoint]) -> Array:
        """Return the shares of p1, p2, p3, p0."""
        return prefill_rows(constants, [point.steps(self.limits) for point in points])


@dataclass(frozen=True, slots=True)
class DecodeSide:
    """Sweeps batches."""

    limits: Limits

    def grid(self, *, fine: bool) -> list[DecodePoint]:
        """Return batch sizes by contexts."""
        return decode_grid(self.limits, 2.0 if fine else 4.0)

    def random(self, rng: Random) -> DecodePoint | None:
        """Return a random batch."""
        return random_decode(self.limits, rng)

    def cost_seconds(self, constants: EngineConstants, point: DecodePoint) -> float:
        """Return the time to fill the batch and to run it."""
        return decode_cost_seconds(constants, point, self.limits)

    def rows(self, constants: EngineConstants, points: Sequence[DecodePoint]) -> Array:
        """Return the shares of d0, d1, d2."""
        return decode_rows(constants, [(point.sequences, point.kv_tokens) for point in points])


@dataclass(frozen=True, slots=True)
class HandoffSide:
    """Sweeps the lengths of prompts that are handed over; a point is a length in tokens."""

    limits: Limits
    kv_bytes_per_token: int

    def grid(self, *, fine: bool) -> list[int]:
        """Return lengths up to the model's limit."""
        return handoff_grid(self.limits, 2**0.5 if fine else 2.0)

    def random(self, rng: Random) -> int | None:
        """Return a length; transfers are even over lengths, not over their logarithms."""
        lengths = self.grid(fine=False)
        return rng.randint(lengths[0], lengths[-1])

    def cost_seconds(self, constants: EngineConstants, point: int) -> float:
        """Return the time of prefill, pull and first steps."""
        return handoff_cost_seconds(constants, point, self.kv_bytes_per_token, self.limits)

    def rows(self, constants: EngineConstants, points: Sequence[int]) -> Array:
        """Return the shares of h0 and of the transfer."""
        return handoff_rows(constants, points, self.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class Task(Generic[PointT]):
    """One probe to run."""

    point: PointT
    held_out: bool
    predicted_seconds: float


class Planner(Generic[PointT]):
    """Hands out the next point of one sweep, to as many instances as ask.

    Args:
        side: What is swept.
        rng: Shuffles and draws.
        constants: First guess of what things cost; `learn` replaces it.
        sweep_seconds: How long the sweep may take; without any, nothing is handed out.
        workers: Instances that measure at once.
    """

    def __init__(
        self,
        side: Side[PointT],
        rng: Random,
        constants: EngineConstants,
        *,
        sweep_seconds: float,
        workers: int,
    ) -> None:
        self._side = side
        self._rng = rng
        self._constants = constants
        self._sweep_seconds = sweep_seconds
        self._workers = workers
        self._pace = 1.0
        self._grid = side.grid(fine=False)
        self._queue: deque[PointT] = deque()
        self._measured: list[PointT] = []
        self._void: Counter[PointT] = Counter()
        self._heldout = 0
        self._grid_begun = self._grid_done = False
        self._precise = False

    def __repr__(self) -> str:
        """Show how far it is."""
        return (
            f"Planner(measured={len(self._measured)}, held_out={self._heldout}, "
            f"queued={len(self._queue)}, precise={self._precise}, pace={self._pace:.2f})"
        )

    def learn(self, constants: EngineConstants, *, precise: bool) -> None:
        """Take over a new fit; `precise` when more points would not better it."""
        self._constants = constants
        self._precise = precise

    def next(self, spent_seconds: float) -> Task[PointT] | None:
        """Return what to measure now; None when the sweep is over.

        Args:
            spent_seconds: Since the sweep began.
        """
        left_seconds = self._sweep_seconds - spent_seconds
        if left_seconds <= 0:
            return None
        spent_share = spent_seconds / self._sweep_seconds
        fitting = spent_share < _HELDOUT_FROM and not (self._precise and self._grid_done)
        if fitting and not self._grid_done and spent_share > _GRID_UNTIL:
            self._queue.clear()
        # Two refills at most: the grid, then what tells most. Where nothing of it fits into the
        # time that is left, the sweep is over.
        for _ in range(3 if fitting else 0):
            while self._queue:
                point = self._queue.popleft()
                seconds = self._predicted_seconds(point)
                if seconds <= left_seconds:
                    self._measured.append(point)
                    return Task(point, held_out=False, predicted_seconds=seconds)
            self._refill()
        return self._next_heldout(left_seconds)

    def put_back(self, task: Task[PointT]) -> None:
        """Take back a task whose instance failed."""
        if task.held_out:
            self._heldout -= 1
        else:
            self._measured.remove(task.point)
            self._queue.appendleft(task.point)

    def took(self, task: Task[PointT], seconds: float, *, told: bool = True) -> None:
        """Tell how long a probe really took, everything included, and whether it told anything.

        A point that told nothing does not count as measured, and is not measured again once it has
        happened repeatedly.
        """
        if not told and not task.held_out:
            self._measured.remove(task.point)
            self._void[task.point] += 1
        ratio = min(max(seconds / task.predicted_seconds, 0.1), 10.0)
        self._pace *= ratio**_PACE_WEIGHT

    def _next_heldout(self, left_seconds: float) -> Task[PointT] | None:
        if self._heldout >= _HELDOUT_POINTS and self._precise:
            return None
        for _ in range(20):
            point = self._side.random(self._rng)
            if point is None:
                return None
            seconds = self._predicted_seconds(point)
            if seconds <= left_seconds and seconds <= self._costliest_seconds:
                self._heldout += 1
                return Task(point, held_out=True, predicted_seconds=seconds)
        return None

    @property
    def _costliest_seconds(self) -> float:
        cheapest = min((self._predicted_seconds(p) for p in self._grid), default=0.0)
        return max(_COSTLIEST_SHARE * self._sweep_seconds, 2 * cheapest)

    def _predicted_seconds(self, point: PointT) -> float:
        steps = self._side.cost_seconds(self._constants, point)
        return (steps + _PROBE_OVERHEAD_SECONDS) * self._pace

    def _affordable(self, points: Sequence[PointT]) -> list[PointT]:
        return [
            p
            for p in points
            if self._predicted_seconds(p) <= self._costliest_seconds and self._void[p] < _MOST_VOID
        ]

    def _refill(self) -> None:
        """Queue the grid first, then batches of the points that tell most a second."""
        if not self._grid_begun:
            self._grid_begun = True
            points = self._affordable(self._grid)
            self._rng.shuffle(points)
            self._queue.extend(points)
            return
        self._grid_done = True
        candidates = self._affordable(self._side.grid(fine=True))
        if not candidates:
            return
        rows = self._side.rows(self._constants, candidates)
        done = (
            self._side.rows(self._constants, self._measured)
            if self._measured
            else np.zeros((0, rows.shape[1]))
        )
        costs = [self._predicted_seconds(point) for point in candidates]
        count = max(_BATCH, 2 * self._workers)
        batch = [candidates[index] for index in choose(done, rows, costs, count)]
        self._rng.shuffle(batch)
        self._queue.extend(batch)
