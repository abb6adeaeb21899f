import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.cells import Cell, Pool, SeedResult
from evaluation.experiments.base import parse_variant
from evaluation.rows import make_row
from evaluation.stats import paired_difference
from evaluation.tables import best_splits, contests, place_name

GOODPUTS = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12)


def result(seed, goodput, **fields):
    """Return a seed's result."""
    values = {
        "requests": 100,
        "ceiling": 0.9,
        "completed": 1.0,
        "shed": 0,
        "beyond_3x": 0.0,
        "preemptions": 2,
        "ttft_p50_seconds": 0.1,
        "ttft_p99_seconds": 0.5,
        "ttft_max_seconds": float(seed),
        "tpot_p99_seconds": 0.02,
        "goodput_by_class": {"tight": goodput, "loose": 1.0},
        "goodput_by_tenant": {"a": goodput},
        "ttft_p99_by_tenant": {"a": 0.5},
        "longest_wait_over_target": 1.0,
        "valid": True,
        "virtual_seconds": 1.0,
    }
    return SeedResult(seed=seed, goodput=goodput, **(values | fields))


def cell(policy="late_binding", **fields):
    """Return a cell."""
    return Cell(experiment="x", label=policy, policy=policy, workload="mixed", rate=3.0, **fields)


@given(GOODPUTS, st.floats(-0.5, 0.5))
def test_constant_difference_is_sure(values, shift):
    """A difference that every seed shows alike has an interval of no width."""
    difference = paired_difference([v + shift for v in values], values)

    assert difference.mean == pytest.approx(shift, abs=1e-9)
    assert difference.low == pytest.approx(difference.high, abs=1e-9)


def test_common_spread_cancels():
    """What both sides share does not widen the interval."""
    theirs = [0.1, 0.5, 0.9, 0.3]

    difference = paired_difference(
        [t + e for t, e in zip(theirs, (0.02, 0.03, 0.02, 0.03), strict=True)], theirs
    )

    assert difference.sure
    assert 0.019 < difference.low < difference.high < 0.031


def test_unpaired_is_refused():
    """Sides of different length are no pairs."""
    with pytest.raises(ValueError, match="pairs"):
        paired_difference([0.1], [0.1, 0.2])


def test_row_folds_seeds():
    """A row has means, the range of goodput, and the largest of the largest."""
    row = make_row(cell(), [result(32, 0.8), result(31, 0.6)])

    assert row.seeds == [31, 32]
    assert row.goodput_by_seed == [0.6, 0.8]
    assert (
        row.goodput, row.goodput_min, row.goodput_max, row.ttft_max_seconds,
    ) == (0.7, 0.6, 0.8, 32.0)  # fmt: skip


def test_row_admits_to_missing_tokens_and_invalid_seeds():
    """A quantile that one seed has not is none of the row; one invalid seed makes it invalid."""
    row = make_row(cell(), [result(1, 0.5), result(2, 0.5, ttft_p99_seconds=None, valid=False)])

    assert (row.ttft_p99_seconds, row.valid) == (None, False)


def test_contests_compare_within_a_cell():
    """Late binding is compared with the best other policy of the same cell only."""
    rows = [
        make_row(cell("late_binding"), [result(1, 0.8)]),
        make_row(cell("round_robin"), [result(1, 0.9)]),
        make_row(cell("least_loaded"), [result(1, 0.7)]),
        make_row(cell("least_loaded", pool=Pool(prefill=1)), [result(1, 1.0)]),
    ]

    (contest,) = contests(rows)

    assert ("round_robin", pytest.approx(-0.1)) == (contest.best.policy, contest.difference.mean)


def test_best_split_of_each_policy():
    """Of the splits of one number of engines each policy has its own best, at the lowest load."""
    rows = [
        make_row(cell(policy, pool=Pool(prefill=p, decode=d), load=load), [result(1, goodput)])
        for policy, p, d, load, goodput in (
            ("late_binding", 2, 3, 1.0, 0.8),
            ("late_binding", 3, 2, 1.0, 0.7),
            ("round_robin", 2, 3, 1.0, 0.5),
            ("round_robin", 3, 2, 1.0, 0.6),
            ("round_robin", 3, 2, 1.4, 0.9),
            ("round_robin", 1, 2, 1.0, 0.4),
        )
    ]

    best = best_splits(rows)

    assert {
        total: {policy: (row.prefill, row.goodput) for policy, row in by_policy.items()}
        for total, by_policy in best.items()
    } == {3: {"round_robin": (1, 0.4)}, 5: {"late_binding": (2, 0.8), "round_robin": (3, 0.6)}}


def test_cells_that_differ_in_seats_are_named_apart():
    """What a cell is called says which limits of its engines differ, and under which conditions."""
    pool = Pool(overrides={"max_num_seqs": 32.0})

    name = place_name(
        make_row(cell("late_binding (stalls)", pool=pool, load=1.3), [result(1, 1.0)])
    )

    assert name == "mixed 2P4D x1.3 max_num_seqs 32 stalls"


def test_variant_syntax():
    """Settings after a policy's name are read as what they look like."""
    variant = parse_variant("late_binding:fairness=strict:gate=false:kv_share=0.9:gate_tries=4")

    assert variant.policy == "late_binding"
    assert variant.settings == {
        "fairness": "strict",
        "gate": False,
        "kv_share": 0.9,
        "gate_tries": 4,
    }


def test_key_depends_on_all_but_the_seed():
    """Cells that give other results have other keys."""
    keys = {
        cell().key(),
        cell("round_robin").key(),
        cell(pool=Pool(decode=5)).key(),
        cell(settings={"gate": False}).key(),
        cell(seconds=10.0).key(),
    }

    assert len(keys) == 5
    assert cell().key() == cell().key()
