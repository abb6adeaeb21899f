"""Late binding: whether the decode side has room, and which decode engine is taken."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.cluster import Instance
from dataplane.core.events import Finished, PrefillDone, TokensStreamed
from dataplane.core.late_binding import LateBinding, LateBindingSettings
from dataplane.core.late_binding.gate import Group, kv_growth
from dataplane.core.request import Targets
from tests.unit.core.builders import (
    arrival,
    instance,
    pool,
    request,
    roster,
    started,
    starts,
)

SMALL = {"kv_total_tokens": 10_000, "max_num_seqs": 4}


def late(*engines: Instance | str, **changes: object) -> LateBinding:
    """Return a scheduler over these engines that binds one prompt at a time."""
    values = {"batch_seconds": 0.0, "batch_seconds_overloaded": 0.0} | changes
    return LateBinding(pool(*engines), LateBindingSettings(**values))


def decode(scheduler: LateBinding, name: str, at: float, **what: object) -> str:
    """Bring a request to decode and to its first token; return its decode engine."""
    assert started(scheduler.submit(request(name, at=at, **what), at)) == [name]
    actions = scheduler.observe(PrefillDone(name, at + 30.0), at + 0.02)
    scheduler.observe(TokensStreamed(name, 1), at + 0.05)
    return dict(starts(actions))[name]


@pytest.mark.parametrize("gate", [True, False])
def test_prefill_waits_for_a_seat(gate: bool) -> None:
    """With all seats taken prefill does not start until one is free; without the gate it does."""
    scheduler = late("p0", instance("d0", **SMALL), gate=gate)
    for i in range(4):
        decode(scheduler, f"r{i}", at=float(i))

    actions = scheduler.submit(request("next", at=5.0), 5.0)

    assert started(actions) == ([] if gate else ["next"])
    if gate:
        assert started(scheduler.observe(Finished("r0"), 5.1)) == ["next"]


def test_prompts_on_their_way_need_room_too() -> None:
    """What is in prefill already is counted against the room that is left."""
    scheduler = late("p0", "p1", instance("d0", kv_total_tokens=60_000, max_num_seqs=1))
    assert started(scheduler.submit(request("first", at=0.0), 0.0)) == ["first"]

    assert started(scheduler.submit(request("second", at=0.0), 0.0)) == []


def test_prefill_waits_for_memory() -> None:
    """A prompt that the KV budget does not hold waits; a shorter one passes."""
    scheduler = late("p0", instance("d0", kv_total_tokens=10_000))
    decode(scheduler, "big", at=0.0, prompt=6000)

    assert started(scheduler.submit(request("long", prompt=4000, at=1.0), 1.0)) == []
    assert started(scheduler.submit(request("short", prompt=500, at=1.0), 1.0)) == ["short"]


def test_memory_is_counted_in_blocks() -> None:
    """Each sequence is taken to waste half a block, so larger blocks leave less room."""
    for block, expected in ((16, ["next"]), (1024, [])):
        scheduler = late("p0", instance("d0", kv_total_tokens=10_000, block_tokens=block))
        for i in range(4):
            decode(scheduler, f"r{i}", at=float(i), prompt=1500)

        assert started(scheduler.submit(request("next", prompt=2500, at=5.0), 5.0)) == expected


def test_prefill_waits_for_a_fast_enough_step() -> None:
    """A request whose TPOT no engine would keep with it waits."""
    wish = Targets(0.525, 0.0138)
    scheduler = late("p0", "d0")
    assert started(scheduler.submit(request("fits", targets=wish, at=0.0), 0.0)) == ["fits"]
    scheduler = late("p0", "d0")
    for i in range(3):
        decode(scheduler, f"r{i}", at=float(i), prompt=6000)

    assert started(scheduler.submit(request("slow", targets=wish, at=5.0), 5.0)) == []


def test_the_tightest_on_an_engine_binds_it() -> None:
    """A loose request is not let onto an engine where it would spoil a tight one's TPOT."""
    tight = Targets(0.525, 0.0128)
    for first, expected in ((tight, []), (Targets(0.525, 0.1191), ["next"])):
        scheduler = late("p0", "d0")
        decode(scheduler, "first", at=0.0, targets=first)

        sent = started(scheduler.submit(request("next", prompt=8000, at=1.0), 1.0))

        assert sent == expected


