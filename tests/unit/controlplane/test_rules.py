"""What may be published: constants, targets; and how lengths are counted."""

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core import constants, slo
from controlplane.core.lengths import BUCKET_EDGES, LengthTable, bucket_of, keys
from controlplane.core.values import Constants, Outcome, Slo, Targets
from dataplane.core import predictor
from enginemodel.profiles import A40_QWEN, PROFILES

GOOD = Constants(profile="p", version=0, constants=A40_QWEN.constants)
NAMES = list(asdict(A40_QWEN.constants))


def with_value(name: str, value: float) -> Constants:
    """Make a draft with one value replaced."""
    return replace(GOOD, constants=replace(A40_QWEN.constants, **{name: value}))


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_reference_profiles_could_be_published(profile):
    """What is built in passes the rules for what is fitted."""
    assert constants.problems(replace(GOOD, constants=profile.constants)) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9])
def test_impossible_numbers_are_named(name, value):
    """A value that is not finite or is negative is refused under its own name."""
    found = constants.problems(with_value(name, value))

    assert [problem.field for problem in found] == [f"constants.constants.{name}"]


@pytest.mark.parametrize(
    ("name", "factor"),
    [(name, 1000.0) for name in NAMES if name.startswith(("p", "d", "h0"))]
    + [("handoff_bytes_per_second", 1e-9)],
)
def test_wrong_units_are_refused(name, factor):
    """Milliseconds given for seconds, or GB/s for bytes/s, fall outside what can be."""
    wrong = asdict(A40_QWEN.constants)[name] * factor

    assert [p.field for p in constants.problems(with_value(name, wrong))] == [
        f"constants.constants.{name}"
    ]


@pytest.mark.parametrize(
    "zeroed", [("p0_seconds", "p1_seconds", "p2_seconds_per_token"),
               ("d0_seconds", "d1_seconds_per_sequence")],
)  # fmt: skip
def test_free_work_is_refused(zeroed):
    """Steps that cost nothing would attract every request."""
    free = replace(A40_QWEN.constants, **dict.fromkeys(zeroed, 0.0))

    assert len(constants.problems(replace(GOOD, constants=free))) == 1


def test_bad_evidence_is_named():
    """Errors, held-out error and scales are checked as well."""
    draft = replace(
        GOOD,
        standard_error=replace(A40_QWEN.constants, p0_seconds=math.nan, d0_seconds=-1.0),
        heldout_median_error=math.inf,
        instance_scale={"a": 1.3, "b": 0.0},
    )

    assert [problem.field for problem in constants.problems(draft)] == [
        "constants.standard_error.p0_seconds",
        "constants.heldout_median_error",
        "constants.instance_scale[b]",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_threefold_step_is_a_jump_either_way(name):
    """Three times up or down is a jump, twice is none."""
    current = A40_QWEN.constants
    value = asdict(current)[name]
    jumped = [
        [p.field for p in constants.jumps(current, replace(current, **{name: value * factor}))]
        for factor in (3.01, 1 / 3.01, 2.0, 0.5)
    ]

    assert jumped == [[f"constants.constants.{name}"]] * 2 + [[], []]


def test_noise_about_zero_is_no_jump():
    """A constant that is negligible before and after may change by any factor."""
    before = replace(A40_QWEN.constants, p3_seconds_per_token_squared=1e-13)
    after = replace(before, p3_seconds_per_token_squared=0.0)

    assert constants.jumps(before, after) == []


def test_an_unknown_profile_gets_the_reference_flagged():
    """Nobody measured it, and the version says so."""
    found = constants.reference("something-else")

    assert (found.version, found.uncalibrated, found.constants) == (0, True, A40_QWEN.constants)
    assert constants.reference("h100-qwen2.5-3b").constants == PROFILES["h100-qwen2.5-3b"].constants


def test_default_targets_are_the_papers():
    """Tight is 175 ms and 39.7 ms, loose three times that, and loose is what nobody asks for."""
    assert slo.problems(slo.DEFAULT) == []
    assert slo.DEFAULT.classes["tight"] == Targets(0.175, 0.0397)
    assert slo.DEFAULT.classes["loose"].ttft_seconds == pytest.approx(0.525)
    assert slo.DEFAULT.classes["loose"].tpot_seconds == pytest.approx(0.1191)
    assert slo.DEFAULT.default_class == "loose"


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (Slo({}, ""), "slo.classes"),
        (Slo({"a": Targets()}, "b"), "slo.default_class"),
        (Slo({"a b": Targets()}, "a b"), "slo.classes[a b]"),
        (Slo({"a": Targets(ttft_seconds=0.0)}, "a"), "slo.classes[a].ttft"),
        (Slo({"a": Targets(tpot_seconds=math.nan)}, "a"), "slo.classes[a].tpot"),
        (
            Slo({"a": Targets(ttft_seconds_per_prompt_token=-1.0)}, "a"),
            "slo.classes[a].ttft_per_prompt_token",
        ),
    ],
)
def test_impossible_targets_are_named(policy, field):
    """What cannot be aimed for is refused under its name."""
    assert field in [problem.field for problem in slo.problems(policy)]


def outcome(tokens=100, prompt=300, status="ok", **fields):
    """Make a finished request."""
    return Outcome(
        request_id="r",
        model="m",
        tenant="t",
        slo_class="tight",
        prompt_tokens=prompt,
        completion_tokens=tokens,
        status=status,
        **fields,
    )


def test_keys_and_buckets_are_those_that_routers_look_up():
    """The control plane counts under the very keys and edges that the predictor reads."""
    query = predictor.LengthQuery(
        model="m", tenant="t", slo_class="tight", prompt_tokens=300, max_tokens=9, request_id="r"
    )

    assert keys(outcome()) == predictor.keys(query)
    assert BUCKET_EDGES == predictor.BUCKET_EDGES
    assert BUCKET_EDGES[0] == 1
    assert BUCKET_EDGES[-1] == 65_536


@given(st.integers(1, 200_000))
def test_a_length_falls_into_the_smallest_bucket_that_holds_it(tokens):
    """The edge is at or above the length, the one before is below; the last takes the rest."""
    bucket = bucket_of(tokens)

    assert tokens <= BUCKET_EDGES[bucket] or bucket == len(BUCKET_EDGES) - 1
    assert bucket == 0 or BUCKET_EDGES[bucket - 1] < tokens


def test_evidence_halves_with_its_half_life():
    """An outcome counts half after one half-life, and only while new ones come in."""
    table = LengthTable(half_life_seconds=100.0)
    table.fold([outcome()], 1_000.0)
    table.fold([outcome()], 1_100.0)

    assert sum(table.weights["m|||"]) == pytest.approx(1.5)


def test_what_did_not_end_by_itself_does_not_count():
    """A cancelled request says nothing of how long its answer would have been."""
    table = LengthTable(half_life_seconds=100.0)

    assert table.fold([outcome(status="CANCELLED"), outcome(tokens=0)], 1.0) == 0
    assert table.weights == {}


def test_forgotten_keys_are_dropped():
    """A key whose evidence has decayed away leaves the table."""
    table = LengthTable(half_life_seconds=1.0)
    table.fold([outcome()], 0.0)
    table.fold([replace(outcome(), tenant="other")], 60.0)

    assert "m|t|tight|512" not in table.weights
    assert "m|other|tight|512" in table.weights


def test_a_separator_in_a_name_cannot_forge_a_key():
    """A tenant named like a key counts under a name of its own."""
    assert keys(replace(outcome(), tenant="a|b"))[0] == "m|a_b|tight|512"
