"""Tickets and the pool's driver: actions reach the request they are for, nothing stays behind."""

import asyncio

import pytest

from dataplane.core.errors import RejectReason
from dataplane.core.events import (
    Action,
    Cancelled,
    Event,
    Finished,
    Reject,
    SnapshotArrived,
    StartDecode,
    StartPrefill,
    Tick,
    WakeAt,
)
from dataplane.core.schedulers import make_scheduler
from dataplane.router.driver import PoolDriver
from servicekit.clock import SystemClock
from tests.support.waiting import eventually
from tests.unit.core.builders import request, roster, snapshot


class Script:
    """A scheduler that answers as it is told and remembers what it was told."""

    def __init__(self) -> None:
        self.on_submit: list[Action] = []
        self.on_event: list[Action] = []
        self.failure: Exception | None = None
        self.seen: list[Event] = []

    def submit(self, request, now) -> list[Action]:
        if self.failure is not None:
            raise self.failure
        return self.on_submit

    def observe(self, event, now) -> list[Action]:
        self.seen.append(event)
        return self.on_event


def driver_of(scheduler=None) -> PoolDriver:
    """Return a driver that uses one scheduler for every policy, or the real ones."""
    make = (
        (lambda _name, _pool: scheduler)
        if scheduler
        else (lambda name, pool: make_scheduler(name, {}, pool))
    )
    return PoolDriver("pool", make, SystemClock(), lambda _policy, _seconds: None)


@pytest.mark.asyncio
async def test_a_ticket_gives_its_actions_in_order():
    """Actions wait for whoever asks, first come first out."""
    script = Script()
    script.on_submit = [StartPrefill("r", "p0"), StartDecode("r", "d0")]
    ticket = driver_of(script).submit(request("r"), "any")

    assert await ticket.next() == StartPrefill("r", "p0")
    assert await ticket.next() == StartDecode("r", "d0")


@pytest.mark.asyncio
async def test_an_event_of_one_request_can_move_another():
    """A scheduler that holds a request back binds it when something else happens."""
    script = Script()
    driver = driver_of(script)
    held = driver.submit(request("held"), "any")
    other = driver.submit(request("other"), "any")
    waiting = asyncio.create_task(held.next())
    await asyncio.sleep(0)
    script.on_event = [StartPrefill("held", "p0")]
    driver.observe(other, Finished("other"))

    assert await waiting == StartPrefill("held", "p0")


@pytest.mark.asyncio
async def test_an_ended_ticket_gives_what_it_has_and_then_raises():
    """Ending a ticket wakes its waiter with the error, after the actions at hand."""
    script = Script()
    script.on_submit = [StartPrefill("r", "p0")]
    ticket = driver_of(script).submit(request("r"), "any")
    ticket.end(ConnectionError("over"))

    assert await ticket.next() == StartPrefill("r", "p0")
    with pytest.raises(ConnectionError, match="over"):
        await ticket.next()


@pytest.mark.asyncio
async def test_closing_tells_the_scheduler_once():
    """Whatever a request's end was, its scheduler hears one Cancelled and the ticket is gone."""
    script = Script()
    driver = driver_of(script)
    ticket = driver.submit(request("r"), "any")
    driver.close(ticket)
    driver.close(ticket)

    assert script.seen == [Cancelled("r")]
    assert not driver.tickets


@pytest.mark.asyncio
async def test_a_scheduler_that_fails_leaves_no_ticket():
    """An error while placing reaches the caller and the request is not kept."""
    script = Script()
    script.failure = ZeroDivisionError()
    driver = driver_of(script)
    with pytest.raises(ZeroDivisionError):
        driver.submit(request("r"), "any")

    assert not driver.tickets


@pytest.mark.asyncio
async def test_a_wish_to_be_woken_is_a_tick():
    """WakeAt brings one Tick, a later wish replaces an earlier one, stopping takes it back."""
    script = Script()
    clock = SystemClock()
    driver = driver_of(script)
    script.on_submit = [WakeAt(clock.monotonic() + 3600), WakeAt(clock.monotonic())]
    driver.submit(request("r"), "any")
    await eventually(lambda: script.seen)
    script.on_event = [WakeAt(clock.monotonic())]
    driver.observe(driver.tickets["r"], Tick())
    driver.stop()
    script.on_event = []
    before = len(script.seen)
    for _ in range(5):
        await asyncio.sleep(0)

    assert script.seen[0] == Tick()
    assert len(script.seen) == before


@pytest.mark.asyncio
async def test_policies_share_one_ledger():
    """Requests under different policies see each other's load, and each frees its own."""
    driver = driver_of()
    driver.refresh(SnapshotArrived(snapshot(roster("p0", "d0", "d1"))))
    first = driver.submit(request("a"), "least_loaded")
    second = driver.submit(request("b"), "marginal_cost")
    busy = driver.pool.view.own.decode_requests.tolist()
    driver.close(first)
    driver.close(second)

    assert sorted(busy) == [0, 1, 1]
    assert len(driver.pool.ledger) == 0
    assert sum(driver.pool.view.own.decode_kv_tokens) == 0


@pytest.mark.asyncio
async def test_a_request_without_candidates_is_told_so():
    """A pool without decode instances rejects at once, and says which role is missing."""
    driver = driver_of()
    driver.refresh(SnapshotArrived(snapshot(roster("p0"))))
    ticket = driver.submit(request("a"), "least_loaded")

    assert await ticket.next() == Reject("a", RejectReason.NO_DECODE_INSTANCE)
