"""Folding reports into states, and laying them out in columns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.liveness import Liveness, Signal, State, Timing
from controlplane.core.registry import Sighting, sweep
from controlplane.core.snapshot import columns
from controlplane.core.values import Engine, Load, Member, Report, Role, RouterShare

NOW = 1_000.0


def member(instance_id="a", state=State.READY, epoch="e1", registered=NOW - 60, *, drained=False):
    """Make a member."""
    engine = Engine(
        instance_id=instance_id, epoch=epoch, role=Role.DECODE, model="m", address="h:1"
    )
    return Member(engine, Liveness(state, drained), registered)


def sighting(age=0.05, epoch="e1", *, instance_id="a", healthy=True, leaving=False, **load):
    """Make a sighting `age` seconds ago."""
    report = Report(instance_id, epoch, Load(engine_healthy=healthy, **load), leaving)
    return Sighting(NOW - age, report)


def swept(who, seen, **arguments):
    """Sweep one member; returns the state after and the kind of event, or None."""
    changes = list(sweep([who], {"a": seen} if seen else {}, NOW, Timing(), **arguments))
    assert len(changes) <= 1
    return (changes[0].after.state, changes[0].happening.kind) if changes else None


@pytest.mark.parametrize(
    ("who", "seen", "expected"),
    [
        (member(), sighting(), None),
        (member(state=State.JOINING), sighting(), (State.READY, "ready")),
        (member(), sighting(healthy=False), (State.JOINING, "not_ready")),
        (member(), sighting(0.5), (State.STALE, "stale")),
        (member(state=State.STALE), sighting(), (State.READY, "returned")),
        (member(state=State.STALE), sighting(0.5), None),
        (member(state=State.STALE), sighting(6.0), (State.GONE, "gone")),
        (member(), sighting(leaving=True), (State.GONE, "left")),
        (member(), sighting(6.0, leaving=True), (State.GONE, "left")),
        (member(state=State.STALE, drained=True), sighting(), (State.DRAINING, "returned")),
        # Another boot's report says nothing of this one, but somebody is there.
        (member(state=State.JOINING), sighting(epoch="e0"), None),
        # Registered, never reported.
        (member(state=State.JOINING, registered=NOW - 0.1), None, None),
        (member(state=State.JOINING, registered=NOW - 1), None, (State.STALE, "stale")),
    ],
)
def test_reports_and_silence_move_instances(who, seen, expected):
    """Each situation leads to its state, and to one event that names it."""
    assert swept(who, seen) == expected


def test_the_control_planes_own_absence_is_held_against_nobody():
    """Silence counts only from when somebody was there to listen."""
    silent = sighting(60.0)

    assert swept(member(), silent, listening_since_unix_seconds=NOW - 0.1) is None
    assert swept(member(), silent, listening_since_unix_seconds=NOW - 0.5) == (
        State.STALE,
        "stale",
    )


def test_changes_carry_what_they_rest_on():
    """A change says when the instance was last really heard, so that it can be voided."""
    (change,) = sweep([member()], {"a": sighting(0.5)}, NOW, Timing())

    assert (change.signal, change.seen_unix_seconds) == (Signal.SILENT, NOW - 0.5)


def test_columns_follow_the_roster():
    """Each list has one entry a member, in their order; a foreign epoch's load does not count."""
    members = [member("a"), member("b"), member("c", epoch="e2")]
    seen = {
        "b": sighting(0.1, instance_id="b", running=3, kv_used_tokens=70, step_seconds=0.02),
        "a": sighting(0.2, running=1, waiting=4, queued_prefill_tokens=9),
        "c": sighting(0.3, instance_id="c", running=99),
    }
    loads = columns(members, seen, NOW).loads

    assert loads.running == [1, 3, 0]
    assert loads.waiting == [4, 0, 0]
    assert loads.kv_used_tokens == [0, 70, 0]
    assert loads.queued_prefill_tokens == [9, 0, 0]
    assert loads.step_seconds == [0.0, 0.02, 0.0]
    assert loads.age_seconds == pytest.approx([0.2, 0.1, 0.3])


shares = st.lists(st.builds(RouterShare, st.sampled_from("rst"), *[st.integers(0, 9)] * 6))


@given(st.lists(shares, max_size=6))
def test_router_columns_add_up_to_what_agents_counted(by_instance):
    """Nothing that an agent counts for a router is lost or moved to another instance."""
    members = [member(f"i{n}") for n in range(len(by_instance))]
    seen = {
        f"i{n}": sighting(instance_id=f"i{n}", by_router=tuple(entries))
        for n, entries in enumerate(by_instance)
    }
    tables = columns(members, seen, NOW).by_router

    for n, entries in enumerate(by_instance):
        for router in "rst":
            expected = sum(e.decode_kv_tokens for e in entries if e.router_id == router)
            found = tables[router].decode_kv_tokens[n] if router in tables else 0
            assert found == expected


def test_an_age_is_never_negative():
    """A report stored after the clock was read is 0 seconds old."""
    assert columns([member()], {"a": sighting(-0.01)}, NOW).loads.age_seconds == [0.0]
