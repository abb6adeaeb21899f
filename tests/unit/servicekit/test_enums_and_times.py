"""Enums by short names, and times of the protocol as seconds."""

import pytest
from google.protobuf.descriptor import EnumDescriptor
from hypothesis import given
from hypothesis import strategies as st
from steelyard.v1 import control_pb2, types_pb2

from servicekit.enums import number_of, short_name
from servicekit.times import duration, seconds_if_set, seconds_of, timestamp

ENUMS = [types_pb2.Role, types_pb2.InstanceState, types_pb2.FinishReason]


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.DESCRIPTOR.name)
def test_short_names_go_both_ways(enum):
    """Every value has a name without its enum's, and is found by it."""
    descriptor: EnumDescriptor = enum.DESCRIPTOR
    for value in descriptor.values:
        short = short_name(enum, value.number)
        assert value.name.endswith(f"_{short}")
        assert descriptor.values[0].name == value.name.removesuffix(short) + "UNSPECIFIED"
        assert number_of(enum, short) == value.number


def test_a_name_that_is_none_is_refused():
    """A short name of another enum is no value."""
    with pytest.raises(ValueError, match="ROLE_READY"):
        number_of(types_pb2.Role, "READY")


@given(nanoseconds=st.integers(0, 10**18))
def test_seconds_survive_the_wire(nanoseconds):
    """Durations and timestamps keep seconds as well as a float does."""
    seconds = nanoseconds / 1e9

    assert seconds_of(duration(seconds)) == pytest.approx(seconds, abs=1e-9, rel=1e-15)
    assert seconds_of(timestamp(seconds)) == pytest.approx(seconds, abs=1e-9, rel=1e-15)


def test_an_absent_time_is_none_and_zero_is_zero():
    """What was not measured is told apart from what took no time."""
    outcome = control_pb2.Outcome(ttft=duration(0.0))

    assert seconds_if_set(outcome, "ttft") == 0.0
    assert seconds_if_set(outcome, "tpot") is None
