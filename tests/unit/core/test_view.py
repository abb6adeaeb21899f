"""What policies see: the snapshot of others plus this router's own, in lists and in arrays."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.cluster import State
from dataplane.core.pool import Pool
from dataplane.core.predictor import LengthEstimate
from dataplane.core.view import Side
from tests.unit.core.builders import instance, pool, request, roster, snapshot

COLUMNS = (
    "prefill_requests",
    "prefill_tokens",
    "decode_requests",
    "decode_kv_tokens",
    "decode_remaining_tokens",
    "kv_used_tokens",
)
loads = st.lists(st.integers(0, 900), min_size=6, max_size=6)


def columns(side: Side) -> dict[str, list[float]]:
    """Return every column of a side as a list."""
    return {name: [float(x) for x in getattr(side, name)()] for name in COLUMNS}


@settings(max_examples=50, deadline=None)
@given(others=loads, own=loads)
def test_columns_are_others_plus_own(others: list[int], own: list[int]) -> None:
    """Each column is what the snapshot says of others plus what this router has there."""
    names = [f"m{i}" for i in range(6)]
    of = roster(*names)
    by_name = dict(zip(names, map(float, others), strict=True))
    kinds = []
    for vector_from in (64, 1):
        held = Pool(vector_from=vector_from)
        held.refresh(
            snapshot(
                of,
                other_prefill_requests=by_name,
                other_prefill_tokens=by_name,
                other_decode_requests=by_name,
                other_decode_kv_tokens=by_name,
                kv_used_tokens=by_name,
            )
        )
        for name, tokens in zip(names, own, strict=True):
            if tokens:
                held.charge_prefill(request(name, prompt=tokens), name)
                held.charge_decode(request(name, prompt=tokens, output=40.0), name)
        side = held.view.side("mixed")
        assert side.vectorised == (vector_from == 1)
        kinds.append(columns(side))

    typical = held.view.typical_remaining_tokens
    assert kinds[0] == kinds[1]
    present = [int(tokens > 0) for tokens in own]
    assert kinds[0]["prefill_tokens"] == [a + b for a, b in zip(others, own, strict=True)]
    assert kinds[0]["prefill_requests"] == [a + b for a, b in zip(others, present, strict=True)]
    assert kinds[0]["decode_requests"] == [a + b for a, b in zip(others, present, strict=True)]
    assert kinds[0]["decode_kv_tokens"] == [a + b for a, b in zip(others, own, strict=True)]
    assert kinds[0]["kv_used_tokens"] == others
    assert kinds[0]["decode_remaining_tokens"] == pytest.approx(
        [typical * a + 40.0 * b for a, b in zip(others, present, strict=True)]
    )


@pytest.mark.parametrize("vector_from", [1, 64])
def test_column_arithmetic_is_the_same_either_way(vector_from: int) -> None:
    """One formula does for lists and for arrays."""
    held = pool("m0", "m1", "m2", vector_from=vector_from)
    side = held.view.side("mixed")
    place = side.position()

    assert list(side.map(lambda a, b: 2.0 * a - b, place, place)) == [0.0, 1.0, 2.0]
    assert list(side.positive(side.map(lambda a: a - 1.0, place))) == [0.0, 0.0, 1.0]
    assert list(side.lesser(place, side.fixed_column([1.0, 0.0, 5.0]))) == [0.0, 0.0, 2.0]
    assert list(side.cached_tokens(request())) == [0.0, 0.0, 0.0]


def test_fixed_values_are_computed_once_a_roster() -> None:
    """What depends on the engines alone is kept over snapshots and renewed with the roster."""
    held = pool("d0", "p0")
    calls = []

    def value(engine: object, _: object) -> float:
        calls.append(engine)
        return 1.0

    for _ in range(3):
        held.view.side("decode", "k").fixed("x", value)
        held.refresh(snapshot(held.roster))
    assert len(calls) == 1
    held.refresh(snapshot(roster("d0", "p0", version=2)))
    held.view.side("decode", "k").fixed("x", value)
    assert len(calls) == 2


def test_constants_follow_profile_and_scale() -> None:
    """An engine is priced by its own profile, slowed by its own scale."""
    held = pool("d0", instance("d1", scale=2.0), instance("d2", profile="h100-qwen2.5-3b"))
    base, slow, fast = (held.view.constants_of(i).d0_seconds for i in held.roster.instances)

    assert slow == 2.0 * base
    assert fast < base


def test_a_stale_snapshot_leaves_the_own_ledger() -> None:
    """Old news of others are not believed, one's own are."""
    held = pool("p0", "d0")
    held.charge_prefill(request(prompt=70), "p0")
    held.refresh(snapshot(held.roster, stale=True, other_prefill_tokens={"p0": 900.0}))

    assert list(held.view.side("prefill").prefill_tokens()) == [70.0]
    assert held.stale


