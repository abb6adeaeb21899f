"""From classes and wishes to targets, and how urgent they make a request."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.cluster import SloPolicy
from dataplane.core.request import Targets
from dataplane.core.slo import DEFAULT_SLO, NO_TARGETS, resolve, urgency


def test_the_default_class_is_used_where_none_is_named() -> None:
    """A request without a class gets the default one and its targets."""
    assert resolve(DEFAULT_SLO, "") == ("loose", Targets(0.525, 0.1191))
    assert resolve(DEFAULT_SLO, "tight") == ("tight", Targets(0.175, 0.0397))


def test_unknown_classes_are_refused() -> None:
    """There is no falling back to another class."""
    with pytest.raises(KeyError):
        resolve(DEFAULT_SLO, "nonsense")


@given(ttft=st.floats(0.01, 10.0), tpot=st.floats(0.001, 1.0))
def test_wishes_only_tighten(ttft: float, tpot: float) -> None:
    """A request's own targets hold where they are tighter than its class's."""
    _, targets = resolve(DEFAULT_SLO, "tight", Targets(ttft, tpot))

    assert targets.ttft_seconds == min(0.175, ttft)
    assert targets.tpot_seconds == min(0.0397, tpot)


def test_the_papers_tight_class_weighs_the_root_of_three() -> None:
    """Targets three times as tight weigh 1.73, the loosest weigh 1."""
    assert urgency(DEFAULT_SLO, DEFAULT_SLO.classes["tight"]) == pytest.approx(3.0**0.5)
    assert urgency(DEFAULT_SLO, DEFAULT_SLO.classes["loose"]) == 1.0


@pytest.mark.parametrize("targets", [NO_TARGETS, Targets(0.0, 0.1), Targets(9.0, 0.1)])
def test_without_a_tighter_target_nothing_is_urgent(targets: Targets) -> None:
    """No target, a broken one or one looser than all classes weighs 1."""
    assert urgency(DEFAULT_SLO, targets) == 1.0
    assert urgency(SloPolicy(classes={}, default_class=""), Targets(0.1, 0.1)) == 1.0
    endless = SloPolicy(classes={"a": Targets(inf, inf)}, default_class="a")
    assert urgency(endless, Targets(0.1, 0.1)) == 1.0


def test_a_ttft_that_grows_with_the_prompt_holds_for_the_prompt_at_hand():
    """Base and growth make one target a request; a wish of the request tightens that."""
    growing = Targets(0.1, 0.04, 0.0001)

    assert growing.for_prompt(1000) == Targets(pytest.approx(0.2), 0.04)
    assert growing.for_prompt(1000).tightened(Targets(0.15, 1.0)) == Targets(0.15, 0.04)
    assert Targets(0.1, 0.04).for_prompt(10_000) == Targets(0.1, 0.04)
