"""Late binding's parts on their own: queue, lanes, preview, and what newcomers inherit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.cluster import Instance
from dataplane.core.errors import NoCandidateError
from dataplane.core.events import Cancelled, PrefillDone, TokensStreamed
from dataplane.core.late_binding import Fairness, LateBinding, LateBindingSettings
from dataplane.core.late_binding.candidates import Candidates
from dataplane.core.late_binding.pace import pace_of
from dataplane.core.late_binding.queue import WaitQueue
from dataplane.core.late_binding.waiting import Lane, Waiting
from dataplane.core.policies.base import Placement
from enginemodel.profiles import REFERENCE
from tests.unit.core.builders import arrival, instance, pool, request, roster, started, starts

PACE = pace_of(REFERENCE.constants, 1.0)


def waiting(name: str, *, start: float, at: float = 0.0, prompt: int = 100) -> Waiting:
    """Return a request that waits, with its latest start."""
    asked = request(name, prompt=prompt, at=at)
    cost = PACE.prompt_seconds(prompt)
    return Waiting(asked, int(name), start + cost, 0.525, at + 5.0, start)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "first"]), st.integers(0, 50)), max_size=150
    )
)
def test_a_lane_is_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    """Whatever is added and removed, a lane answers as a sorted list would."""
    lane, naive, count = Lane("x"), [], 0
    for what, number in steps:
        if what == "add":
            count += 1
            item = waiting(str(count), start=float(number))
            lane.add(item.latest_start, item)
            naive.append(item)
            naive.sort(key=lambda one: (one.latest_start, one.sequence))
        elif what == "remove" and naive:
            item = naive.pop(number % len(naive))
            lane.remove(item)
            assert item.lane is None
        first = next((one for one in naive if one.latest_start >= number), None)
        assert lane.first_from(float(number)) is first
        assert lane.first() is (naive[0] if naive else None)
        assert list(lane.heads(5)) == naive[:5]
        assert len(lane) == len(naive)


def test_a_lane_does_not_keep_what_left() -> None:
    """Marks of those who left are swept: memory follows those who wait."""
    lane = Lane("x")
    items = [waiting(str(i), start=float(i)) for i in range(1000)]
    for item in items:
        lane.add(item.latest_start, item)
    for item in items[:990]:
        lane.remove(item)

    assert len(lane._items) < 100


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=80))
def test_a_queue_counts_what_it_holds(steps: list[tuple[int, int]]) -> None:
    """On time, late and in all: the counts and sums are those of its members."""
    queue, held = WaitQueue(), []
    for i, (what, number) in enumerate(steps):
        if what < 4:
            item = waiting(str(i), start=float(number), prompt=1 + 100 * number)
            (queue.add if what < 3 else queue.add_late)(item)
            held.append(item)
        elif what == 4 and held:
            queue.remove(held.pop(number % len(held)))
        else:
            queue.give_up(float(number))
        on_time = [item for item in held if not item.doomed]
        assert queue.on_time_count == len(on_time)
        assert queue.late_count == len(held) - len(on_time)
        assert {item.sequence for item in queue.items()} == {item.sequence for item in held}
        assert queue._tokens == sum(item.request.prompt_tokens for item in on_time)
        assert sum(sums[2] for sums in queue._slots.values()) == len(on_time)


def test_overload_is_more_work_than_time() -> None:
    """Some deadline before which more is to be done than the engines can do is overload."""
    queue = WaitQueue()
    for i in range(10):
        queue.add(waiting(str(i), start=0.4, prompt=1000))
    work = 10 * (PACE.prompt_seconds(1000) + 0.002)

    assert queue.overloaded(PACE, 1, 0.0)
    assert not queue.overloaded(PACE, 2, 0.0)
    assert work / 2 < 0.4 < work
    queue.add(waiting("10", start=60.0, prompt=4000))
    assert not queue.overloaded(PACE, 2, 0.0)


def test_deadlines_that_passed_are_no_overload() -> None:
    """Who cannot be served in time any more does not count against those who can."""
    queue = WaitQueue()
    queue.add(waiting("1", start=0.4))

    assert not queue.overloaded(PACE, 1, 5.0)


def test_giving_up_many_is_spread() -> None:
    """A decision does not stop to move a whole queue: it moves some, the next moves more."""
    queue = WaitQueue()
    for i in range(1000):
        queue.add(waiting(str(i), start=1.0))
    queue.give_up(2.0)
    first = queue.late_count
    for _ in range(10):
        queue.give_up(2.0)

    assert 0 < first < 1000
    assert queue.late_count == 1000


def test_many_waiting_do_not_slow_a_decision() -> None:
    """A decision looks at one request a lane, however many wait behind it."""
    looked = []
    for count in (100, 10_000):
        scheduler = LateBinding(pool("p0", "d0"))
        scheduler.submit(request("first", prompt=2000), 0.0)
        for i in range(count):
            scheduler.submit(request(f"r{i}", prompt=100 + 37 * i % 900, at=0.0), 0.0)
        scheduler.dispatcher.begin(0.1)
        scheduler.dispatcher._prepare(0.1)
        found = list(scheduler.dispatcher._candidates.ordered(PACE, 2.0, 0.1, 0.0))
        looked.append(len(found))

    assert looked[0] == looked[1] < 12


def slow_down(scheduler: LateBinding, factor: float) -> None:
    """Let the first engines of both sides show that they are slower than told."""
    for i in range(60):
        at = 10.0 * i
        scheduler.submit(request(f"r{i}", prompt=1000, at=at), at)
        line = scheduler.engines.lines["p0"]
        taken = line.batches[0].seconds / line.multiplier.value * factor + 0.003
        scheduler.observe(PrefillDone(f"r{i}", at + 40.0), at + taken)
        for n in range(6):
            step = (11.8e-3 + 5e-5 + 8e-8 * 1000) * factor
            scheduler.observe(TokensStreamed(f"r{i}", 1), at + 1.0 + n * step)
        scheduler.observe(Cancelled(f"r{i}"), at + 5.0)


@pytest.mark.parametrize("change", ["restart", "newcomer"])
def test_newcomers_are_known_by_their_profile(change: str) -> None:
    """What was learned of a profile holds for its next instance, not only for the one it showed."""
    scheduler = LateBinding(pool("p0", "d0"))
    slow_down(scheduler, 3.0)
    names: list[Instance | str] = ["p0", "d0", "p1", "d1"]
    if change == "restart":
        names = [instance("p0", epoch="2"), "d0", instance("d1")]
    scheduler.observe(arrival(roster(*names, version=2)), 700.0)

    lines, decoders = scheduler.engines.lines, scheduler.engines.decoders
    new = lines["p0" if change == "restart" else "p1"]
    assert new.multiplier.value == pytest.approx(3.0, rel=0.25)
    assert decoders["d1"].multiplier.value == decoders["d0"].multiplier.value > 1.3


def test_a_preview_says_what_would_be_done() -> None:
    """Asking names the idle line and the empty decode engine, and changes nothing."""
    scheduler = LateBinding(pool("p0", "p1", "d0", "d1"))
    busy = starts(scheduler.submit(request("a", prompt=3000), 0.0))[0][1]
    idle = "p1" if busy == "p0" else "p0"
    scheduler.pool.charge_decode(request("b", prompt=3000), "d0")
    before = repr(scheduler)

    preview = scheduler.preview(0.01)
    placed = preview.place(request("x"), scheduler.pool.view)
    terms = preview.explain(request("x"), scheduler.pool.view)

    assert placed == Placement(idle, "d1")
    assert terms.prefill[busy]["ahead_seconds"] > terms.prefill[idle]["ahead_seconds"] == 0.0
    assert sum(terms.decode["d0"].values()) > sum(terms.decode["d1"].values())
    assert repr(scheduler) == before
    assert started(scheduler.submit(request("x", at=0.01), 0.01)) == ["x"]


def test_a_preview_of_mixed_engines_has_one_side() -> None:
    """Where the engine that prefills also decodes, that is the placement."""
    scheduler = LateBinding(pool("m0"))
    preview = scheduler.preview(0.0)

    assert preview.place(request(), scheduler.pool.view) == Placement(None, "m0")
    assert set(preview.explain(request(), scheduler.pool.view).decode) == {"m0"}


def test_a_preview_of_nothing_is_refused() -> None:
    """Without an engine to prefill, or with all excluded, there is no placement."""
    scheduler = LateBinding(pool("p0", "d0"))
    view = scheduler.pool.view
    with pytest.raises(NoCandidateError):
        scheduler.preview(0.0).place(request(excluded=frozenset({"p0"})), view)
    with pytest.raises(NoCandidateError):
        scheduler.preview(0.0).explain(request(excluded=frozenset({"d0"})), view)


def test_requests_without_targets_wait_their_turn() -> None:
    """A request that aims for nothing is on time for long, but not for ever."""
    scheduler = LateBinding(pool("p0", "d0"))
    scheduler.submit(request("first", prompt=2000), 0.0)
    endless = replace(
        request("endless", at=0.0).targets, ttft_seconds=float("inf"), tpot_seconds=float("inf")
    )
    scheduler.submit(request("endless", targets=endless), 0.0)

    (item,) = scheduler.queue.items()
    assert item.deadline < 31.0
    assert started(scheduler.observe(PrefillDone("first", 30.0), 0.2)) == ["first", "endless"]


def candidates(*items: Waiting) -> Candidates:
    """Return the order over these requests, each in the queue."""
    queue = WaitQueue()
    for item in items:
        queue.add(item)
    return Candidates(queue, by_laxity=True)


def names(order: Candidates, start_by: float, urgent: float = 0.0) -> list[int]:
    """Return the sequence numbers in order."""
    return [item.sequence for _, _, item in order.ordered(PACE, 2.0, start_by, urgent)]


def test_a_growing_batch_drops_who_would_be_late_in_it() -> None:
    """Between two prompts of a batch, heads that have become late make way for those behind."""
    soon, later = waiting("1", start=1.0), waiting("2", start=2.0)
    order = candidates(soon, later, waiting("3", start=1.5, prompt=1000))

    assert names(order, 0.5) == [1, 3]
    assert names(order, 1.2) == [3, 2]
    assert names(order, 1.7) == [2]


def test_who_was_sent_makes_way_for_the_next_in_its_lane() -> None:
    """The order follows the queue while requests are taken out of it one by one."""
    first, second = waiting("1", start=1.0), waiting("2", start=2.0)
    order = candidates(first, second)
    assert names(order, 0.5) == [1]

    order._queue.remove(first)

    assert names(order, 0.5) == [2]


def test_the_urgent_go_last_but_go() -> None:
    """Those with too little laxity come behind all others, and are not left out."""
    order = candidates(waiting("1", start=1.0), waiting("2", start=2.0, prompt=1000))

    assert names(order, 0.9, urgent=0.5) == [2, 1]
    assert names(candidates(waiting("1", start=1.0)), 0.9, urgent=0.5) == [1]


def test_fair_lateness_follows_the_queue() -> None:
    """With fairness by FIFO waits, a request may overtake the later the longer the queue was."""
    due = {}
    for fairness in (Fairness.DEFAULT, Fairness.FAIR):
        scheduler = LateBinding(pool("p0", "d0"), LateBindingSettings(fairness=fairness))
        for i in range(200):
            scheduler.submit(request(f"r{i}", prompt=2000), 0.0)
        items = {item.request.request_id: item for item in scheduler.queue.items()}
        due[fairness] = (items["r1"].due_by, items["r199"].due_by)

    assert due[Fairness.DEFAULT] == (5.25, 5.25)
    assert due[Fairness.FAIR][0] == pytest.approx(2.1)
    assert due[Fairness.FAIR][1] > 60.0


def test_a_step_is_sampled_once() -> None:
    """Many sequences that report the same steps teach no faster than one."""
    learned = []
    for count in (1, 8):
        scheduler = LateBinding(pool("p0", "d0"))
        for i in range(count):
            scheduler.adopt(request(f"r{i}", prompt=10), "", "d0", 1, 0.0)
        for n in range(1, 100):
            for i in range(count):
                scheduler.observe(TokensStreamed(f"r{i}", 1), 0.0155 * n)
        learned.append(scheduler.engines.decoders["d0"].multiplier.value)

    assert 1.03 < learned[0] < 1.15
    assert learned[1] == pytest.approx(learned[0], abs=0.03)
