"""From a serialized snapshot to what the scheduler core reads."""

import pytest
from google.protobuf.message import DecodeError
from steelyard.v1 import types_pb2

from dataplane.core.cluster import Role, State
from dataplane.core.slo import DEFAULT_SLO
from dataplane.router.snapshots import SnapshotReader, targets_from
from tests.support.snapshots import engine, roster, snapshot

ROUTER = "router-0"


def columns(router_id: str, tokens: list[int]) -> types_pb2.RouterColumns:
    """Return what one router has in flight, the same tokens on every side."""
    return types_pb2.RouterColumns(
        router_id=router_id,
        prefill_requests=[1] * len(tokens),
        prefill_tokens=tokens,
        decode_requests=[2] * len(tokens),
        decode_kv_tokens=tokens,
    )


def test_only_the_load_of_others_is_counted():
    """The reader's own columns are left out, all others' are added up, nobody's included."""
    message = snapshot(
        roster("p0", "d0"),
        by_router=[
            columns(ROUTER, [1000, 1000]),
            columns("router-1", [5, 7]),
            columns("", [30, 40]),
        ],
    )
    state = SnapshotReader(ROUTER).read(message.SerializeToString())
    measured = state.pools["tiny"].measurements

    assert measured.other_prefill_tokens.tolist() == [35, 47]
    assert measured.other_decode_kv_tokens.tolist() == [35, 47]
    assert measured.other_prefill_requests.tolist() == [2, 2]
    assert measured.other_decode_requests.tolist() == [4, 4]


def test_a_roster_is_parsed_only_when_its_version_is_new():
    """Garbage in an old version's roster goes unnoticed; in a new version's it is an error."""
    reader = SnapshotReader(ROUTER)
    first = reader.read(snapshot(roster("p0", "d0"), version=3).SerializeToString())
    again = snapshot(roster("p0"), sequence=2, version=3)
    again.roster = b"\xff\xff"
    second = reader.read(again.SerializeToString())
    again.roster_version = 4

    assert second.pools["tiny"].roster is first.pools["tiny"].roster
    assert second.sequence == 2
    with pytest.raises(DecodeError):
        reader.read(again.SerializeToString())


def test_a_bad_roster_is_read_again_when_it_comes_whole():
    """A version whose roster did not parse is not taken for known."""
    reader = SnapshotReader(ROUTER)
    broken = snapshot(roster("p0"), version=5)
    broken.roster = b"\xff\xff"
    with pytest.raises(DecodeError):
        reader.read(broken.SerializeToString())
    state = reader.read(snapshot(roster("p0", "d0"), version=5).SerializeToString())

    assert [i.instance_id for i in state.pools["tiny"].roster.instances] == ["p0", "d0"]


def test_lengths_come_once_a_version():
    """The length table is handed on with a new version and left out otherwise."""
    table = types_pb2.LengthTable(lengths=[types_pb2.LengthStatistics(key="k", weights=[1, 2])])
    reader = SnapshotReader(ROUTER)
    message = snapshot(roster("p0"), lengths=table, lengths_version=9)
    first = reader.read(message.SerializeToString())
    second = reader.read(message.SerializeToString())

    assert first.lengths == {"k": (1.0, 2.0)}
    assert second.lengths is None


def test_pools_are_told_apart_by_model_and_revision():
    """Each pool gets its own instances and its own rows of every column, in the roster's order."""
    members = roster(
        engine("p0", model="a"),
        engine("p1", model="b", model_revision="r2"),
        engine("d0", model="a"),
        engine("d1", model="b", model_revision="r2"),
    )
    loads = types_pb2.LoadColumns(kv_used_tokens=[1, 2, 3, 4])
    message = snapshot(members, loads=loads, by_router=[columns("other", [10, 20, 30, 40])])
    state = SnapshotReader(ROUTER).read(message.SerializeToString())

    assert set(state.pools) == {"a", "b@r2"}
    assert [i.instance_id for i in state.pools["b@r2"].roster.instances] == ["p1", "d1"]
    assert state.pools["a"].measurements.kv_used_tokens.tolist() == [1, 3]
    assert state.pools["b@r2"].measurements.other_prefill_tokens.tolist() == [20, 40]


@pytest.mark.parametrize(("given", "seen"), [([7], [7, 0]), ([7, 8, 9], [7, 8]), ([], [0, 0])])
def test_ragged_columns_are_made_to_fit(given, seen):
    """A column of another length than the roster is filled with zeros or cut, never an error."""
    message = snapshot(
        roster("p0", "d0"),
        loads=types_pb2.LoadColumns(kv_used_tokens=given),
        by_router=[columns("other", given)],
    )
    measured = SnapshotReader(ROUTER).read(message.SerializeToString()).pools["tiny"].measurements

    assert measured.kv_used_tokens.tolist() == seen
    assert measured.other_decode_kv_tokens.tolist() == seen


def test_an_instance_is_read_whole():
    """Role, state, lease, limits and scale arrive as the core's values."""
    members = roster(
        engine("d0", epoch="e9", vocab_size=77),
        states={"d0": types_pb2.INSTANCE_STATE_DRAINING},
    )
    members.instances[0].scale = 1.25
    state = SnapshotReader(ROUTER).read(snapshot(members).SerializeToString())
    (instance,) = state.pools["tiny"].roster.instances

    assert (instance.role, instance.state) == (Role.DECODE, State.DRAINING)
    assert (instance.epoch, instance.vocab_size, instance.scale) == ("e9", 77, 1.25)
    assert instance.handoff_lease_seconds == 30.0


def test_constants_and_targets_come_with_the_roster():
    """Published constants and SLO classes replace the built-in ones."""
    members = roster("p0")
    members.constants.add(profile="x", version=4).constants.d0_seconds = 0.5
    members.slo.default_class = "gold"
    members.slo.classes["gold"].ttft.FromMilliseconds(100)
    read = SnapshotReader(ROUTER).read(snapshot(members).SerializeToString()).pools["tiny"].roster

    assert (read.constants["x"].version, read.constants["x"].constants.d0_seconds) == (4, 0.5)
    assert read.slo.classes["gold"].ttft_seconds == pytest.approx(0.1)
    assert read.slo.classes["gold"].tpot_seconds == float("inf")


def test_without_targets_the_built_in_classes_hold():
    """A roster without SLO classes leaves the default ones in force."""
    read = SnapshotReader(ROUTER).read(snapshot(roster("p0")).SerializeToString())

    assert read.pools["tiny"].roster.slo == DEFAULT_SLO


def test_an_aged_state_is_marked_stale_in_every_pool():
    """Ageing keeps rosters and marks measurements as not to be believed."""
    state = SnapshotReader(ROUTER).read(snapshot(roster("p0", "d0")).SerializeToString())
    aged = state.aged()

    assert [s.stale for s in aged.pools.values()] == [True]
    assert aged.pools["tiny"].roster is state.pools["tiny"].roster


def test_targets_that_are_not_set_are_not_aimed_for():
    """Absent and zero targets are infinite."""
    message = types_pb2.SloTargets()
    message.ttft.FromSeconds(0)

    assert targets_from(message).ttft_seconds == float("inf")
    assert targets_from(message).tpot_seconds == float("inf")
