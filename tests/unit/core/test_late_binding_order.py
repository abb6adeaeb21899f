"""Late binding: when a request is sent to prefill, and which."""

import pytest

from dataplane.core.errors import InvalidSettingError, RejectReason, UnknownPolicyError
from dataplane.core.events import Finished, PrefillDone, Reject, Tick, TokensStreamed
from dataplane.core.late_binding import Fairness, LateBinding, LateBindingSettings
from dataplane.core.request import Request, Targets
from dataplane.core.scheduler import Immediate
from dataplane.core.schedulers import make_scheduler
from enginemodel.model import prefill_seconds
from enginemodel.profiles import REFERENCE
from tests.unit.core.builders import arrival, pool, request, roster, started, starts, wake_at

HALF = 0.0015
CAP = 0.003


def late(*engines: str, **settings: object) -> LateBinding:
    """Return a scheduler over these engines."""
    return LateBinding(pool(*(engines or ("p0", "d0"))), LateBindingSettings(**settings))


def busy(scheduler: LateBinding, *, prompt: int = 2000, at: float = 0.0) -> float:
    """Give the one prefill engine a long prompt; return when it will be nearly done."""
    assert started(scheduler.submit(request("first", prompt=prompt, at=at), at)) == ["first"]
    return at + HALF + prefill_seconds(REFERENCE.constants, prompt, 2048) - CAP


def test_a_request_waits_until_the_engine_is_nearly_done() -> None:
    """A busy engine gets more only when its remaining work is below the dispatch lead."""
    scheduler = late()
    nearly = busy(scheduler)

    actions = scheduler.submit(request("second", at=0.01), 0.01)

    assert started(actions) == []
    assert wake_at(actions) == pytest.approx(nearly)
    assert started(scheduler.observe(Tick(), nearly - 1e-4)) == []
    assert started(scheduler.observe(Tick(), nearly + 1e-6)) == ["second"]


def test_binding_at_once_is_a_setting() -> None:
    """With an endless dispatch lead everything is sent on arrival."""
    scheduler = late(dispatch_ahead_seconds=float("inf"))
    busy(scheduler)

    assert started(scheduler.submit(request("second", at=0.01), 0.01)) == ["second"]


def test_the_timer_is_not_repeated() -> None:
    """A wake-up that stands already is not asked for again."""
    scheduler = late()
    busy(scheduler)

    assert wake_at(scheduler.submit(request("second", at=0.01), 0.01)) is not None
    assert wake_at(scheduler.submit(request("third", at=0.02), 0.02)) is None


def test_least_laxity_goes_first() -> None:
    """Of two that wait the tight one goes first, though it came later; FIFO is a setting."""
    for by_laxity, first in ((True, "tight"), (False, "loose")):
        scheduler = late(order_by_laxity=by_laxity, batch_seconds=0.0, batch_seconds_overloaded=0)
        nearly = busy(scheduler)
        scheduler.submit(request("loose", at=0.01), 0.01)
        scheduler.submit(request("tight", slo_class="tight", at=0.05), 0.05)

        assert started(scheduler.observe(Tick(), nearly + 1e-6)) == [first]


def test_a_long_prompt_counts_against_itself() -> None:
    """With a little more laxity the shorter prompt goes first; at no weight the other does."""
    for weight, first in ((2.0, "short"), (0.0, "long")):
        scheduler = late(cost_weight=weight, batch_seconds=0.0, batch_seconds_overloaded=0.0)
        nearly = busy(scheduler)
        scheduler.submit(request("short", prompt=100, at=0.115), 0.115)
        scheduler.submit(request("long", prompt=1500, at=0.115), 0.115)

        assert started(scheduler.observe(Tick(), nearly + 1e-6)) == [first]


@pytest.mark.parametrize("waited_seconds", [0.0, 5.0])
def test_a_retry_holds_back_nobody_who_may_go_where_it_may_not(waited_seconds: float) -> None:
    """Requests that failed on the engine that is free now do not stand before those like them."""
    scheduler = late("p0", "p1", "d0")
    (_, soon_free), (_, long_busy) = (
        starts(scheduler.submit(request(name, prompt=prompt, at=9.0), 9.0))[0]
        for name, prompt in (("short", 2000), ("long", 8000))
    )
    assert soon_free != long_busy
    at = 9.01 - waited_seconds
    for number in range(12):
        again = request(f"again{number}", excluded=frozenset({soon_free}), at=at)
        scheduler.submit(again, 9.01)
    scheduler.submit(request("behind", at=at + 0.001), 9.011)

    sent = starts(scheduler.observe(PrefillDone("short", 150.0), 9.15))

    assert ("behind", soon_free) in sent