def test_who_missed_its_first_token_binds_nobody() -> None:
    """A tight request whose TTFT is missed does not keep others off its engine."""
    tight = Targets(0.175, 0.0128)
    scheduler = late("p0", "d0")
    scheduler.submit(request("first", at=0.0, targets=tight), 0.0)
    scheduler.observe(PrefillDone("first", 40.0), 0.02)
    scheduler.observe(TokensStreamed("first", 1), 0.5)

    assert started(scheduler.submit(request("next", prompt=8000, at=1.0), 1.0)) == ["next"]


@pytest.mark.parametrize(("share", "expected"), [(0.8, []), (1.0, ["late"])])
def test_room_is_kept_from_late_requests(share: float, expected: list[str]) -> None:
    """A late request may not take the last seats; an on-time one may."""
    scheduler = late("p0", instance("d0", max_num_seqs=4), doomed_share=share)
    for i in range(3):
        decode(scheduler, f"r{i}", at=float(i))

    assert started(scheduler.submit(request("late", at=4.0), 5.0)) == expected
    if not expected:
        assert started(scheduler.submit(request("on_time", at=5.0), 5.0)) == ["on_time"]


def test_an_overdue_request_gets_the_next_room() -> None:
    """Room that becomes free is kept for who waits too long, not snatched by newcomers."""
    engines = ("p0", instance("d0", kv_total_tokens=10_000))
    scheduler = late(*engines)
    for i in range(4):
        decode(scheduler, f"r{i}", at=float(i), prompt=2200)
    scheduler.submit(request("huge", prompt=6000, at=4.0), 4.0)

    sent: list[str] = []
    for i in range(4):
        at = 30.0 + i
        sent += started(scheduler.submit(request(f"new{i}", prompt=1500, at=at), at))
        sent += started(scheduler.observe(Finished(f"r{i}"), at + 0.1))

    assert "huge" in sent
    assert sent.index("huge") <= 1


def test_an_idle_pool_never_refuses() -> None:
    """Where nothing runs that could make room, the request goes, room or not."""
    scheduler = late("p0", instance("d0", kv_total_tokens=1000))

    assert started(scheduler.submit(request("huge", prompt=2000, at=0.0), 0.0)) == ["huge"]


def test_decode_is_chosen_at_hand_off() -> None:
    """The engine that is least occupied when the prompt is done gets it, not when it came."""
    scheduler = late("p0", "d0", "d1")
    first = decode(scheduler, "first", at=0.0, prompt=4000)
    other = "d1" if first == "d0" else "d0"
    second = decode(scheduler, "second", at=1.0, prompt=2000)
    assert second == other
    scheduler.submit(request("third", at=2.0), 2.0)
    scheduler.observe(Finished("first"), 2.01)

    actions = scheduler.observe(PrefillDone("third", 40.0), 2.02)

    assert starts(actions)[0] == ("third", first)


def test_slower_decode_engines_get_less() -> None:
    """An idle engine that is slower than another idle one is not taken."""
    scheduler = late("p0", instance("d0", scale=2.0), "d1")

    used = {decode(scheduler, f"r{i}", at=float(i)) for i in range(1)}

    assert used == {"d1"}


def test_decode_load_of_other_routers_counts() -> None:
    """An engine that others have filled is neither gate nor choice."""
    scheduler = late("p0", "d0", "d1")
    engines = roster("p0", "d0", "d1")
    scheduler.observe(arrival(engines, other_decode_kv_tokens={"d0": 50_000.0}), 0.0)

    assert {decode(scheduler, f"r{i}", at=float(i)) for i in range(3)} == {"d1"}


