"""The generated blocks of a document."""

import re
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from evaluation.app import write_rows
from evaluation.cells import Cell, Pool, SeedResult
from evaluation.errors import EvaluationError, MissingResultsError
from evaluation.published import figures
from evaluation.published.__main__ import main
from evaluation.published.blocks import Closest, Column, Line, Table, Text, by_load, by_policy
from evaluation.published.document import rewrite
from evaluation.published.facts import by_heading, listing
from evaluation.published.measured import MeasuredResults
from evaluation.published.results import Results, field_of
from evaluation.published.tables import BLOCKS
from evaluation.published.tables_measured import BLOCKS as MEASURED
from evaluation.published.tables_measured import PACED, VALIDITY, marked
from evaluation.rows import make_row
from evaluation.runner import ResultFile

ROOT = Path(__file__).parents[3]
SHARES = {"own_share": 0.5, "other_share": 0.02, "cut": 20.0}


def a_result(seed, goodput, p99=0.5):
    """Return what one seed gave."""
    return SeedResult(
        seed=seed,
        requests=100,
        goodput=goodput,
        ceiling=0.95,
        completed=1.0,
        shed=0,
        beyond_3x=0.02,
        preemptions=0,
        ttft_p50_seconds=0.094,
        ttft_p99_seconds=p99,
        ttft_max_seconds=12.34,
        tpot_p99_seconds=0.02,
        goodput_by_class={"tight": goodput, "loose": 1.0},
        goodput_by_tenant={},
        ttft_p99_by_tenant={},
        longest_wait_over_target=1.0,
        valid=True,
        virtual_seconds=1.0,
    )


def row(label, goodputs, *, load=1.0, p99=0.5, pool=None, workload="mixed"):
    """Return a row of seeds 31 and on."""
    results = [a_result(seed, goodput, p99) for seed, goodput in enumerate(goodputs, start=31)]
    return make_row(
        Cell(
            experiment="x",
            label=label,
            policy=re.split("[ ,:(]", label)[0],
            workload=workload,
            rate=10.0 * load,
            pool=pool or Pool(),
            load=load,
        ),
        results,
    )


@pytest.fixture
def folder(tmp_path):
    """A result file of two policies at two loads."""
    rows = [
        row("late_binding", [0.88, 0.892], p99=0.8224),
        row("least_loaded", [0.7, 0.8]),
        row("late_binding", [0.9, 0.8], load=1.3, p99=12.34),
        row("least_loaded", [0.5, 0.3], load=1.3),
    ]
    write_rows(rows, tmp_path / "x.jsonl")
    return tmp_path


def table(**fields):
    """Return a table of policies by loads."""
    values = {
        "name": "t",
        "files": ("x",),
        "heads": ("policy",),
        "columns": by_load(1.0, 1.3),
        "lines": by_policy("least_loaded", "late_binding"),
    }
    return Table(**(values | fields))


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (figures.share, 0.8864, ".886"),
        (figures.share, 0.9999, "1.000"),
        (figures.short_share, 0.9999, "1"),
        (figures.signed, -0.00091, "\N{MINUS SIGN}.0009"),
        (figures.signed, -0.00001, "+.0000"),
        (figures.points, -0.0131, "\N{MINUS SIGN}1.3"),
        (figures.points, 0.0004, "+.0"),
        (figures.factor, 0.7, ".7 \N{MULTIPLICATION SIGN}"),
        (figures.factor, 2.0, "2.0 \N{MULTIPLICATION SIGN}"),
        (figures.seconds, 0.0944, ".094"),
        (figures.seconds, 1.384, "1.38"),
        (figures.seconds, 12.34, "12.3"),
        (figures.seconds, None, "-"),
        (figures.short_seconds, 0.731, ".73"),
    ],
)
def test_numbers_are_written_as_the_document_does(form, value, text):
    """Shares and seconds have no leading zero, the digits that count and a proper minus."""
    assert form(value) == text


@pytest.mark.parametrize(
    ("label", "base", "variant"),
    [
        ("late_binding", "late_binding", ""),
        ("late_binding (slow link)", "late_binding", "slow link"),
        ("late_binding, 4 routers, dispatcher", "late_binding", "4 routers, dispatcher"),
        ("marginal_cost: no gate", "marginal_cost", "no gate"),
        ("least_loaded slow told", "least_loaded", "slow told"),
    ],
)
def test_labels_have_a_base_and_a_variant(label, base, variant):
    """What an experiment adds to a policy's name is told from the name, however it is written."""
    labelled = row(label, [0.5])

    assert (field_of(labelled, "base"), field_of(labelled, "variant")) == (base, variant)


def test_table_has_a_cell_for_each_line_and_column(folder):
    """A cell shows the row that line and column want."""
    assert table().render(Results(folder)).splitlines() == [
        "| policy | 1.0 \N{MULTIPLICATION SIGN} | 1.3 \N{MULTIPLICATION SIGN} |",
        "|--|--|--|",
        "| least_loaded | .750 | .400 |",
        "| late_binding | .886 | .850 |",
    ]