def test_late_requests_go_behind() -> None:
    """A request that cannot make its target any more lets one pass that can."""
    scheduler = late(batch_seconds=0.0, batch_seconds_overloaded=0.0)
    nearly = busy(scheduler, at=1.0)
    scheduler.submit(request("late", at=0.0), 1.01)
    scheduler.submit(request("on_time", at=1.02), 1.02)

    assert started(scheduler.observe(Tick(), nearly + 1e-6)) == ["on_time"]
    assert len(scheduler.queue) == 1


def test_late_requests_are_served_by_age() -> None:
    """Late requests of all classes are served when nobody else waits, the oldest first."""
    scheduler = late(batch_seconds=0.0, batch_seconds_overloaded=0.0)
    nearly = busy(scheduler, at=5.0)
    scheduler.submit(request("younger", at=1.0), 5.01)
    scheduler.submit(request("older", slo_class="tight", at=0.5), 5.02)

    assert started(scheduler.observe(Tick(), nearly + 1e-6)) == ["older"]


def test_waiting_makes_late() -> None:
    """A request that waits beyond its last start is given up and goes behind."""
    scheduler = late(batch_seconds=0.0, batch_seconds_overloaded=0.0)
    nearly = busy(scheduler, prompt=6000)
    scheduler.submit(request("waits", slo_class="tight", at=0.01), 0.01)
    scheduler.submit(request("fresh", at=nearly), nearly)

    scheduler.observe(Tick(), nearly + 0.01)

    assert scheduler.queue.late_count == 1
    assert "fresh" not in {item.request.request_id for item in scheduler.queue.items()}


@pytest.mark.parametrize(
    ("fairness", "arrived", "first"),
    [
        (Fairness.GOODPUT_FIRST, 0.0, "on_time"),
        (Fairness.DEFAULT, 0.0, "overdue"),
        (Fairness.DEFAULT, 6.0, "on_time"),
        (Fairness.FAIR, 6.0, "overdue"),
        (Fairness.STRICT, 6.0, "overdue"),
    ],
)
def test_overdue_requests_overtake_by_fairness(
    fairness: Fairness, arrived: float, first: str
) -> None:
    """Beyond its age a late request goes before those on time, except in goodput-first."""
    scheduler = late(fairness=fairness, batch_seconds=0.0, batch_seconds_overloaded=0.0)
    nearly = busy(scheduler, at=10.0)
    scheduler.submit(request("overdue", at=arrived), 10.01)
    scheduler.submit(request("on_time", at=10.02), 10.02)

    assert started(scheduler.observe(Tick(), nearly + 1e-6)) == [first]


def test_overtaking_costs_credit() -> None:
    """After one overdue request the others wait until on-time work has paid for it."""
    scheduler = late(batch_seconds=0.0, batch_seconds_overloaded=0.0)
    nearly = busy(scheduler, at=10.0)
    for name in ("overdue1", "overdue2"):
        scheduler.submit(request(name, at=0.0), 10.01)
    scheduler.submit(request("on_time", at=10.02), 10.02)
    assert started(scheduler.observe(Tick(), nearly + 1e-6)) == ["overdue1"]
    assert scheduler.dispatcher.credit_seconds < 0.0

    done = scheduler.observe(PrefillDone("first", 40.0), nearly + CAP)
    done += scheduler.observe(PrefillDone("overdue1", 40.0), nearly + CAP + 0.02)

    assert [name for name in started(done) if name not in {"first", "overdue1"}] == ["on_time"]


def test_short_prompts_share_a_batch() -> None:
    """What waits when an engine becomes free goes together, up to the batch time."""
    for seconds, expected in ((0.06, 3), (0.0, 1)):
        scheduler = late(batch_seconds=seconds, batch_seconds_overloaded=seconds)
        nearly = busy(scheduler)
        for name in ("a", "b", "c"):
            scheduler.submit(request(name, at=0.05), 0.05)

        assert len(started(scheduler.observe(Tick(), nearly + 1e-6))) == expected


