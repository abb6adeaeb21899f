"""The scheduler that binds on arrival: both legs, retries, and what is never retried."""

import pytest

from dataplane.core.errors import RejectReason
from dataplane.core.events import (
    Cancelled,
    Failed,
    Finished,
    Leg,
    PrefillDone,
    Reject,
    StartDecode,
    StartPrefill,
    Tick,
    TokensStreamed,
)
from dataplane.core.policies.registry import make_policy
from dataplane.core.scheduler import Immediate
from dataplane.core.schedulers import SCHEDULERS, make_scheduler
from tests.unit.core.builders import arrival, pool, request, roster, starts


def immediate(*engines: object, max_attempts: int = 3) -> Immediate:
    """Return a scheduler that joins the shortest queue."""
    return Immediate(make_policy("least_loaded"), pool(*engines), max_attempts=max_attempts)


def test_both_sides_are_charged_on_arrival() -> None:
    """A request holds its place on both sides from the start, and frees prefill at hand-off."""
    scheduler = immediate("p0", "d0")
    columns = scheduler.pool.ledger.columns

    assert scheduler.submit(request("r", prompt=50), 0.0) == [StartPrefill("r", "p0")]
    assert (columns.prefill_tokens[0], columns.decode_kv_tokens[1]) == (50.0, 50.0)
    assert scheduler.observe(PrefillDone("r", 30.0), 0.1) == [StartDecode("r", "d0")]
    assert (columns.prefill_tokens[0], columns.decode_kv_tokens[1]) == (0.0, 50.0)
    scheduler.observe(TokensStreamed("r", 4), 0.2)
    assert columns.decode_kv_tokens[1] == 54.0
    scheduler.observe(Finished("r"), 0.3)
    assert columns.decode_kv_tokens[1] == 0.0
    assert "0 in flight" in repr(scheduler)


def test_a_mixed_engine_gets_one_leg() -> None:
    """Where no instance does prefill alone there is no hand-off."""
    assert immediate("m0").submit(request("r"), 0.0) == [StartDecode("r", "m0")]


@pytest.mark.parametrize("leg", list(Leg))
def test_a_failed_leg_goes_elsewhere(leg: Leg) -> None:
    """A leg that fails before the first token is placed again, on another instance."""
    scheduler = immediate("p0", "p1", "d0", "d1")
    first = scheduler.submit(request("r"), 0.0)[0]
    decode = first
    if leg is Leg.DECODE:
        decode = scheduler.observe(PrefillDone("r", 30.0), 0.1)[0]

    again = scheduler.observe(Failed("r", leg), 0.2)

    assert isinstance(again[0], StartPrefill)
    if leg is Leg.PREFILL:
        assert again[0].instance_id != first.instance_id
        return
    assert scheduler.observe(PrefillDone("r", 30.0), 0.3)[0].instance_id != decode.instance_id


def test_round_robin_uses_every_decode_engine_while_a_prefill_engine_fails() -> None:
    """Retries do not take the turns of new requests: no decode engine is passed over for good."""
    scheduler = Immediate(make_policy("round_robin"), pool("p0", "p1", "d0", "d1"))
    decoded = []
    for number in range(16):
        name = f"r{number}"
        (start,) = scheduler.submit(request(name), float(number))
        if start.instance_id == "p0":
            scheduler.observe(Failed(name, Leg.PREFILL), float(number))
        ((_, instance_id),) = starts(scheduler.observe(PrefillDone(name, 30.0), float(number)))
        decoded.append(instance_id)

    assert min(decoded.count("d0"), decoded.count("d1")) >= 4


def test_retries_are_counted() -> None:
    """After so many attempts, or where every other instance failed, it is turned away."""
    scheduler = immediate("p0", "p1", "p2", "p3", "d0", max_attempts=2)
    scheduler.submit(request("r"), 0.0)
    assert starts(scheduler.observe(Failed("r", Leg.PREFILL), 0.1))
    exhausted = [Reject("r", RejectReason.RETRIES_EXHAUSTED)]
    assert scheduler.observe(Failed("r", Leg.PREFILL), 0.2) == exhausted

    alone = immediate("p0", "d0")
    alone.submit(request("r"), 0.0)
    assert alone.observe(Failed("r", Leg.PREFILL), 0.1) == exhausted
    assert len(alone.pool.ledger) == 0


def test_final_failures_are_not_retried() -> None:
    """What would fail everywhere is turned away at once."""
    scheduler = immediate("p0", "p1", "d0")
    scheduler.submit(request("r"), 0.0)

    assert scheduler.observe(Failed("r", Leg.PREFILL, retryable=False), 0.1) == [
        Reject("r", RejectReason.RETRIES_EXHAUSTED)
    ]


def test_nothing_is_retried_after_the_first_token() -> None:
    """A stream that breaks ends the request."""
    scheduler = immediate("p0", "d0", "d1")
    scheduler.submit(request("r"), 0.0)
    scheduler.observe(PrefillDone("r", 30.0), 0.1)
    scheduler.observe(TokensStreamed("r", 1), 0.2)

    assert scheduler.observe(Failed("r", Leg.DECODE), 0.3) == [
        Reject("r", RejectReason.STREAM_BROKEN)
    ]
    assert len(scheduler.pool.ledger) == 0


def test_a_decode_engine_gone_since_is_not_used() -> None:
    """An instance that left the roster before the hand-off is replaced, with a new prefill."""
    scheduler = immediate("p0", "d0", "d1")
    scheduler.submit(request("r"), 0.0)
    chosen = scheduler._flights["r"].placement.decode_id
    left = "d1" if chosen == "d0" else "d0"
    scheduler.observe(arrival(roster("p0", left, version=2)), 0.05)

    assert scheduler.observe(PrefillDone("r", 30.0), 0.1) == [StartPrefill("r", "p0")]
    assert scheduler.observe(PrefillDone("r", 30.0), 0.2) == [StartDecode("r", left)]


def test_without_candidates_it_is_turned_away() -> None:
    """The reason says what is missing."""
    assert immediate("p0").submit(request("r"), 0.0) == [
        Reject("r", RejectReason.NO_DECODE_INSTANCE)
    ]


def test_cancels_free_everything_once() -> None:
    """A client that leaves, twice or late, leaves nothing behind."""
    scheduler = immediate("p0", "d0")
    scheduler.submit(request("r"), 0.0)
    for event in (Cancelled("r"), Cancelled("r"), PrefillDone("r", 1.0), Failed("r", Leg.DECODE)):
        assert scheduler.observe(event, 0.1) == []

    assert scheduler.observe(Tick(), 0.2) == []
    assert len(scheduler.pool.ledger) == 0


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_hand_off_at_fault_excludes_nobody(name: str) -> None:
    """With one engine a side, a request whose hand-off ran out is prefilled again there."""
    scheduler = make_scheduler(name, {}, pool("p0", "d0"))
    scheduler.submit(request("r"), 0.0)
    scheduler.observe(PrefillDone("r", 30.0), 0.1)

    again = scheduler.observe(Failed("r", Leg.DECODE, at_fault=False), 0.2)

    assert StartPrefill("r", "p0") in again
