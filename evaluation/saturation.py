"""The rate at which round robin falls to .8 of what an idle cluster could do.

Loads are given as multiples of it, so that cells of different workloads and pools are comparable.
Found by bisection on the tuning seeds; what was found is kept in a file, by what it depends on.
"""

import json
from collections.abc import Callable
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from enginemodel.model import prefill_work_seconds
from evaluation.cells import Cell, Conditions, Pool
from evaluation.errors import EvaluationError
from evaluation.simulated import SimulatedBackend, profile_of, workload_of

TUNING_SEEDS = (1, 2, 3)
SHARE_OF_CEILING = 0.8
_BISECTIONS = 7
_GROWTH = 1.6


class Saturation:
    """Finds saturation rates and remembers them."""

    def __init__(
        self,
        path: Path | None,
        *,
        tell: Callable[[str], None] = lambda _: None,
        seconds: float = 90.0,
    ) -> None:
        """Load what is known: from the package, then from `path`, which also takes what is new.

        Args:
            path: A JSON file; None keeps nothing.
            tell: Told what is being searched for, since a search takes a while.
            seconds: Of arrivals in a probe.
        """
        self._path = path
        self._tell = tell
        self._seconds = seconds
        packaged = resources.files("evaluation").joinpath("saturation.json")
        self._known: dict[str, dict[str, Any]] = (
            json.loads(packaged.read_text("utf-8")) if packaged.is_file() else {}
        )
        if path is not None and path.is_file():
            self._known |= json.loads(path.read_text("utf-8"))

    def rate(self, workload: str, pool: Pool, conditions: Conditions | None = None) -> float:
        """Return the saturation rate, requests a second, searching for it where it is not known.

        Raises:
            EvaluationError: No rate brings round robin to the share.
        """
        conditions = conditions or Conditions()
        key = self._key(workload, pool, conditions)
        entry = self._known.get(key)
        if entry is None:
            self._tell(f"saturation of {workload} on {pool.name}")
            entry = self._search(workload, pool, conditions)
            self._known[key] = entry
            self._save()
        return float(entry["rate"])

    def _key(self, workload: str, pool: Pool, conditions: Conditions) -> str:
        digest = sha256(
            msgspec.json.encode((pool, conditions, self._seconds), order="deterministic")
        ).hexdigest()[:10]
        return f"{workload}|{pool.profile}|{pool.name}|{digest}"

    def _save(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self._known, indent=1, sort_keys=True)
            self._path.write_text(text + "\n", encoding="utf-8")

    def _search(self, workload: str, pool: Pool, conditions: Conditions) -> dict[str, Any]:
        low = high = first_guess(workload, pool, conditions)
        for _ in range(12):
            if self._share(workload, pool, conditions, high) < SHARE_OF_CEILING:
                break
            low, high = high, high * _GROWTH
        else:
            raise EvaluationError(f"{workload} on {pool.name} never saturates up to {high}/s")
        if low == high:
            for _ in range(12):
                low = high / _GROWTH
                if self._share(workload, pool, conditions, low) >= SHARE_OF_CEILING:
                    break
                high = low
            else:
                raise EvaluationError(f"{workload} on {pool.name} is saturated down to {low}/s")
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            if self._share(workload, pool, conditions, middle) >= SHARE_OF_CEILING:
                low = middle
            else:
                high = middle
        return {"rate": round((low * high) ** 0.5, 3), "seeds": list(TUNING_SEEDS)}

    def _share(self, workload: str, pool: Pool, conditions: Conditions, rate: float) -> float:
        """Return round robin's goodput over the ceiling at a rate."""
        cell = Cell(
            experiment="saturation",
            label="round_robin",
            policy="round_robin",
            workload=workload,
            pool=pool,
            rate=rate,
            seconds=self._seconds,
            conditions=conditions,
        )
        backend = SimulatedBackend()
        results = [backend.run(cell, seed) for seed in TUNING_SEEDS]
        ceiling = sum(r.ceiling for r in results)
        return sum(r.goodput for r in results) / max(ceiling, 1e-9)


def first_guess(workload: str, pool: Pool, conditions: Conditions) -> float:
    """Return half of what the prefill side or the decode side could do flat out, the lower one."""
    cell = Cell(
        experiment="",
        label="",
        policy="",
        workload=workload,
        pool=pool,
        rate=1.0,
        conditions=conditions,
    )
    sample = [
        arrival
        for arrival, _ in zip(workload_of(cell).arrivals(1.0, 1e9, 1), range(300), strict=False)
    ]
    profile = profile_of(pool)
    constants = profile.constants
    count = len(sample)
    work = sum(prefill_work_seconds(constants, a.prompt_tokens) for a in sample) / count
    prefill_rate = pool.prefill / (work + constants.p1_seconds / 2.0)
    held = sum(a.output_tokens * (a.prompt_tokens + a.output_tokens / 2.0) for a in sample) / count
    by_kv = profile.kv_total_tokens / held
    by_seats = profile.max_num_seqs / (sum(a.output_tokens for a in sample) / count)
    step = constants.d0_seconds + constants.d2_seconds_per_kv_token * profile.kv_total_tokens
    decode_rate = pool.decode * min(by_kv, by_seats) / step
    return 0.5 * min(prefill_rate, decode_rate)