def test_a_batch_makes_nobody_late() -> None:
    """A prompt is not added where a member of the batch has no time for it."""
    scheduler = late()
    nearly = busy(scheduler)
    wish = Targets(0.030 + 0.015 + 0.012 + 0.012, 1.0)
    scheduler.submit(request("hurried", targets=wish, at=nearly), nearly - 1e-3)
    scheduler.submit(request("long", prompt=800, at=nearly), nearly - 1e-3)
    scheduler.submit(request("short", prompt=20, at=nearly), nearly - 1e-3)

    assert set(started(scheduler.observe(Tick(), nearly + 1e-6))) == {"hurried", "short"}


def test_overloaded_with_small_prompts_batches_grow() -> None:
    """Where deadlines cannot be met anyway, larger batches get more done."""
    scheduler = late(fairness=Fairness.GOODPUT_FIRST)
    nearly = busy(scheduler)
    for i in range(200):
        scheduler.submit(request(f"r{i}", prompt=180, slo_class="loose", at=0.1), 0.1)

    sent = started(scheduler.observe(Tick(), nearly + 1e-6))

    assert len(sent) * 180 * 5.54e-5 > 0.06


def test_a_whole_batch_is_credited() -> None:
    """The next is sent before a batch of several prompts ends, not only before its first does."""
    scheduler = late()
    nearly = busy(scheduler)
    for name in ("a", "b", "c", "d"):
        scheduler.submit(request(name, prompt=200, at=0.05), 0.05)
    at = nearly + 1e-6
    assert len(started(scheduler.observe(Tick(), at))) == 4
    scheduler.observe(PrefillDone("first", 40.0), at + CAP)

    actions = scheduler.submit(request("next", at=at + CAP), at + CAP)

    batch = prefill_seconds(REFERENCE.constants, 800, 2048)
    assert wake_at(actions) == pytest.approx(at + CAP - HALF + batch - CAP, abs=3e-3)


def test_every_chunk_pays_the_fixed_part() -> None:
    """A prompt of three chunks is expected to take three fixed parts."""
    scheduler = late()

    busy(scheduler, prompt=6000)

    line = scheduler.engines.lines["p0"]
    constants = REFERENCE.constants
    work = line.pace.prompt_seconds(6000)
    assert line.batches[0].seconds == pytest.approx(3 * constants.p1_seconds + work)


def test_idle_engines_take_turns() -> None:
    """Requests that come one by one to an idle pool do not all go to one engine."""
    scheduler = late("p0", "p1", "p2", "d0")
    used = []
    for i in range(6):
        at = float(i)
        used += starts(scheduler.submit(request(f"r{i}", at=at), at))
        scheduler.observe(PrefillDone(f"r{i}", 40.0), at + 0.02)
        scheduler.observe(TokensStreamed(f"r{i}", 1), at + 0.05)
        scheduler.observe(Finished(f"r{i}"), at + 0.06)

    assert {engine for _, engine in used} == {"p0", "p1", "p2"}


def test_the_queue_has_a_limit() -> None:
    """Beyond the limit requests are turned away at once."""
    scheduler = late(queue_limit=1)
    busy(scheduler)
    scheduler.submit(request("waits", at=0.01), 0.01)

    actions = scheduler.submit(request("too_many", at=0.01), 0.01)

    assert actions == [Reject("too_many", RejectReason.QUEUE_FULL)]


def test_a_request_is_taken_once() -> None:
    """Submitting what is known already changes nothing."""
    scheduler = late()
    busy(scheduler)
    scheduler.submit(request("waits", at=0.01), 0.01)

    assert scheduler.submit(request("waits", at=0.01), 0.02) == []
    assert len(scheduler.queue) == 1


def test_work_of_other_routers_counts() -> None:
    """An engine that others keep busy gets nothing until the snapshot says it is free."""
    scheduler = late()
    engines = roster("p0", "d0")
    scheduler.observe(arrival(engines, other_prefill_tokens={"p0": 4000.0}), 0.0)

    assert started(scheduler.submit(request("waits", at=0.0), 0.0)) == []
    assert started(scheduler.observe(arrival(engines), 0.05)) == ["waits"]


def test_a_stale_snapshot_counts_for_nothing() -> None:
    """What a stale snapshot says of others is not believed."""
    scheduler = late()
    engines = roster("p0", "d0")
    scheduler.observe(arrival(engines, stale=True, other_prefill_tokens={"p0": 4000.0}), 0.0)

    assert started(scheduler.submit(request("goes", at=0.0), 0.0)) == ["goes"]