def test_ranked_table_has_the_best_first(folder):
    """Lines are sorted by goodput; those with a value of their own stay on top."""
    lines = (
        Line(("(ceiling)",), {"policy": "least_loaded"}, figures.ceiling),
        *by_policy("least_loaded", "late_binding"),
    )

    text = table(ranked=True, lines=lines).render(Results(folder))

    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == [
        "(ceiling)", "late_binding", "least_loaded",
    ]  # fmt: skip


def test_grouped_table_shows_a_label_once(folder):
    """A repeated first label is left out, and so are columns that speak for the group."""
    lines = tuple(
        Line(("mixed", policy), {"policy": policy, "load": 1.0})
        for policy in ("least_loaded", "late_binding")
    )
    columns = (
        Column("goodput", {}, figures.goodput_range),
        Column("ceiling", {}, figures.short_ceiling, once=True),
        Column("P99", {}, figures.p99),
    )

    text = table(heads=("", "policy"), lines=lines, columns=columns, grouped=True).render(
        Results(folder)
    )

    assert text.splitlines()[2:] == [
        "| mixed | least_loaded | .750 (.700-.800) | .950 | .500 |",
        "| | late_binding | .886 (.880-.892) | | .822 |",
    ]


def test_cell_without_its_rows_is_refused(folder):
    """A table does not show a mean over fewer or more cells than it is said to be over."""
    with pytest.raises(MissingResultsError, match="1 rows"):
        table(rows=2).render(Results(folder))
    with pytest.raises(MissingResultsError, match="0 rows"):
        table(lines=by_policy("round_robin")).render(Results(folder))
    with pytest.raises(MissingResultsError, match=r"y\.jsonl"):
        table(files=("y",)).render(Results(folder))


def test_closest_cells_leave_out_those_that_nobody_can_lose(tmp_path):
    """Leads are listed from the smallest on, cells in which all is in time left out."""
    rows = [
        row("late_binding", [1.0, 1.0], load=0.5),
        row("least_loaded", [1.0, 1.0], load=0.5),
        row("late_binding (h100)", [0.9, 0.9]),
        row("least_loaded (h100)", [0.89, 0.91]),
        row("late_binding (h100)", [0.6, 0.6], load=1.3),
        row("least_loaded (h100)", [0.62, 0.62], load=1.3),
    ]
    write_rows(rows, tmp_path / "x.jsonl")

    text = Closest(name="c", files=("x",), most=2).render(Results(tmp_path))

    minus, times = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
    assert text.splitlines()[2:] == [
        f"| mixed 2P4D 1.3 {times}, h100 | .600 | .620 least_loaded | {minus}.0200 | {minus}.020 to {minus}.020 |",
        f"| mixed 2P4D 1.0 {times}, h100 | .900 | .900 least_loaded | +.0000 | {minus}.010 to +.010 |",
    ]


def test_tail_is_compared_cell_by_cell(folder):
    """The ratio is late binding's P99 over least_loaded's of the same cell."""
    rows = Results(folder).file("x")

    assert figures.median_tail_ratio(rows) == "13.16"
    assert figures.largest_tail_ratio(rows) == "24.7 (mixed 2P4D)"


def test_best_of_the_splits_is_shown_with_its_pool():
    """Of several pools of as many engines the best one's goodput is shown, and which it is."""
    splits = [row("a", [0.5], pool=Pool(prefill=p, decode=5 - p), p99=12.34) for p in (1, 2)]
    splits.append(row("a", [0.7], pool=Pool(prefill=3, decode=2), p99=0.731))

    assert figures.best_split(splits) == ".700 (3P2D, .73 s)"


def test_contest_on_some_seeds_goes_by_these_alone():
    """On the first seed alone another policy may be the best one than on all."""
    rows = [
        row("late_binding", [0.5, 0.9]),
        row("least_loaded", [0.6, 0.1]),
        row("round_robin", [0.4, 0.8]),
    ]

    contest = figures.on_seeds(rows, [31])

    assert contest.best.policy == "least_loaded"
    assert contest.difference.mean == pytest.approx(-0.1)
    with pytest.raises(EvaluationError, match="not run"):
        figures.on_seeds(rows, [33])


def test_text_has_its_facts_filled_in(folder):
    """A fact's name may have dots; one that is not known leaves the block as it is."""
    known = Text(name="n", lines=("worst {worst_1.3}",), facts=lambda _: {"worst_1.3": "+.1"})
    unknown = Text(name="n", lines=("{x}",), facts=lambda _: {})

    assert known.render(Results(folder)) == "worst +.1"
    with pytest.raises(MissingResultsError, match="no fact"):
        unknown.render(Results(folder))


