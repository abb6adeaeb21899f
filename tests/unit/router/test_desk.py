"""Decisions without dispatch use the settings that the schedulers use, and leave no charge."""

import asyncio

import pytest

from dataplane.core.errors import InvalidSettingError
from dataplane.core.late_binding import LateBinding
from dataplane.router.desk import Answer, Desk
from servicekit.errors import Unavailable
from tests.support.waiting import eventually
from tests.unit.core.builders import pool, request


def desk(**settings) -> Desk:
    """Return a desk with these settings by policy."""
    return Desk(fallback="least_loaded", settings=settings)


def test_policies_have_their_settings():
    """A weight that is set shows in the prices, as it does in the scheduler's."""
    here = pool("p0", "d0")
    plain = desk().explain("pool", request(), "marginal_cost", here.view).prefill
    heavy = (
        desk(marginal_cost={"own_work": 3.0})
        .explain("pool", request(), "marginal_cost", here.view)
        .prefill
    )

    assert heavy[0].terms["own_work"] == pytest.approx(3 * plain[0].terms["own_work"])


def test_a_bad_setting_is_not_hidden_by_the_fallback():
    """A setting that does not fit is an error here too, rather than another policy's answer."""
    with pytest.raises(InvalidSettingError):
        desk(marginal_cost={"own_work": -1.0}).policy("pool", "marginal_cost")


def test_a_policy_that_binds_late_is_answered_by_the_fallback():
    """Late binding of which nothing is known here has no placement: the fallback names one."""
    view = pool("p0", "d0").view
    placement = desk().place("pool", request(), "late_binding", view)
    answer = desk().answer("pool", request(), "late_binding", view, reserving=False)
    explained = desk().explain("pool", request(), "late_binding", view, now=True)

    assert (placement.prefill_id, placement.decode_id) == ("p0", "d0")
    assert answer == Answer(placement, "least_loaded")
    assert (explained.priced_by, explained.placement) == ("least_loaded", None)


def foreseeing(scheduler: LateBinding, now: float) -> Desk:
    """Return a desk of the router that decides for the pool."""
    return Desk(
        fallback="least_loaded",
        settings={},
        foresee=lambda _pool, _policy: (scheduler.preview(now), scheduler.pool.view),
    )


def test_late_binding_answers_for_itself_where_it_would_send():
    """Both answers name what it would do now; a reservation, which it cannot see, is the fallback's."""
    scheduler = LateBinding(pool("p0", "d0", "d1"))
    view = scheduler.pool.view
    at_desk = foreseeing(scheduler, 0.0)
    explained = at_desk.explain("pool", request(), "late_binding", view, now=True)
    answers = [
        at_desk.answer("pool", request(), "late_binding", view, reserving=reserving)
        for reserving in (False, True)
    ]

    assert [answer.policy for answer in answers] == ["late_binding", "least_loaded"]
    assert answers[0].placement == explained.placement
    assert (explained.priced_by, explained.held_back) == ("late_binding", "")
    assert set(explained.prefill[0].terms) == {"ahead_seconds", "own_seconds", "handoff_seconds"}
    assert {row.instance_id for row in explained.decode} == {"d0", "d1"}


def test_what_late_binding_holds_back_is_placed_by_the_fallback():
    """Explain says what the request would wait for and names no instance; Route places it and says so."""
    scheduler = LateBinding(pool("p0", "d0"))
    scheduler.submit(request("a", prompt=4000), 0.0)
    view = scheduler.pool.view
    at_desk = foreseeing(scheduler, 0.0)
    explained = at_desk.explain("pool", request(), "late_binding", view, now=True)
    answer = at_desk.answer("pool", request(), "late_binding", view, reserving=False)
    past = at_desk.explain("pool", request(), "late_binding", view)

    assert explained.placement is None
    assert explained.held_back.startswith("every prefill engine has work ahead")
    assert (answer.policy, answer.held_back) == ("least_loaded", explained.held_back)
    assert (past.priced_by, past.held_back) == ("least_loaded", "")


def test_nothing_to_place_on_is_unavailable():
    """An empty side is UNAVAILABLE with its reason, for placing and explaining alike."""
    here = pool("p0")
    for ask in (desk().place, desk().explain):
        with pytest.raises(Unavailable) as caught:
            ask("pool", request(), "least_loaded", here.view)
        assert caught.value.reason == "NO_DECODE_INSTANCE"


def test_predicting_leaves_no_charge():
    """A prediction counts the request itself, and its charge is gone afterwards."""
    here = pool("p0", "d0")
    at = [here.instance(name) for name in ("p0", "d0")]
    expected = desk().predict(here, request(prompt=1_000), *at)

    assert expected.ttft_seconds > 0
    assert expected.tpot_seconds > 0
    assert len(here.ledger) == 0


@pytest.mark.asyncio
async def test_a_reservation_ends_once():
    """Time, Cancel or stopping free it, whichever is first, and only once."""
    here, at_desk = pool("p0", "d0"), desk()
    placement = at_desk.place("pool", request("a"), "least_loaded", here.view)
    at_desk.reserve(here, request("a"), placement, 0.01)
    at_desk.reserve(here, request("b"), placement, 60.0)
    at_desk.reserve(here, request("c"), placement, 60.0)
    assert sum(here.view.own.decode_requests) == 3
    await eventually(lambda: "a" not in here.ledger)

    assert not at_desk.cancel("a")
    assert at_desk.cancel("b")
    assert not at_desk.cancel("b")
    at_desk.stop()
    await asyncio.sleep(0)
    assert len(here.ledger) == 0
    assert sum(here.view.own.decode_kv_tokens) == 0


def test_candidates_that_were_passed_over_are_told_why():
    """An excluded instance is listed after the priced ones, with the reason."""
    here = pool("p0", "d0", "d1")
    failed = request(excluded=frozenset({"d1"}))
    decode = desk().explain("pool", failed, "least_loaded", here.view).decode

    assert [(row.instance_id, bool(row.excluded)) for row in decode] == [
        ("d0", False),
        ("d1", True),
    ]
    assert "failed this request" in decode[1].excluded