def test_the_factory_knows_every_scheduler() -> None:
    """Late binding and the policies are made by name; wrong names and settings are refused."""
    made = make_scheduler("late_binding", {"fairness": "strict"}, pool("p0", "d0"))

    assert isinstance(made, LateBinding)
    assert made.settings.fairness is Fairness.STRICT
    assert isinstance(make_scheduler("round_robin", {}, pool("p0", "d0")), Immediate)
    with pytest.raises(UnknownPolicyError):
        make_scheduler("nonsense", {}, pool("p0", "d0"))
    for wrong in ({"fairness": "no"}, {"nonsense": 1}, {"kv_share": 1.5}, {"gate_tries": 0}):
        with pytest.raises(InvalidSettingError):
            make_scheduler("late_binding", wrong, pool("p0", "d0"))


def test_a_short_prompt_takes_the_shortest_step() -> None:
    """A prompt of a few tokens is expected to take as long as the shortest prefill step."""
    scheduler = late()
    busy(scheduler, prompt=10)

    constants = REFERENCE.constants
    assert scheduler.engines.lines["p0"].batches[0].seconds == constants.p0_seconds


def test_on_time_work_earns_credit() -> None:
    """Each on-time prompt lets late ones have a share of its time, up to a limit."""
    scheduler = late(fairness=Fairness.GENEROUS, credit_limit_seconds=0.05)
    earned = []
    for i in range(12):
        at = float(i)
        scheduler.submit(request(f"r{i}", prompt=2000, at=at), at)
        scheduler.observe(Finished(f"r{i}"), at + 0.5)
        earned.append(scheduler.dispatcher.credit_seconds)

    assert earned[0] == pytest.approx(0.2 * (0.1206 + 0.3 * 0.004), rel=0.01)
    assert earned[-1] == 0.05


def first_sent(scheduler: LateBinding, *waiting: Request, crowd: int, prompt: int) -> str:
    """Return who is sent first to a busy engine with a crowd of others waiting."""
    nearly = busy(scheduler)
    for i in range(crowd):
        at = nearly - 0.01
        scheduler.submit(request(f"crowd{i}", prompt=prompt, at=at), at)
    for one in waiting:
        scheduler.submit(one, max(nearly - 0.005, one.arrived_at))
    return started(scheduler.observe(Tick(), nearly + 1e-6))[0]


@pytest.mark.parametrize(("weight", "first"), [(2.0, "long"), (5.0, "short")])
def test_overloaded_short_prompts_go_earlier(weight: float, first: str) -> None:
    """Where not all deadlines can be met, a prompt's length counts more against it."""
    scheduler = late(cost_weight_overloaded=weight, batch_seconds=0.0)
    long = request("long", prompt=1500, targets=Targets(0.2, 1.0), at=0.11)
    short = request("short", prompt=700, targets=Targets(0.35, 1.0), at=0.11)

    assert first_sent(scheduler, long, short, crowd=12, prompt=1500) == first


@pytest.mark.parametrize(("seconds", "urgent_first"), [(0.0, True), (0.05, False)])
def test_overloaded_with_small_prompts_the_urgent_go_last(
    seconds: float, urgent_first: bool
) -> None:
    """Who has hardly time left would keep a large batch from filling, and goes behind."""
    scheduler = late(urgent_seconds=seconds)
    urgent = request("urgent", prompt=180, targets=Targets(0.1, 1.0), at=0.115)

    first = first_sent(scheduler, urgent, crowd=200, prompt=180)

    assert (first == "urgent") is urgent_first


def test_without_decode_room_nobody_is_overloaded() -> None:
    """What decode holds back is no reason to treat prefill as overloaded."""
    scheduler = late()
    busy(scheduler)
    for i in range(200):
        scheduler.submit(request(f"r{i}", prompt=180, at=0.1), 0.1)
    scheduler.dispatcher.begin(0.12)
    scheduler.dispatcher._prepare(0.12)
    assert scheduler.dispatcher._overload() == (True, True)

    scheduler.dispatcher._refused_at = 0.1
    scheduler.dispatcher._prepare(0.12)
    assert scheduler.dispatcher._overload() == (False, False)
