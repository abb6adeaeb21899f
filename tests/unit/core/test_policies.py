"""Placement policies: what each goes by, and what holds of all."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.cluster import Instance, State
from dataplane.core.errors import (
    InvalidSettingError,
    NoCandidateError,
    RejectReason,
    UnknownPolicyError,
)
from dataplane.core.policies.base import Placement
from dataplane.core.policies.registry import POLICIES, make_policy
from dataplane.core.pool import Pool
from dataplane.core.request import Request, Targets
from tests.unit.core.builders import instance, pool, request, roster, snapshot

NAMES = ("p0", "p1", "d0", "d1")


def loaded(
    *engines: Instance | str,
    prefill: dict[str, list[int]] | None = None,
    decode: dict[str, list[tuple[int, int]]] | None = None,
    **columns: dict[str, float],
) -> Pool:
    """Return a pool with prompts in prefill and (prompt, output) sequences in decode."""
    held = pool(*(engines or NAMES))
    held.refresh(snapshot(held.roster, **columns))
    for name, prompts in (prefill or {}).items():
        for i, tokens in enumerate(prompts):
            held.charge_prefill(request(f"{name}.{i}", prompt=tokens), name)
    for name, sequences in (decode or {}).items():
        for i, (tokens, output) in enumerate(sequences):
            held.charge_decode(request(f"{name}.{i}", prompt=tokens, output=output), name)
    return held


def place(name: str, held: Pool, asked: Request | None = None, **settings: object) -> Placement:
    """Return where a policy puts a request."""
    return make_policy(name, settings).place(asked or request(), held.view)


PREFILL_CASES = [
    ("least_loaded", {"p0": [10, 10], "p1": [4000]}, 100, "p1"),
    ("length_threshold", {"p0": [10, 10], "p1": [4000]}, 100, "p1"),
    ("power_of_two", {"p0": [10, 10], "p1": [4000]}, 100, "p1"),
    ("marginal_cost", {"p0": [10, 10], "p1": [4000]}, 100, "p0"),
    ("drain_time", {"p0": [10, 10], "p1": [4000]}, 100, "p0"),
    ("block_overlap", {"p0": [10, 10], "p1": [4000]}, 100, "p0"),
    # (40 + 100) * 5 against (300 + 100) * 2, and with a prompt of 1,000 the other way round.
    ("token_product", {"p0": [10, 10, 10, 10], "p1": [300]}, 100, "p0"),
    ("token_product", {"p0": [10, 10, 10, 10], "p1": [300]}, 1000, "p1"),
    # Both keep the loose target, so the busier one gets it; then neither, so the idler.
    ("slo_headroom", {"p0": [10], "p1": [2000]}, 100, "p1"),
    ("slo_headroom", {"p0": [9000], "p1": [20_000]}, 100, "p0"),
    ("slo_headroom", {"p0": [10], "p1": [20_000]}, 100, "p0"),
]


@pytest.mark.parametrize(("name", "prefill", "prompt", "expected"), PREFILL_CASES)
def test_prefill_goes_to(
    name: str, prefill: dict[str, list[int]], prompt: int, expected: str
) -> None:
    """Each policy takes the prefill instance that its formula prices lowest."""
    held = loaded(prefill=prefill)

    assert place(name, held, request(prompt=prompt)).prefill_id == expected


DECODE_CASES = [
    ("least_loaded", {"d0": [(10, 10), (10, 10)], "d1": [(4000, 900)]}, "d1"),
    ("power_of_two", {"d0": [(10, 10), (10, 10)], "d1": [(4000, 900)]}, "d1"),
    ("marginal_cost", {"d0": [(10, 10), (10, 10)], "d1": [(4000, 900)]}, "d0"),
    ("drain_time", {"d0": [(10, 10), (10, 10)], "d1": [(10, 900)]}, "d0"),
    ("block_overlap", {"d0": [(10, 10), (10, 10)], "d1": [(4000, 10)]}, "d0"),
    ("token_product", {"d0": [(10, 10), (10, 10)], "d1": [(30, 10)]}, "d1"),
    ("token_product", {"d0": [(10, 10), (10, 10)], "d1": [(4000, 10)]}, "d0"),
    ("slo_headroom", {"d0": [(10, 10)], "d1": [(4000, 10)]}, "d1"),
]


@pytest.mark.parametrize(("name", "decode", "expected"), DECODE_CASES)
def test_decode_goes_to(name: str, decode: dict[str, list[tuple[int, int]]], expected: str) -> None:
    """Each policy takes the decode instance that its formula prices lowest."""
    assert place(name, loaded(decode=decode)).decode_id == expected


def test_round_robin_takes_turns() -> None:
    """Both sides go round by id, whatever the load."""
    held = loaded("p0", "p1", "d0", "d1", "d2", prefill={"p0": [5000] * 9})
    policy = make_policy("round_robin")

    placed = [policy.place(request(f"r{i}"), held.view) for i in range(6)]

    assert [p.prefill_id for p in placed] == ["p0", "p1"] * 3
    assert [p.decode_id for p in placed] == ["d0", "d1", "d2"] * 2


def test_explaining_does_not_move_the_turn() -> None:
    """To ask round robin what it would do changes nothing."""
    policy = make_policy("round_robin")
    held = loaded()
    policy.explain(request(), held.view)

    assert policy.place(request(), held.view).prefill_id == "p0"


@pytest.mark.parametrize(("output", "part"), [(100, {"d0", "d1"}), (800, {"d2", "d3"})])
def test_length_threshold_parts_the_pool(output: int, part: set[str]) -> None:
    """Long outputs keep to the last half of the decode instances, short ones to the first."""
    held = loaded("p0", "d0", "d1", "d2", "d3")
    asked = [request(f"r{i}", output=output) for i in range(40)]

    assert {place("length_threshold", held, one).decode_id for one in asked} == part


def test_length_threshold_needs_two_to_part() -> None:
    """A single decode instance takes both kinds."""
    held = loaded("p0", "d0")

    assert place("length_threshold", held, request(output=900)).decode_id == "d0"


def test_power_of_two_looks_at_two_only() -> None:
    """The least loaded of many is missed by most requests, and a seed changes who sees it."""
    engines = [f"d{i:02d}" for i in range(20)]
    held = loaded("p0", *engines, decode={name: [(10, 10)] for name in engines[1:]})
    placed = [place("power_of_two", held, request(f"r{i}")).decode_id for i in range(300)]

    assert 0.02 < placed.count("d00") / 300 < 0.25
    other = [place("power_of_two", held, request(f"r{i}"), seed=1).decode_id for i in range(300)]
    assert placed != other


def test_drain_time_fears_full_memory() -> None:
    """With little to generate but full memory an instance is left alone, if memory counts."""
    decode = {"d0": [(50_000, 1)], "d1": [(10, 60)]}

    assert place("drain_time", loaded(decode=decode)).decode_id == "d1"
    assert place("drain_time", loaded(decode=decode), memory_seconds=0.0).decode_id == "d0"


def test_block_overlap_counts_what_prefill_still_holds() -> None:
    """KV that nobody pulled yet makes a prefill instance dearer."""
    held = loaded(kv_used_tokens={"p0": 20_000.0})

    assert place("block_overlap", held).prefill_id == "p1"
    weighted = loaded(decode={"d0": [(10, 10), (10, 10)], "d1": [(40, 10)]})
    assert place("block_overlap", weighted, request_weight=10.0).decode_id == "d1"


def test_slo_headroom_respects_its_margin_and_missing_targets() -> None:
    """With a smaller margin the busy instance has no headroom; without targets all have."""
    held = loaded(prefill={"p0": [10], "p1": [5000]})

    assert place("slo_headroom", held).prefill_id == "p1"
    assert place("slo_headroom", held, margin=0.3).prefill_id == "p0"
    endless = request(targets=Targets(float("inf"), float("inf")))
    assert place("slo_headroom", held, endless).prefill_id == "p1"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_others_have_counts(name: str) -> None:
    """Load of other routers in the snapshot weighs like a router's own."""
    if name == "round_robin":
        return
    many = {"p0": 9.0}
    held = loaded(
        other_prefill_requests=many,
        other_prefill_tokens={"p0": 90_000.0},
        kv_used_tokens={"p0": 50_000.0},
        other_decode_requests={"d0": 90.0},
        other_decode_kv_tokens={"d0": 59_000.0},
    )
    asked = request(targets=Targets(0.5, 0.0135))

    placed = place(name, held, asked, **({"long_share": 0.5} if "threshold" in name else {}))

    assert placed.prefill_id == "p1"
    if name != "length_threshold":
        assert placed.decode_id == "d1"


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=25, deadline=None)
@given(loads=st.lists(st.integers(0, 5), min_size=8, max_size=8), seed=st.integers(0, 99))
def test_the_order_of_candidates_never_matters(name: str, loads: list[int], seed: int) -> None:
    """A roster in any order leads to the same decision, and so does either kind of column."""
    engines = [instance(n) for n in ("p0", "p1", "p2", "p3", "d0", "d1", "d2", "d3")]
    placed = []
    for shuffled, vector_from in ((False, 64), (True, 64), (True, 1)):
        order = list(engines)
        if shuffled:
            Random(seed).shuffle(order)
        held = pool(*order, vector_from=vector_from)
        for engine, load in zip(engines, loads, strict=True):
            for i in range(load):
                other = request(f"{engine.instance_id}.{i}", prompt=64 * load)
                charge = held.charge_prefill if engine.instance_id[0] == "p" else held.charge_decode
                charge(other, engine.instance_id)
        policy = make_policy(name)
        placed.append([policy.place(request(f"r{i}"), held.view) for i in range(4)])

    assert placed[0] == placed[1] == placed[2]


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("vector_from", [1, 64])
def test_equals_share(name: str, vector_from: int) -> None:
    """On an idle cluster of equals no instance gets all requests, nor do pairs form."""
    names = [f"{side}{i}" for side in "pd" for i in range(4)]
    held = pool(*names, vector_from=vector_from)
    policy = make_policy(name)
    placed = [policy.place(request(f"r{i}"), held.view) for i in range(400)]

    prefill = Counter(p.prefill_id for p in placed)
    decode = Counter(p.decode_id for p in placed)
    assert set(prefill) == {"p0", "p1", "p2", "p3"}
    assert max(prefill.values()) < 160
    assert len(decode) == (2 if name == "length_threshold" else 4)
    if name not in {"round_robin", "length_threshold"}:
        assert len({(p.prefill_id, p.decode_id) for p in placed}) == 16


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_explanations_show_what_decides(name: str) -> None:
    """The candidate with the least sum of terms is the one that is taken."""
    held = loaded(
        prefill={"p0": [3000], "p1": [20, 20]},
        decode={"d0": [(3000, 900)], "d1": [(20, 5), (20, 5)]},
    )
    policy = make_policy(name)
    asked = request()

    terms = policy.explain(asked, held.view)
    placed = policy.place(asked, held.view)

    cheapest = [
        min(side, key=lambda i, side=side: sum(side[i].values()))
        for side in (terms.prefill, terms.decode)
    ]
    assert cheapest == [placed.prefill_id, placed.decode_id]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_mixed_pool_needs_no_hand_off(name: str) -> None:
    """Where instances do both, the one that decodes computes the prompt."""
    placed = place(name, pool("m0", "m1"))

    assert placed.prefill_id is None
    assert placed.decode_id in {"m0", "m1"}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_only_pairs_are_used(name: str) -> None:
    """An instance without a partner is never taken, nor are two that do not pair."""
    held = pool(
        instance("p0", pairing_key="a"),
        instance("p1", pairing_key="b"),
        instance("p2", pairing_key="c"),
        instance("d0", pairing_key="a"),
        instance("d1", pairing_key="b"),
        instance("d2", pairing_key="d"),
    )
    policy = make_policy(name)
    placed = [policy.place(request(f"r{i}"), held.view) for i in range(30)]

    assert {(p.prefill_id, p.decode_id) for p in placed} <= {("p0", "d0"), ("p1", "d1")}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_excluded_and_unready_instances_are_left_out(name: str) -> None:
    """What failed before, joins or drains gets nothing new."""
    held = pool(
        "p0",
        "p1",
        instance("p2", state=State.DRAINING),
        instance("p3", state=State.JOINING),
        instance("p4", state=State.STALE),
        "d0",
        "d1",
    )
    asked = [request(f"r{i}", excluded=frozenset({"p0", "d1"})) for i in range(20)]

    assert {place(name, held, one) for one in asked} == {Placement("p1", "d0")}


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        (("d0",), RejectReason.NO_PREFILL_INSTANCE),
        (("p0",), RejectReason.NO_DECODE_INSTANCE),
        ((), RejectReason.NO_PREFILL_INSTANCE),
    ],
)
def test_an_empty_side_is_said(name: str, engines: tuple[str, ...], reason: RejectReason) -> None:
    """Without candidates the policy says which side has none."""
    with pytest.raises(NoCandidateError) as caught:
        place(name, pool(*engines))

    assert caught.value.reason is reason


