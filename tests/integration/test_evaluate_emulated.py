"""`--backend emulated`: a cell on real processes, scored as simulated ones are, in engine time."""

import json
from statistics import median

import pytest

from evaluation.backends import BackendOptions, make_backend
from evaluation.cells import Cell, Conditions, Pool
from evaluation.emulated import EmulatedBackend
from evaluation.errors import EvaluationError, UnknownBackendError
from evaluation.processes import arrivals_of
from evaluation.run_journal import RunJournal
from localcluster.timing import engine_time, stretched_intervals

SEED = 31
CELL = Cell(
    experiment="x",
    label="late_binding",
    policy="late_binding",
    workload="chat",
    pool=Pool(prefill=1, decode=1, overrides={"d0_seconds": 0.02}),
    rate=8.0,
    seconds=3.0,
    warmup_seconds=0.0,
)


@pytest.mark.parametrize(("time_scale", "most_seconds"), [(0.5, 0.036), (2.0, float("inf"))])
def test_times_read_in_engine_seconds_at_any_time_scale(tmp_path, time_scale, most_seconds):
    """Every request ends once and is journalled; a token takes the engine's time, not the machine's."""
    backend = EmulatedBackend(time_scale=time_scale, journal=RunJournal(tmp_path))

    result = backend.run(CELL, SEED)

    asked = arrivals_of(CELL, SEED)
    path = tmp_path / f"{CELL.key()}-{SEED}.jsonl"
    _, *requests = [json.loads(line) for line in path.read_text().splitlines()]
    assert result.valid
    assert result.requests == len(requests) == len(asked)
    assert result.completed == 1.0
    tpots = [request["tpot_seconds"] for request in requests if request["output_tokens"] > 20]
    # A step takes some 20 ms: in real seconds it would read 40 at half the pace and 10 at double.
    assert 0.018 < median(tpots) < most_seconds


def test_what_only_a_simulation_can_have_is_refused():
    """A cell whose routers are told output lengths says so before anything starts."""
    cell = Cell(
        experiment="x",
        label="x",
        policy="late_binding",
        workload="chat",
        rate=1.0,
        conditions=Conditions(prediction="true"),
    )
    with pytest.raises(EvaluationError, match="output lengths"):
        EmulatedBackend().run(cell, SEED)


def test_an_unknown_backend_is_answered_with_those_there_are():
    """A wrong name says what may be written."""
    with pytest.raises(UnknownBackendError, match="sim, emulated, paced"):
        make_backend("vllm", BackendOptions(), None)


def test_a_dilated_cluster_stretches_the_control_planes_intervals():
    """At a third of the speed reports come, and silence is noticed, three times as late; never sooner."""
    stretched = stretched_intervals(1 / 3)

    assert stretched["report_interval_seconds"] == pytest.approx(0.3)
    assert stretched["stale_after_seconds"] == pytest.approx(0.9)
    assert stretched_intervals(4.0) == {}
    assert engine_time(0.25) == {"clock_rate": 0.25}
    assert engine_time(float("inf")) == engine_time(1.0) == {}
