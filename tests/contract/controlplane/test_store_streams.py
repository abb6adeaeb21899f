"""What every store promises of streams, lengths, locks and drift."""

import asyncio
from dataclasses import replace

import pytest

from controlplane.core.constants import reference
from controlplane.core.drift import Drift
from controlplane.core.lengths import LengthTable
from controlplane.core.values import (
    Happening,
    Outcome,
)

pytestmark = pytest.mark.asyncio

LEASE_SECONDS = 5.0


async def test_outcomes_are_read_from_a_cursor(store):
    """Each outcome is handed out once to a reader that keeps its cursor."""
    outcomes = [
        Outcome(request_id=f"r{n}", completion_tokens=n, slo_met=n == 1, ttft_seconds=0.1234)
        for n in range(5)
    ]
    outcomes[3] = replace(
        outcomes[3], prefill_tokens_ahead=0, tpot_seconds=1e-7, status="CANCELLED"
    )
    await store.add_outcomes(outcomes[:3])
    await store.add_outcomes([])
    cursor, first = await store.outcomes_after("", 2)
    await store.add_outcomes(outcomes[3:])
    cursor, second = await store.outcomes_after(cursor, 100)

    assert first + second == outcomes
    assert await store.outcomes_after(cursor, 100) == (cursor, [])
    newest = await store.recent_outcomes(2)
    assert [outcome for _, outcome in newest] == outcomes[:2:-1]
    assert newest[0][0] > 1e9


async def test_streams_are_capped(store):
    """Old rows make room; the cap is approximate, to the next hundred or so."""
    for _ in range(10):
        await store.add_outcomes([Outcome(request_id="r")] * 50)

    assert 50 <= len(await store.recent_outcomes(1_000)) <= 200


async def test_events_are_kept_newest_first(store):
    """Events come back with the time the store gave them."""
    await store.add_event(Happening("joined", "d0", "e1"))
    await store.add_event(Happening("gone", "d0"))
    events = await store.recent_events(10)

    assert [(event.kind, event.subject, event.detail) for event in events] == [
        ("gone", "d0", ""),
        ("joined", "d0", "e1"),
    ]
    assert all(event.unix_seconds > 1e9 for event in events)


async def test_lengths_are_written_with_their_cursor(store):
    """Table, version and cursor come back together; only the publisher writes them."""
    assert await store.lengths(60.0) == ("", 0, LengthTable(60.0))
    table = LengthTable(60.0)
    outcome = Outcome(request_id="r", model="m:1", prompt_tokens=9, completion_tokens=70_000)
    table.fold([outcome, replace(outcome, model="n")], 1_000.25)
    await store.tick("a", LEASE_SECONDS)

    assert not await store.write_lengths("b", "1-0", 5, table)
    assert await store.write_lengths("a", "1-0", 5, table)
    assert await store.lengths(60.0) == ("1-0", 5, table)
    only = LengthTable(60.0, 1_001.0, {"n|||": table.weights["n|||"]})
    assert await store.write_lengths("a", "2-0", 6, only)
    assert await store.lengths(60.0) == ("2-0", 6, only)


async def test_one_calibration_at_a_time(store):
    """The lock has one holder until it is freed or runs out."""
    assert await store.hold_calibration("a", LEASE_SECONDS) == "a"
    assert await store.hold_calibration("b", LEASE_SECONDS) == "a"
    await store.release_calibration("b")
    assert await store.hold_calibration("a", 0.05) == "a"
    async with asyncio.timeout(5):
        while await store.hold_calibration("b", LEASE_SECONDS) != "b":  # noqa: ASYNC110  likewise
            await asyncio.sleep(0.01)
    await store.release_calibration("b")

    assert await store.hold_calibration("c", LEASE_SECONDS) == "c"


async def test_drift_and_proposals_are_replaced_as_one(store):
    """What is written is what anybody reads; the next writing leaves nothing of the last."""
    slow = Drift("d0:7201", "a profile", "decode", 1.4, 12.5)
    proposal = reference("a profile")
    proposal = replace(proposal, uncalibrated=False, instance_scale={"d0:7201": 1.4})

    assert await store.drift() == ([], {})
    await store.write_drift([slow], [proposal])
    assert await store.drift() == ([slow], {"a profile": proposal})
    await store.write_drift([], [])
    assert await store.drift() == ([], {})


async def test_the_end_of_the_outcomes_is_where_new_ones_begin(store):
    """Who begins to watch sees what comes from now on, not what was."""
    assert await store.outcomes_end() == ""
    await store.add_outcomes([Outcome(request_id="old")])
    end = await store.outcomes_end()
    await store.add_outcomes([Outcome(request_id="new")])

    _, outcomes = await store.outcomes_after(end, 10)

    assert [outcome.request_id for outcome in outcomes] == ["new"]
