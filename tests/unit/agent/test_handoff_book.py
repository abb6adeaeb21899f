"""Which hand-offs are refused, and what is held."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.handoff import (
    HandoffBook,
    HandoffRefusal,
    HandoffTicket,
    HeldHandoff,
    HeldTable,
    prompt_digest,
)

PROMPT = [1, 2, 3]
NOW = 1_000.0
TICKET = HandoffTicket(
    handoff_id="h1",
    prefill_instance_id="p0",
    prefill_epoch="e1",
    pairing_key="k",
    prompt_tokens=3,
    expire_unix_seconds=NOW + 30.0,
    prompt_digest=prompt_digest(PROMPT),
)


def book():
    """A book of an engine with key `k`."""
    return HandoffBook(pairing_key="k", margin_seconds=1.0, remember_seconds=30.0)


def admit(a_book, ticket=TICKET, prompt=PROMPT, now=NOW, **more):
    """Ask for one hand-off."""
    return a_book.admit(ticket, prompt, now_unix_seconds=now, **more)


def test_a_good_handoff_is_admitted_once():
    """The first use passes, the second is refused as consumed."""
    a_book = book()

    assert admit(a_book) is None
    assert admit(a_book) is HandoffRefusal.CONSUMED


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"pairing_key": "other"}, HandoffRefusal.PAIR_MISMATCH),
        ({"expire_unix_seconds": NOW + 0.9}, HandoffRefusal.EXPIRED),
        ({"expire_unix_seconds": NOW - 5}, HandoffRefusal.EXPIRED),
        ({"prompt_tokens": 4}, HandoffRefusal.PROMPT_MISMATCH),
        ({"prompt_digest": prompt_digest([1, 2, 4])}, HandoffRefusal.PROMPT_MISMATCH),
    ],
)
def test_a_handoff_that_would_give_wrong_tokens_is_refused(change, refusal):
    """Another layout, a lease that ends within the margin, another prompt: each has its reason."""
    assert admit(book(), replace(TICKET, **change)) is refusal


@pytest.mark.parametrize(("valid_for", "refused"), [(0.0, True), (-1.0, True), (0.5, False)])
def test_the_senders_monotonic_clock_counts_too(valid_for, refused):
    """A sender that says no time is left is believed whatever the wall clocks say."""
    assert (admit(book(), valid_for_seconds=valid_for) is HandoffRefusal.EXPIRED) is refused


def test_a_refused_handoff_is_not_used_up():
    """What was refused for its prompt can still be used for the right one."""
    a_book = book()

    assert admit(a_book, prompt=[9, 9, 9]) is HandoffRefusal.PROMPT_MISMATCH
    assert admit(a_book) is None


def test_a_handoff_of_a_replaced_boot_is_refused():
    """Once a newer boot of the prefill instance was seen, the older one's hand-offs are stale."""
    a_book = book()
    admit(a_book)
    admit(a_book, replace(TICKET, handoff_id="h2", prefill_epoch="e2"))

    refusal = admit(a_book, replace(TICKET, handoff_id="h3", prefill_epoch="e1"))

    assert refusal is HandoffRefusal.FOREIGN_EPOCH


def test_a_late_handoff_of_an_earlier_boot_does_not_oust_the_present_one():
    """A book that met the new boot first refuses what the old one gave, and keeps the new one."""
    a_book = book()
    late = replace(TICKET, handoff_id="late", expire_unix_seconds=NOW + 20)
    admit(a_book, replace(TICKET, handoff_id="h2", prefill_epoch="e2"))

    assert admit(a_book, late) is HandoffRefusal.FOREIGN_EPOCH
    assert admit(a_book, replace(TICKET, handoff_id="h3", prefill_epoch="e2")) is None


def test_a_handoff_without_digest_is_checked_by_length_alone():
    """Agents that send no digest still work."""
    assert admit(book(), replace(TICKET, prompt_digest=b""), prompt=[7, 8, 9]) is None


def test_used_ids_are_forgotten_long_after_they_expire():
    """The memory of used hand-offs does not grow for ever, and nothing passes by its gaps."""
    a_book = book()
    for n in range(100):
        ticket = replace(TICKET, handoff_id=str(n), expire_unix_seconds=NOW + n + 30)
        assert admit(a_book, ticket, now=NOW + n) is None

    assert "consumed=60" in repr(a_book)
    stale = replace(TICKET, handoff_id="0", expire_unix_seconds=NOW + 30)
    assert admit(a_book, stale, now=NOW + 200) is HandoffRefusal.EXPIRED


@given(order=st.permutations(range(6)), repeats=st.lists(st.integers(0, 5), max_size=10))
def test_no_handoff_ever_passes_twice(order, repeats):
    """Whatever the order and the repetitions, each id is admitted exactly once."""
    a_book = book()
    admitted = [
        n for n in [*order, *repeats] if admit(a_book, replace(TICKET, handoff_id=str(n))) is None
    ]

    assert sorted(admitted) == list(range(6))


def held(name, tokens=100, expire=NOW + 30, since=0.0):
    """One held hand-off."""
    ticket = replace(
        TICKET, handoff_id=f"h-{name}", prompt_tokens=tokens, expire_unix_seconds=expire
    )
    return HeldHandoff(
        ticket=ticket,
        request_id=name,
        hold_id=f"core/{name}",
        engine_params=b"",
        since_seconds=since,
    )


def test_held_handoffs_leave_once():
    """Pulled, released or expired: the second way out finds nothing."""
    table = HeldTable()
    table.add(held("a"))
    table.add(held("b", expire=NOW + 1))

    assert table.find("h-a") is not None
    assert [entry.request_id for entry in table.remove_holds({"core/a", "other"})] == ["a"]
    assert table.remove("h-a") is None
    assert [entry.request_id for entry in table.expire(NOW + 2)] == ["b"]
    assert table.expire(NOW + 2) == []
    assert table.tokens == 0


def test_the_oldest_are_trimmed_to_what_the_engine_still_holds():
    """An engine that uses less KV than the table says has lost the oldest hand-offs."""
    table = HeldTable()
    for n in range(4):
        table.add(held(str(n), since=float(n)))

    gone = table.trim(150, seen_seconds=3.0)

    assert [entry.request_id for entry in gone] == ["0", "1"]
    assert len(table) == 2


def test_what_was_held_after_the_measurement_is_not_trimmed():
    """A measurement says nothing about what came later."""
    table = HeldTable()
    table.add(held("late", since=5.0))

    assert table.trim(0, seen_seconds=4.0) == []


def test_a_retry_may_hold_a_second_handoff_of_one_request():
    """Two hand-offs of one request leave one by one."""
    table = HeldTable()
    first = held("a")
    table.add(first)
    table.add(replace(first, ticket=replace(first.ticket, handoff_id="h-2"), hold_id="core/2"))

    assert len(table.of_request("a")) == 2
    assert table.remove("h-2") is not None
    assert [entry.ticket.handoff_id for entry in table.of_request("a")] == ["h-a"]