def test_document_is_rewritten_between_markers_only(folder):
    """Stale blocks are renewed, those without results and all other text stay; a second time nothing is stale."""
    text = "a\n<!-- table: t -->\nold\n<!-- end -->\nb\n<!-- table: u -->\nkept\n<!-- end -->\n"
    blocks = [table(), table(name="u", files=("y",))]

    renewed = rewrite(text, blocks, Results(folder))

    assert renewed.stale == ["t"]
    assert list(renewed.missing) == ["u"]
    assert renewed.text.startswith("a\n<!-- table: t -->\n| policy |")
    assert renewed.text.endswith("<!-- end -->\nb\n<!-- table: u -->\nkept\n<!-- end -->\n")
    assert rewrite(renewed.text, blocks, Results(folder)).stale == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<!-- table: t -->\n",
        "<!-- table: t -->\n<!-- end -->\n<!-- table: x -->\n<!-- end -->\n",
        "<!-- table: t -->\n<!-- end -->\n<!-- table: t -->\n<!-- end -->\n",
    ],
)
def test_document_and_blocks_agree_on_what_there_is(text, folder):
    """A block that the document lacks, has twice, does not end or that is not known is an error."""
    with pytest.raises(EvaluationError, match="differ"):
        rewrite(text, [table()], Results(folder))


def test_document_has_every_block_in_its_order():
    """The markers of docs/results-simulator.md are those of the known blocks, in the same order."""
    text = (ROOT / "docs/results-simulator.md").read_text("utf-8")

    assert re.findall(r"<!-- table: (\S+) -->", text) == [block.name for block in BLOCKS]


def test_document_has_no_table_of_its_own():
    """Every table of docs/results-simulator.md is generated."""
    text = (ROOT / "docs/results-simulator.md").read_text("utf-8")
    outside = re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)

    assert [line for line in outside.splitlines() if line.startswith("|")] == []


def test_facts_go_as_far_as_the_results(folder):
    """A heading without results says what is not there; the others have theirs."""
    facts = by_heading(Results(folder))

    assert facts["Results in the simulator"]["rows"] == "4"
    assert "grid.jsonl" in facts["Grid: four workloads, six pools, three loads"]["(not there)"]
    assert listing(Results(folder)).count("## ") == len(facts)


def test_check_tells_a_stale_document_and_writes_nothing(folder, capsys):
    """Checking exits with 1 where a block is not as the results are; writing mends that."""
    source = (ROOT / "docs/results-simulator.md").read_text("utf-8")
    (folder / "results.md").write_bytes((ROOT / "docs/results.md").read_bytes())
    document = folder / "results-simulator.md"
    stale = source.replace(" rows behind these tables", " lines behind these tables")
    document.write_text(stale, encoding="utf-8")

    assert main(results=folder, docs=folder, check=True) == 1
    assert document.read_text("utf-8") == stale
    assert "stale: validity" in capsys.readouterr().err
    assert main(results=folder, docs=folder) == 0
    assert main(results=folder, docs=folder, check=True) == 0
    assert "Of the 4 rows behind these tables" in document.read_text("utf-8")


def test_the_tables_of_real_engines_are_what_the_kept_runs_say():
    """Every table of docs/results.md is rendered from docs/results/, and none is left out."""
    text = (ROOT / "docs/results.md").read_text("utf-8")

    renewed = rewrite(text, MEASURED, MeasuredResults(ROOT / "docs/results"))

    assert (renewed.stale, renewed.missing) == ([], {})


def test_runs_that_are_not_valid_are_marked(tmp_path):
    """A star says that a run did not keep its pace, and the text why and how many."""
    cell = Cell(experiment="x", label="round_robin", policy="round_robin", workload="mixed", rate=9)
    good = msgspec.structs.replace(
        a_result(31, 0.8), validity=dict.fromkeys(("late_share", "real_to_modelled"), 0.01) | SHARES
    )
    bad = msgspec.structs.replace(good, seed=32, valid=False, why_invalid="the machine was busy")
    for name in PACED:
        file = ResultFile(tmp_path / f"{name}.seeds.jsonl")
        for one in (good, bad):
            file.add(cell, one)
    results = MeasuredResults(tmp_path)

    rows = results.file("table2")
    text = VALIDITY.render(results)

    assert [marked([row]) for row in rows] == [".800", ".800\\*"]
    assert f"Of {2 * len(PACED)} runs {len(PACED)} are valid" in text
    assert "the machine was busy" in text


def test_headings_of_facts_follow_the_document():
    """Facts are listed under the document's headings, in its order."""
    text = (ROOT / "docs/results-simulator.md").read_text("utf-8")
    headings = re.findall(r"^##? (.*)$", text, re.MULTILINE)
    listed = [heading for heading in by_heading(Results(ROOT / "nowhere")) if heading in headings]
    places = [headings.index(heading) for heading in listed]

    assert all(a < b for a, b in pairwise(places))
    assert len(listed) >= len(headings) - 1
