"""From outcomes to a seed's result."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from dataplane.core.cluster import SloPolicy
from dataplane.core.request import Targets
from enginemodel.model import decode_step_seconds, handoff_seconds, prefill_seconds
from enginemodel.profiles import EngineProfile
from evaluation.cells import Cell, SeedResult
from simulator.values import End, Outcome, Timing

SERIES_WINDOW_SECONDS = 2.0


def idle_ttft_seconds(profile: EngineProfile, timing: Timing, prompt_tokens: int) -> float:
    """Return the first token's time on an idle cluster: overhead, two round trips, prefill, pull, step."""
    constants = profile.constants
    return (
        timing.overhead_seconds
        + 4.0 * timing.wire_seconds
        + prefill_seconds(constants, prompt_tokens, profile.max_batched_tokens)
        + handoff_seconds(constants, prompt_tokens, profile.kv_bytes_per_token)
        + decode_step_seconds(constants, 1, prompt_tokens)
    )


def longest_feasible_prompt(profile: EngineProfile, timing: Timing, ttft_seconds: float) -> int:
    """Return the longest prompt whose first token an idle cluster gives within a target; 0 if none."""
    feasible, too_long = 0, profile.max_model_tokens + 1
    while too_long - feasible > 1:
        middle = (feasible + too_long) // 2
        if idle_ttft_seconds(profile, timing, middle) <= ttft_seconds:
            feasible = middle
        else:
            too_long = middle
    return feasible


class Scorer:
    """Collects outcomes of one seed; keeps three numbers a scored request and nothing else."""

    def __init__(self, cell: Cell, slo: SloPolicy, profile: EngineProfile, timing: Timing) -> None:
        self._cell = cell
        self._targets: Mapping[str, Targets] = slo.classes
        self._feasible_prompts = {
            name: longest_feasible_prompt(profile, timing, targets.ttft_seconds)
            for name, targets in slo.classes.items()
        }
        self._ttft: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._good: dict[tuple[str, str], int] = defaultdict(int)
        self._tpot: list[float] = []
        self._when: list[tuple[float, float]] = []
        self._worst = 0.0
        self._beyond = 0
        self._feasible = 0
        self._completed = 0
        self.shed = 0
        self.seen = 0

    def record(self, outcome: Outcome) -> None:
        """Take one outcome."""
        self.seen += 1
        arrival = outcome.arrival
        if outcome.end is End.REJECTED:
            self.shed += 1
        if arrival.at_seconds < self._cell.warmup_seconds or outcome.end is End.CANCELLED:
            return
        targets = self._targets[arrival.slo_class]
        ttft = outcome.ttft_seconds
        key = (arrival.slo_class, arrival.tenant)
        self._ttft[key].append(ttft)
        self._tpot.append(outcome.tpot_seconds)
        if self._cell.keep_series:
            self._when.append((arrival.at_seconds, ttft))
        over = ttft / targets.ttft_seconds
        self._worst = max(self._worst, over)
        self._beyond += over > 3.0
        self._completed += outcome.end is End.FINISHED
        self._feasible += arrival.prompt_tokens <= self._feasible_prompts[arrival.slo_class]
        good = over <= 1.0 and outcome.tpot_seconds <= targets.tpot_seconds
        self._good[key] += good and outcome.end is End.FINISHED

    def result(
        self, seed: int, *, preemptions: int, virtual_seconds: float, clean: bool
    ) -> SeedResult:
        """Return the result of the seed; `clean` says that nothing was left behind."""
        ttft = np.array([t for values in self._ttft.values() for t in values])
        count = len(ttft)
        share = 1.0 / max(count, 1)
        return SeedResult(
            seed=seed,
            requests=count,
            goodput=sum(self._good.values()) * share,
            ceiling=self._feasible * share,
            completed=self._completed * share,
            shed=self.shed,
            beyond_3x=self._beyond * share,
            preemptions=preemptions,
            ttft_p50_seconds=percentile(ttft, 0.5),
            ttft_p99_seconds=percentile(ttft, 0.99),
            ttft_max_seconds=percentile(ttft, 1.0),
            tpot_p99_seconds=percentile(np.array(self._tpot), 0.99),
            goodput_by_class=self._shares(0),
            goodput_by_tenant=self._shares(1),
            ttft_p99_by_tenant={
                tenant: percentile(np.array(values), 0.99)
                for tenant, values in sorted(self._grouped(1).items())
            },
            longest_wait_over_target=finite(self._worst),
            valid=clean and count > 0 and self._completed > 0,
            virtual_seconds=virtual_seconds,
            series=rolling_p95(self._when) if self._cell.keep_series else [],
        )

    def _grouped(self, part: int) -> dict[str, list[float]]:
        grouped: dict[str, list[float]] = defaultdict(list)
        for key, values in self._ttft.items():
            grouped[key[part]].extend(values)
        return grouped

    def _shares(self, part: int) -> dict[str, float]:
        good: dict[str, int] = defaultdict(int)
        for key, count in self._good.items():
            good[key[part]] += count
        return {
            name: good[name] / len(values) for name, values in sorted(self._grouped(part).items())
        }


def percentile(values: npt.NDArray[np.float64], share: float) -> float | None:
    """Return the smallest value that `share` of all are at or below; None if it is not finite."""
    if len(values) == 0:
        return None
    place = min(len(values) - 1, int(share * len(values)))
    return finite(float(np.partition(values, place)[place]))


def finite(value: float) -> float | None:
    """Return a number, or None for infinity, which JSON has no word for."""
    return value if value < float("inf") else None


def rolling_p95(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (second, P95 of TTFT of the arrivals in the two seconds before), every half second."""
    points = sorted(points)
    times = np.array([at for at, _ in points])
    values = np.array([ttft for _, ttft in points])
    series = []
    for second in np.arange(SERIES_WINDOW_SECONDS, times[-1] if len(times) else 0.0, 0.5):
        low, high = np.searchsorted(times, [second - SERIES_WINDOW_SECONDS, second])
        p95 = percentile(values[low:high], 0.95)
        if p95 is not None:
            series.append((float(second), p95))
    return series
