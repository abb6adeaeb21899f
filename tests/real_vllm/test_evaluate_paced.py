"""`--backend paced`: gates, a run on real engines at a modelled pace, its score, journal and verdict."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from evaluation.backends import PACED, BackendOptions, make_backend
from evaluation.cells import Cell, Conditions, Pool
from evaluation.errors import EvaluationError
from evaluation.paced import PacedBackend, PacedOptions
from evaluation.processes import arrivals_of
from evaluation.run_journal import RunJournal
from evaluation.runner import ResultFile, run_cells

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(240)]
SEED = 31


def cell(policy: str) -> Cell:
    """A few seconds of light load on the smallest pool."""
    return Cell(
        experiment="x",
        label=policy,
        policy=policy,
        workload="chat",
        pool=Pool(prefill=1, decode=1),
        rate=6.0,
        seconds=4.0,
        warmup_seconds=0.0,
    )


class OnceOnly:
    """A backend that refuses to run again what was finished."""

    def run(self, cell: Cell, seed: int) -> None:
        """Refuse."""
        raise AssertionError(f"{cell.policy}, seed {seed} was run again")


def test_runs_on_paced_engines_are_scored_journalled_and_judged(tmp_path: Path) -> None:
    """Two policies share a cluster; every request ends once, in engine time, and is written down."""
    cells = [cell("round_robin"), cell("late_binding")]
    results = tmp_path / "seeds.jsonl"
    with ExitStack() as stack:
        backend = PacedBackend(
            PacedOptions(dilation=2.0, directory=tmp_path / "cluster"),
            stack,
            journal=RunJournal(tmp_path / "requests"),
        )
        rows = run_cells(cells, [SEED], backend, results=ResultFile(results))

    again = run_cells(cells, [SEED], OnceOnly(), results=ResultFile(results))
    asked = arrivals_of(cells[0], SEED)
    assert again == rows
    for one, row in zip(cells, rows, strict=True):
        result = ResultFile(results).finished[(one.key(), SEED)]
        head, *lines = (
            (tmp_path / "requests" / f"{one.key()}-{SEED}.jsonl").read_text().splitlines()
        )
        requests = [json.loads(line) for line in lines]
        assert json.loads(head)["seed"] == SEED
        assert [request["number"] for request in requests] == [a.number for a in asked]
        assert {request["end"] for request in requests} == {"finished"}
        assert row.completed == 1.0
        assert result.requests == len(asked)
        assert result.validity["steps"] > sum(a.output_tokens for a in asked) / len(asked)
        assert result.validity["own_share"] > 0.0
        assert result.valid == (result.why_invalid == "")
        # In engine time: no step is shorter than the model's shortest, whatever the dilation.
        tpots = [request["tpot_seconds"] for request in requests if request["output_tokens"] > 20]
        assert min(tpots) > 0.0118 * 0.95


def test_what_cannot_be_had_is_refused_before_anything_starts() -> None:
    """A cell with told lengths or slower engines says why it has to be simulated."""
    with ExitStack() as stack:
        backend = make_backend(PACED, BackendOptions(), stack)
        with pytest.raises(EvaluationError, match="output lengths"):
            backend.run(
                Cell(
                    experiment="x",
                    label="x",
                    policy="late_binding",
                    workload="chat",
                    rate=1.0,
                    conditions=Conditions(prediction="true"),
                ),
                SEED,
            )
        with pytest.raises(EvaluationError, match="all alike"):
            backend.run(
                Cell(
                    experiment="x",
                    label="x",
                    policy="late_binding",
                    workload="chat",
                    rate=1.0,
                    pool=Pool(slower={"d00": 2.0}),
                ),
                SEED,
            )
