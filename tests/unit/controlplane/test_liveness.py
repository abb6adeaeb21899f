"""The table of an instance's life."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.liveness import (
    TRANSITIONS,
    Liveness,
    Signal,
    State,
    Timing,
    silence,
    step,
)

signals = st.sampled_from(Signal)
lives = st.builds(Liveness, st.sampled_from(State), st.booleans())


def test_the_table_is_complete():
    """Every state knows an answer to every signal."""
    assert set(TRANSITIONS) == {(state, signal) for state in State for signal in Signal}


@given(st.lists(signals))
def test_nothing_leads_out_of_gone(later):
    """GONE is final: only a new life, never a signal, brings an instance back."""
    life = Liveness(State.GONE)
    for signal in later:
        life = step(life, signal)

    assert life == Liveness(State.GONE)


@given(lives, signals)
def test_a_drained_instance_is_never_ready(life, signal):
    """While a drain holds, no signal makes an instance take new requests."""
    after = step(life, signal)

    assert not (after.drained and after.state is State.READY)


@given(lives, signals)
def test_the_same_signal_twice_changes_nothing_more(life, signal):
    """Repeating a signal leaves a life where the first one brought it."""
    once = step(life, signal)

    assert step(once, signal) == once


@given(st.lists(signals.filter(lambda signal: signal not in (Signal.DRAIN, Signal.UNDRAIN))))
def test_only_operators_drain(reported):
    """No report and no silence takes an instance out of service for good."""
    life = Liveness()
    for signal in reported:
        life = step(life, signal)

    assert not life.drained
    assert life.state is not State.DRAINING


@pytest.mark.parametrize(
    ("signals_in_order", "expected"),
    [
        ([Signal.HEALTHY], State.READY),
        ([Signal.UNHEALTHY], State.JOINING),
        ([Signal.HEALTHY, Signal.UNHEALTHY], State.JOINING),
        ([Signal.HEALTHY, Signal.SILENT], State.STALE),
        ([Signal.HEALTHY, Signal.SILENT, Signal.HEALTHY], State.READY),
        ([Signal.HEALTHY, Signal.SILENT, Signal.LOST], State.GONE),
        ([Signal.HEALTHY, Signal.LEFT], State.GONE),
        ([Signal.HEALTHY, Signal.REPLACED], State.GONE),
        ([Signal.HEALTHY, Signal.DRAIN], State.DRAINING),
        ([Signal.DRAIN, Signal.HEALTHY], State.DRAINING),
        ([Signal.HEALTHY, Signal.DRAIN, Signal.UNDRAIN], State.READY),
        ([Signal.HEALTHY, Signal.DRAIN, Signal.SILENT, Signal.HEALTHY], State.DRAINING),
        ([Signal.HEALTHY, Signal.SILENT, Signal.DRAIN, Signal.HEALTHY], State.DRAINING),
        ([Signal.HEALTHY, Signal.DRAIN, Signal.SILENT, Signal.UNDRAIN], State.STALE),
    ],
)
def test_lives(signals_in_order, expected):
    """The lives that operators know end where they expect."""
    life = Liveness()
    for signal in signals_in_order:
        life = step(life, signal)

    assert life.state is expected


@pytest.mark.parametrize(
    ("age_seconds", "expected"),
    [(0.0, None), (0.3, None), (0.31, Signal.SILENT), (5.3, Signal.SILENT), (5.31, Signal.LOST)],
)
def test_silence_counts_after_three_reports_and_five_seconds_more(age_seconds, expected):
    """The defaults: stale after 300 ms, gone 5 s later."""
    assert silence(age_seconds, Timing()) is expected


@given(st.integers(1, 100_000))
def test_many_instances_report_less_often_and_get_more_patience(instances):
    """However many there are, the rate of reports is bounded and three may be missed."""
    timing = Timing().steered(instances)

    assert instances / timing.report_interval_seconds <= 2_000.0 * 1.001
    assert timing.stale_after_seconds >= 3 * timing.report_interval_seconds - 1e-9
    assert timing.report_interval_seconds >= 0.1