def test_own_charges_survive_a_new_roster() -> None:
    """Charges follow their engine to its new place, and go with its boot."""
    held = pool("p0", "p1", "d0")
    held.charge_prefill(request("a", prompt=50), "p1")
    held.refresh(snapshot(roster("d0", "p1", "p2", version=2)))
    assert list(held.view.side("prefill").prefill_tokens()) == [50.0, 0.0]

    held.refresh(snapshot(roster("d0", instance("p1", epoch="2"), version=3)))
    assert list(held.view.side("prefill").prefill_tokens()) == [0.0]
    assert held.close("a")


def test_the_rest_of_a_stream_is_renewed_as_it_goes() -> None:
    """Streamed tokens move KV on and the rest down, never to nothing."""
    held = pool("p0", "d0")
    asked = request("a", prompt=10, output=20.0, max_tokens=500)
    held.charge_decode(asked, "d0")
    rests = []
    for _ in range(30):
        held.streamed("a", 5)
        rests.append(held.ledger.columns.decode_remaining_tokens[1])

    assert held.generated_tokens("a") == 150
    assert held.ledger.columns.decode_kv_tokens[1] == 160.0
    assert rests[0] == 15.0
    assert min(rests) >= 1.0


def test_what_others_generate_is_taken_to_be_typical() -> None:
    """The rest of others' sequences is guessed from what this router's own are expected to have."""
    held = pool("p0", "d0")
    for i in range(400):
        one = request(f"r{i}", output=600.0, max_tokens=1000)
        held.charge_decode(one, "d0")
        held.close(f"r{i}")

    assert held.view.typical_remaining_tokens == pytest.approx(300.0, rel=0.05)


def test_draining_engines_are_no_candidates() -> None:
    """Only READY instances are, and silent ones where nothing else is left."""
    held = pool(instance("p0", state=State.STALE), "p1", instance("p2", state=State.DRAINING), "d0")
    assert [i.instance_id for i in held.view.side("prefill").instances] == ["p1"]

    held = pool(instance("p0", state=State.STALE), instance("p2", state=State.DRAINING), "d0")
    assert [i.instance_id for i in held.view.side("prefill").instances] == ["p0"]


def test_instances_are_found_by_id() -> None:
    """A pool knows where an instance stands, and that another is not there."""
    held = pool("p0", "d0")

    assert held.instance("d0") is held.roster.instances[1]
    assert held.slot("d0") == 1
    assert held.instance("d9") is None
    assert held.slot("d9") is None
    assert "Pool of 2, 0 in flight" in repr(held)


def test_closing_forgets_the_progress() -> None:
    """A request that is placed again is closed first, and starts from nothing."""
    held = pool("p0", "d0")
    held.charge_decode(request("a"), "d0")
    held.streamed("a", 3)
    held.close("a")

    assert held.generated_tokens("a") == 0
    assert held.ledger.columns.decode_requests[1] == 0.0
    held.streamed("a", 1)
    assert held.generated_tokens("a") == 0


def test_an_estimate_without_histogram_is_a_number() -> None:
    """The builders' requests carry a mean alone."""
    assert request(output=50.0).predicted_tokens == 50.0
    assert isinstance(request().length, LengthEstimate)
