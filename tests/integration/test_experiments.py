"""Short versions of the experiments: they run, resume, report, and point the right way."""

import json
import re

import pytest

from evaluation.app import evaluate, run
from evaluation.cells import Conditions, Pool
from evaluation.experiments.base import Context, Variant, parse_variant
from evaluation.experiments.registry import EXPERIMENTS
from evaluation.runner import run_cells
from evaluation.saturation import Saturation
from evaluation.simulated import SimulatedBackend
from evaluation.tables import contests

SEEDS = (31, 32)


class FixedRates:
    """Saturation rates of 2P4D, whatever the pool."""

    def rate(self, workload, pool, conditions=None):
        return {"chat": 96.0, "documents": 5.0, "reasoning": 13.0}.get(workload, 20.0)


def rows_of(workload, load, policies, *, pool=None, seconds=30.0, conditions=None):
    """Return the rows of one place for some policies, by label."""
    context = Context(variants=[], saturation=FixedRates(), seconds=seconds)
    pool = pool or Pool()
    rate = load * context.saturation.rate(workload, pool)
    cells = [
        context.cell("x", parse_variant(p), workload, pool, rate, load=load, conditions=conditions)
        for p in policies
    ]
    return {row.policy: row for row in run_cells(cells, SEEDS, SimulatedBackend())}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_cells_are_distinct_and_labelled(name):
    """Every experiment lists cells that differ, under labels that tell them apart."""
    policies = ("round_robin", "least_loaded", "marginal_cost", "late_binding")
    context = Context(variants=[Variant(p, p) for p in policies], saturation=FixedRates())

    cells = EXPERIMENTS[name](context)

    assert len({cell.key() for cell in cells}) == len(cells) > 2
    places = {(c.label, c.workload, str(c.pool), c.rate) for c in cells}
    assert len(places) == len(cells)


@pytest.mark.parametrize("name", ["grid", "robustness", "routers", "fairness", "heterogeneity"])
def test_workloads_that_were_asked_for(name):
    """An experiment that goes over several workloads goes over those that were asked for."""
    context = Context(
        variants=[Variant("round_robin", "round_robin")],
        saturation=FixedRates(),
        workloads=("documents", "reasoning"),
    )

    alone = {cell.workload for cell in EXPERIMENTS[name](context)} - {"mixed"}

    assert alone == {"documents", "reasoning"}


@pytest.mark.parametrize(("workload", "load"), [("mixed", 1.3), ("documents", 1.6)])
def test_late_binding_leads_beyond_saturation(workload, load):
    """Beyond saturation late binding is far ahead of round robin and of the shortest queue."""
    rows = rows_of(workload, load, ("round_robin", "least_loaded", "late_binding"))

    assert all(row.valid and row.completed == 1.0 for row in rows.values())
    best = max(rows["round_robin"].goodput, rows["least_loaded"].goodput)
    assert rows["late_binding"].goodput > best + 0.08


def test_late_binding_recovers_from_wrong_constants():
    """Told constants 7.4 times too large or small, late binding corrects them within seconds."""
    goodput = {
        factor: rows_of(
            "mixed", 1.0, ("late_binding",), conditions=Conditions(believed_factor=factor)
        )["late_binding"].goodput
        for factor in (1.0, 7.4, 1 / 7.4)
    }

    assert min(goodput.values()) > goodput[1.0] - 0.07


def test_dispatcher_keeps_four_routers_together():
    """Four front ends with one dispatcher come close to one router; alone they do not."""
    one, four, joined = (
        rows_of("mixed", 1.2, ("late_binding",), conditions=conditions)["late_binding"].goodput
        for conditions in (
            Conditions(),
            Conditions(routers=4),
            Conditions(routers=4, dispatcher=True),
        )
    )

    assert joined > one - 0.03
    assert joined > four


def test_scarce_decode_is_where_the_gate_counts():
    """With few decode seats, starting prefill without looking at decode room loses."""
    pool = Pool(overrides={"max_num_seqs": 32.0})
    rows = rows_of("mixed", 1.2, ("late_binding", "late_binding:gate=false"), pool=pool, seconds=40)

    assert rows["late_binding"].goodput > rows["late_binding:gate=false"].goodput + 0.02


def test_saturation_is_where_round_robin_keeps_four_fifths(tmp_path):
    """At the rate found round robin is near .8 of the ceiling; it is found once and kept."""
    told = []
    path = tmp_path / "rates.json"

    rate = Saturation(path, tell=told.append, seconds=20.0).rate(
        "documents", Pool(prefill=1, decode=2)
    )
    again = Saturation(path, tell=told.append, seconds=20.0).rate(
        "documents", Pool(prefill=1, decode=2)
    )

    assert (rate, 1) == (again, len(told))
    assert 0.5 < rate < 6.0
    assert next(iter(v for v in json.loads(path.read_text()).values()))["seeds"] == [1, 2, 3]


def test_command_writes_rows_and_report(tmp_path, capsys):
    """The command writes JSON rows with all fields, a report with its plots, and resumes."""
    rates, rows, report = tmp_path / "r.json", tmp_path / "rows.jsonl", tmp_path / "report"
    arguments = {
        "policies": "round_robin,late_binding",
        "seeds": 2,
        "seconds": 8.0,
        "json": rows,
        "report": report,
        "cache": rates,
        "bar": False,
    }

    assert evaluate("table2", **arguments) == 0
    first = rows.read_bytes()
    assert evaluate("table2", **arguments) == 0

    assert first == rows.read_bytes()
    fields = set(json.loads(first.splitlines()[0]))
    assert {
        "experiment", "workload", "prefill", "decode", "rate", "policy", "seeds", "goodput",
        "goodput_min", "goodput_max", "ceiling", "ttft_p50_seconds", "ttft_p99_seconds",
        "ttft_max_seconds", "tpot_p99_seconds", "goodput_by_class", "preemptions", "shed", "valid",
    } <= fields  # fmt: skip
    page = (report / "report.html").read_text()
    for image in re.findall(r'src="([^"]+)"', page):
        assert (report / image).stat().st_size > 1000
    assert "late_binding" in (report / "report.md").read_text()
    assert "late_binding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("experiment", "options", "said"),
    [
        ("table3", {}, "table2"),
        ("table2", {"backend": "dice"}, "sim"),
        ("table2", {"policies": "late_binding:gate"}, "gate"),
        ("grid", {"workloads": "poems"}, "poems"),
    ],
)
def test_command_names_what_is_wrong(tmp_path, capsys, experiment, options, said):
    """What was asked for and is not there ends the command with 2 and a line that helps."""
    code = evaluate(experiment, seconds=2.0, cache=tmp_path / "r.json", bar=False, **options)

    assert code == 2
    assert said in capsys.readouterr().err


def test_grid_quick_loses_no_cell():
    """On a part of the grid, short runs, late binding is behind the best other policy nowhere."""
    rows = run(
        "grid",
        policies=("round_robin", "least_loaded", "token_product", "late_binding"),
        seeds=SEEDS,
        seconds=8.0,
        quick=True,
        saturation=FixedRates(),
    )

    assert all(row.valid for row in rows)
    assert min(contest.difference.mean for contest in contests(rows)) > -0.02