@settings(max_examples=40, deadline=None)
@given(
    loads=st.lists(st.integers(0, 3), min_size=3, max_size=12),
    tpot=st.sampled_from([0.0397, 0.1191, 0.013]),
    reserved=st.booleans(),
)
def test_columns_equal_single_answers(loads: list[int], tpot: float, reserved: bool) -> None:
    """What the gate and the choice say of many engines at once, they say of each."""
    engines = [instance(f"d{i:02d}", scale=1.0 + 0.1 * i) for i in range(len(loads))]
    answers = []
    for vector_from in (64, 1):
        held = pool("p0", *engines, vector_from=vector_from)
        scheduler = LateBinding(held)
        for place, load in enumerate(loads):
            for n in range(load):
                held.charge_decode(request(f"{place}.{n}", prompt=900), f"d{place:02d}")
        group = Group(held.view.side("decode", "k"))
        scheduler.gate.book(scheduler.engines.decoders["d01"], 700)
        column = scheduler.gate.longest_column(group, tpot, reserved=reserved)
        single = [
            scheduler.gate.longest_on(slot, tpot, reserved=reserved) for slot in group.side.slots
        ]
        assert list(column) == pytest.approx(single)
        answers.append(scheduler._decode_rule.costs(request("x"), group.side))

    assert list(answers[0]) == pytest.approx(list(answers[1]))


def test_growth_is_half_a_block_and_a_token() -> None:
    """The margin a sequence needs beyond its tokens follows the block size."""
    assert kv_growth(replace(instance("d0"), block_tokens=32)) == 17.0


def test_an_overdue_request_may_join_a_slower_batch() -> None:
    """A tight request that is long late is served where its own TPOT cannot be kept any more."""
    wish = Targets(0.175, 0.0128)
    scheduler = late("p0", "d0")
    for i in range(3):
        decode(scheduler, f"r{i}", at=float(i), prompt=6000)

    assert started(scheduler.submit(request("late", targets=wish, at=4.0), 5.0)) == []
    assert started(scheduler.submit(request("overdue", targets=wish, at=0.0), 5.1)) == ["overdue"]


def test_what_was_learned_of_steps_counts_at_the_gate() -> None:
    """An engine that turned out slow has no room for those whose TPOT it would not keep."""
    scheduler = late("p0", "d0")
    decoder = scheduler.engines.decoders["d0"]
    decoder.multiplier.value = 4.0
    scheduler.gate.learn(decoder)
    decode(scheduler, "loose", at=0.0)

    assert started(scheduler.submit(request("tight", slo_class="tight", at=1.0), 1.0)) == []
    assert started(scheduler.submit(request("loose2", at=1.0), 1.0)) == ["loose2"]


@pytest.mark.parametrize(
    ("sequences", "prompt", "term", "expected"),
    [
        ((3000, 1), 1000, "occupancy", 4000 / 60_000 + 2 / 64),
        ((58_000, 1), 3000, "overflow", 100 + 5 * ((61_000 + 9) / 60_000 - 1)),
        ((3000, 1), 1000, "overflow", 0.0),
        ((58_000, 1), 500, "peak", 5 * ((58_500 + 100 + 250) / 60_000 - 0.98)),
        ((3000, 1), 1000, "peak", 0.0),
        ((10, 256), 10, "seats", 100 + 5 * 1),
        ((10, 250), 10, "seats", 0.0),
        ((10, 1), 10, "tpot", 0.0),
        ((50_000, 1), 6000, "tpot", 5 * ((11.9e-3 + 8e-8 * 56_125) / 0.016 - 0.97)),
    ],
)
def test_each_term_of_the_choice_is_its_formula(
    sequences: tuple[int, int], prompt: int, term: str, expected: float
) -> None:
    """What speaks against an engine at hand-off is the number that the formula gives."""
    scheduler = late("p0", "d0")
    for i in range(sequences[1]):
        scheduler.pool.charge_decode(request(f"r{i}", prompt=sequences[0]), "d0")
    asked = request("x", prompt=prompt, targets=Targets(0.525, 0.016))
    side = scheduler.pool.view.side("decode", "k")

    terms = scheduler._decode_rule.price(asked, side)

    assert terms[term][0] == pytest.approx(expected, abs=1e-9)


def test_what_is_booked_counts_only_where_it_would_overfill() -> None:
    """Prompts on their way make an engine no more occupied, but may leave it without a seat."""
    scheduler = late("p0", instance("d0", max_num_seqs=2))
    side = scheduler.pool.view.side("decode", "k")
    before = scheduler._decode_rule.price(request(), side)
    decoder = scheduler.engines.decoders["d0"]
    for _ in range(2):
        scheduler.gate.book(decoder, 100)

    after = scheduler._decode_rule.price(request(), side)

    assert after["occupancy"] == before["occupancy"]
    assert before["seats"] == [0.0]
    assert after["seats"][0] > 100.0
