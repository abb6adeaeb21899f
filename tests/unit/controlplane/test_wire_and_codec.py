"""Values over the wire and in Redis come back as they were."""

import math
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steelyard.v1 import control_pb2, types_pb2

from controlplane import store_codec, wire
from controlplane.core.values import Constants, Outcome, Slo, Targets
from controlplane.page.view import instance_rows, outcome_rows, percentile
from controlplane.testing import make_engine
from enginemodel.model import EngineConstants
from servicekit.errors import InvalidArgument

finite = st.floats(0, 1e9, allow_nan=False)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
seconds = st.integers(1, 10**12).map(lambda nanoseconds: nanoseconds / 1e9)
values = st.builds(EngineConstants, **{f.name: finite for f in fields(EngineConstants)})
constants = st.builds(
    Constants,
    profile=names,
    version=st.integers(1, 99),
    constants=values,
    standard_error=st.none() | values,
    heldout_median_error=finite,
    sample_count=st.integers(0, 9999),
    fingerprint=st.text(max_size=9),
    instance_scale=st.dictionaries(names, finite, max_size=3),
    published_unix_seconds=st.integers(0, 10**9).map(float),
    reason=st.text(max_size=9),
)
slos = st.builds(
    Slo,
    st.dictionaries(
        names, st.builds(Targets, st.none() | seconds, st.none() | seconds, seconds), min_size=1
    ),
    names,
)


@given(constants)
def test_constants_survive_redis(given_constants):
    """Every field of a version is read back from plain decimal strings, exactly."""
    stored = store_codec.constants_fields(given_constants) | {
        "version": str(given_constants.version),
        "published_unix": store_codec.text(given_constants.published_unix_seconds),
    }

    assert store_codec.constants_from(given_constants.profile, stored) == given_constants
    numbers = [value for name, value in stored.items() if name not in ("fingerprint", "reason")]
    assert not any("e" in value for value in numbers)


@given(constants)
def test_constants_survive_the_wire(given_constants):
    """What is published is what is listed, but for the version and time the store gives."""
    back = wire.constants_from(wire.constants_to(given_constants))

    for name in ("profile", "constants", "standard_error", "instance_scale", "reason"):
        assert getattr(back, name) == getattr(given_constants, name)
    assert (back.version, back.published_unix_seconds) == (0, 0.0)


@given(slos)
def test_targets_survive_redis_and_the_wire(policy):
    """Targets come back, those that are not aimed for included."""
    assert store_codec.slo_from(store_codec.slo_fields(policy)) == policy
    back = wire.slo_from(wire.slo_to(policy))
    assert back.classes.keys() == policy.classes.keys()
    for name, targets in policy.classes.items():
        assert (back.classes[name].ttft_seconds is None) == (targets.ttft_seconds is None)
        assert back.classes[name].tpot_seconds == pytest.approx(targets.tpot_seconds)


def test_an_engine_survives_the_wire():
    """Every field of an EngineInfo is taken over and given back."""
    info = types_pb2.EngineInfo()
    for number, field in enumerate(types_pb2.EngineInfo.DESCRIPTOR.fields, start=1):
        if field.name == "handoff_lease":
            info.handoff_lease.FromMilliseconds(30_500)
        elif field.name == "role":
            info.role = types_pb2.ROLE_MIXED
        elif field.name == "address":
            info.address = "host:1"
        elif field.type == field.TYPE_STRING:
            setattr(info, field.name, f"text{number}")
        else:
            setattr(info, field.name, number)
    engine = wire.engine_from(info)

    assert wire.engine_to(engine) == info
    assert store_codec.ENGINE.from_fields(store_codec.ENGINE.to_fields(engine)) == engine


def test_every_field_of_an_outcome_is_taken_over():
    """Nothing that a router tells is lost on the way to the stream."""
    message = control_pb2.Outcome()
    for number, field in enumerate(control_pb2.Outcome.DESCRIPTOR.fields, start=1):
        if field.type == field.TYPE_MESSAGE:
            getattr(message, field.name).FromNanoseconds(number * 10**9)
        elif field.type == field.TYPE_STRING:
            setattr(message, field.name, f"text{number}")
        else:
            setattr(message, field.name, number if field.type != field.TYPE_BOOL else True)
    outcome = wire.outcome_from(message)
    defaults = Outcome(request_id="")

    assert [
        f.name for f in fields(Outcome) if getattr(outcome, f.name) == getattr(defaults, f.name)
    ] == []
    assert len(fields(Outcome)) == len(control_pb2.Outcome.DESCRIPTOR.fields)
    stored = store_codec.OUTCOME.to_fields(outcome)
    assert store_codec.OUTCOME.from_fields(stored) == outcome


@pytest.mark.parametrize("step_seconds", [math.nan, math.inf, -0.1])
def test_impossible_reports_are_refused(step_seconds):
    """A step time that cannot be is named."""
    load = types_pb2.InstanceLoad(step_seconds=step_seconds)
    with pytest.raises(InvalidArgument) as caught:
        wire.report_from(control_pb2.ReportRequest(instance_id="a", epoch="e", load=load))

    assert [violation.field for violation in caught.value.violations] == ["load.step_seconds"]


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_enough_do_not_exceed(sample, share):
    """Nearest rank: at least that share is at or below, and the value was seen."""
    found = percentile(sample, share)

    assert found in sample
    assert sum(value <= found for value in sample) >= share * len(sample) - 1e-9


def test_the_page_counts_what_ended_lately_by_class_and_policy():
    """Old outcomes do not count; goodput is the share that met its targets."""
    rows = outcome_rows(
        [
            (
                990.0,
                Outcome(request_id="a", slo_class="t", policy="p", slo_met=True, ttft_seconds=0.1),
            ),
            (980.0, Outcome(request_id="b", slo_class="t", policy="p", status="UNAVAILABLE")),
            (100.0, Outcome(request_id="c", slo_class="t", policy="p", slo_met=True)),
            (999.0, Outcome(request_id="d")),
        ],
        1_000.0,
    )

    assert [(r.slo_class, r.policy, r.requests, r.failed, r.goodput) for r in rows] == [
        ("(none)", "(none)", 1, 0, 0.0),
        ("t", "p", 2, 1, 0.5),
    ]
    assert rows[1].ttft_p50_seconds == 0.1
    assert rows[1].tpot_p99_seconds is None


def test_the_page_shows_no_rows_of_mixed_rosters():
    """Columns of another roster are never shown beside the wrong names."""
    roster = types_pb2.Roster(
        instances=[types_pb2.Instance(engine=wire.engine_to(make_engine()), state=2)]
    )
    snapshot = types_pb2.ClusterSnapshot()

    assert instance_rows(snapshot, roster) == []