def test_unknown_names_and_settings_are_refused() -> None:
    """The message names what there is."""
    with pytest.raises(UnknownPolicyError, match="round_robin"):
        make_policy("nonsense")
    for name, wrong in (
        ("least_loaded", {"nonsense": 1}),
        ("length_threshold", {"long_share": 1.0}),
        ("length_threshold", {"threshold_tokens": 0}),
        ("drain_time", {"memory_seconds": -1.0}),
        ("block_overlap", {"prefill_scale": -1.0}),
        ("block_overlap", {"request_weight": -1.0}),
        ("slo_headroom", {"margin": 0.0}),
        ("marginal_cost", {"queue_seconds": -1.0}),
        ("marginal_cost", {"pressure_knee": 1.0}),
        ("marginal_cost", {"decode_cost_factor": 0.0}),
    ):
        with pytest.raises(InvalidSettingError):
            make_policy(name, wrong)


def test_a_roster_of_stale_instances_is_used_blindly() -> None:
    """Where all have gone silent they are used all the same, and the side says that it is blind."""
    stale = [instance(n, state=State.STALE) for n in ("p0", "d0")]
    held = Pool()
    held.refresh(snapshot(roster(*stale), stale=True))

    assert place("least_loaded", held) == Placement("p0", "d0")
    assert held.view.side("prefill").blind
