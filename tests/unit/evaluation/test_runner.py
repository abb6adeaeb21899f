from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
import pytest

from evaluation.cells import Cell, Pool
from evaluation.errors import EvaluationError
from evaluation.runner import ResultFile, in_random_order, run_cells
from evaluation.simulated import SimulatedBackend
from tests.unit.evaluation.test_stats_and_rows import result

CELLS = [
    Cell(
        experiment="x",
        label=p,
        policy=p,
        workload="mixed",
        rate=5.0,
        seconds=6.0,
        warmup_seconds=1.0,
    )
    for p in ("round_robin", "least_loaded")
]


@dataclass
class Counting:
    """A backend that counts what it is asked."""

    asked: list = field(default_factory=list)
    fail_after: int = 99

    def run(self, cell, seed):
        if len(self.asked) >= self.fail_after:
            raise KeyboardInterrupt
        self.asked.append((cell.policy, seed))
        return result(seed, 0.5)


def test_resume_runs_only_what_is_missing(tmp_path):
    """After an interruption only the seeds that were not finished run."""
    path = tmp_path / "seeds.jsonl"
    first, second = Counting(fail_after=3), Counting()
    with pytest.raises(KeyboardInterrupt):
        run_cells(CELLS, (1, 2), first, results=ResultFile(path))

    rows = run_cells(CELLS, (1, 2), second, results=ResultFile(path))

    assert second.asked == [("least_loaded", 2)]
    assert [row.seeds for row in rows] == [[1, 2], [1, 2]]


def test_cut_off_line_runs_again(tmp_path):
    """A last line that a crash cut off is not taken for a result."""
    path = tmp_path / "seeds.jsonl"
    run_cells(CELLS[:1], (1, 2), Counting(), results=ResultFile(path))
    path.write_bytes(path.read_bytes()[:-20])
    again = Counting()

    run_cells(CELLS[:1], (1, 2), again, results=ResultFile(path))

    assert again.asked == [("round_robin", 2)]


@dataclass(frozen=True)
class Marking:
    """A backend that fails on the first seed and leaves a file for every other."""

    folder: Path

    def run(self, cell, seed):
        if seed == 0:
            raise EvaluationError("this seed does not run")
        (self.folder / f"{cell.policy}-{seed}").touch()
        return result(seed, 0.5)


def test_a_failure_ends_the_run_without_doing_the_rest(tmp_path):
    """What a process raises comes out at once; what had not begun is not run before that."""
    with pytest.raises(EvaluationError, match="does not run"):
        run_cells(CELLS, range(2000), Marking(tmp_path), jobs=2)

    assert len(list(tmp_path.iterdir())) < 2000


def test_processes_give_the_same_rows():
    """Two processes give the rows that one gives."""
    seen = []

    alone = run_cells(CELLS, (1, 2), SimulatedBackend())
    together = run_cells(
        CELLS, (1, 2), SimulatedBackend(), jobs=2, progress=lambda *state: seen.append(state)
    )

    assert alone == together
    assert [(n, 4) for n in range(5)] == seen


def test_runs_on_a_machine_are_shuffled_within_seed_and_pool():
    """Seeds and pools keep their order, so that a cluster stays up; policies come in any order."""
    cells = [
        msgspec.structs.replace(CELLS[0], policy=policy, pool=pool)
        for pool in (Pool(), Pool(prefill=1, decode=2))
        for policy in ("round_robin", "least_loaded", "power_of_two", "marginal_cost")
    ]
    tasks = [(cell, seed) for cell in cells for seed in (31, 32)]

    orders = [in_random_order(tasks, Random(i)) for i in range(4)]

    for order in orders:
        assert [(seed, cell.pool.name) for cell, seed in order] == [
            (seed, pool) for seed in (31, 32) for pool in ("2P4D", "1P2D") for _ in range(4)
        ]
        assert sorted(order, key=repr) == sorted(tasks, key=repr)
    assert len({tuple(cell.policy for cell, _ in order) for order in orders}) > 1
