"""What routers have on an engine: every charge is freed exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.agent.accounting import Accounting, ChargePhase, StepMeter


def test_a_request_counts_in_one_phase_at_a_time():
    """Prefill, held and decode follow each other with the same tokens."""
    books = Accounting()
    charge = books.charge("r1", ChargePhase.PREFILL, 100)
    assert books.by_router()[0].prefill_tokens == 100

    charge.move_to(ChargePhase.DECODE)
    charge.grow(7)

    counts = books.by_router()[0]
    assert (counts.prefill_requests, counts.prefill_tokens) == (0, 0)
    assert (counts.decode_requests, counts.decode_kv_tokens) == (1, 107)


def test_routers_are_told_apart_and_idle_ones_left_out():
    """Each router has its own counts; one with nothing here does not appear."""
    books = Accounting()
    books.charge("b", ChargePhase.HELD, 5)
    books.charge("a", ChargePhase.PREFILL, 3)
    books.charge("gone", ChargePhase.DECODE, 9).free()

    assert [counts.router_id for counts in books.by_router()] == ["a", "b"]
    assert books.tokens(ChargePhase.HELD) == 5
    assert books.requests(ChargePhase.PREFILL) == 1


def test_changes_are_told_but_not_every_token():
    """Entering, moving and leaving ask for a report; tokens do not."""
    calls = []
    books = Accounting(lambda: calls.append(None))
    charge = books.charge("r", ChargePhase.PREFILL, 1)
    entered = len(calls)
    charge.grow(1)
    assert len(calls) == entered
    charge.free()

    assert len(calls) > entered


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["open", "grow", "free", "decode", "held", "prefill"]),
        st.integers(0, 50),
    ),
    max_size=80,
)


@given(actions=ACTIONS)
def test_however_requests_end_the_books_return_to_zero(actions):
    """Any order of opens, moves, growth and repeated frees adds up, and ends at nothing."""
    books, charges, expected = Accounting(), {}, {}
    for number, action, tokens in actions:
        charge = charges.get(number)
        if action == "open" and charge is None:
            charges[number] = books.charge(f"r{number % 2}", ChargePhase.PREFILL, tokens)
            expected[number] = tokens
        elif charge is None:
            continue
        elif action == "grow":
            charge.grow(tokens)
            if number in expected:
                expected[number] += tokens
        elif action == "free":
            charge.free()
            expected.pop(number, None)
        elif action in ("decode", "held", "prefill"):
            charge.move_to(ChargePhase[action.upper()])
        total = sum(books.tokens(phase) for phase in ChargePhase)
        assert total == sum(expected.values())
    for charge in charges.values():
        charge.free()
        charge.free()

    assert books.by_router() == []


def test_step_time_follows_recent_steps_and_forgets_when_idle():
    """The mean moves towards new steps; without tokens for a while the engine counts as idle."""
    meter = StepMeter(memory_seconds=0.5)
    assert meter.mean_seconds(0.0) == 0.0
    now = 0.0
    for _ in range(200):
        now += 0.01
        meter.record(0.01, now)
    for _ in range(200):
        now += 0.03
        meter.record(0.03, now)

    assert meter.mean_seconds(now) == pytest.approx(0.03, rel=0.01)
    assert meter.mean_seconds(now + 2.0) == 0.0
