"""Late binding: cancels, failures and changes of the cluster, in every phase."""

from dataclasses import replace

import pytest

from dataplane.core.cluster import State
from dataplane.core.errors import RejectReason
from dataplane.core.events import (
    Action,
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
from dataplane.core.late_binding import LateBinding, LateBindingSettings
from tests.unit.core.builders import arrival, instance, pool, request, roster, started, starts


def late(*engines: object, **changes: object) -> LateBinding:
    """Return a scheduler over these engines."""
    return LateBinding(pool(*engines), LateBindingSettings(**changes))  # type: ignore[arg-type]


def empty(scheduler: LateBinding) -> bool:
    """Return whether nothing is held anywhere."""
    columns = scheduler.pool.ledger.columns
    sums = [sum(getattr(columns, name)) for name in type(columns).__slots__]
    lines, decoders = scheduler.engines.lines.values(), scheduler.engines.decoders.values()
    return (
        not scheduler._flights
        and not scheduler.queue
        and len(scheduler.pool.ledger) == 0
        and not any(sums)
        and not any(line.batches for line in lines)
        and not any(decoder.targets for decoder in decoders)
        and not any(scheduler.gate.booked_requests)
        and not any(scheduler.gate.booked_tokens)
    )


def to_decode(scheduler: LateBinding, name: str, at: float) -> list[Action]:
    """Bring a request to its hand-off."""
    scheduler.submit(request(name, at=at), at)
    return scheduler.observe(PrefillDone(name, at + 30.0), at + 0.02)


def test_a_request_goes_through_both_legs() -> None:
    """Prefill, then decode, then nothing is left."""
    scheduler = late("p0", "d0")

    assert scheduler.submit(request("r"), 0.0) == [StartPrefill("r", "p0")]
    assert scheduler.observe(PrefillDone("r", 30.0), 0.02) == [StartDecode("r", "d0")]
    scheduler.observe(TokensStreamed("r", 1), 0.05)
    scheduler.observe(Finished("r"), 0.10)

    assert empty(scheduler)


@pytest.mark.parametrize("phase", ["waiting", "late", "prefill", "decode", "streaming"])
def test_a_cancel_frees_everything(phase: str) -> None:
    """Whatever phase a request is in, its cancel leaves nothing behind, once and twice."""
    scheduler = late("p0", "d0")
    if phase in {"waiting", "late"}:
        scheduler.submit(request("other", prompt=2000, at=9.0), 9.0)
    scheduler.submit(request("r", at=0.0 if phase == "late" else 9.0), 9.0)
    if phase in {"decode", "streaming"}:
        scheduler.observe(PrefillDone("r", 30.0), 9.02)
    if phase == "streaming":
        scheduler.observe(TokensStreamed("r", 3), 9.05)

    for _ in range(2):
        scheduler.observe(Cancelled("r"), 9.06)
    scheduler.observe(Cancelled("other"), 9.07)

    assert empty(scheduler)


def test_a_cancel_in_prefill_lets_the_next_in() -> None:
    """The engine is taken to be free when what it worked on is aborted."""
    scheduler = late("p0", "d0")
    scheduler.submit(request("first", prompt=2000), 0.0)
    assert started(scheduler.submit(request("second", at=0.01), 0.01)) == []

    assert started(scheduler.observe(Cancelled("first"), 0.02)) == ["second"]


def test_a_failed_prefill_goes_elsewhere() -> None:
    """The instance that failed is not used again for that request."""
    scheduler = late("p0", "p1", "d0")
    first = starts(scheduler.submit(request("r"), 0.0))[0][1]

    again = starts(scheduler.observe(Failed("r", Leg.PREFILL), 0.01))

    assert again == [("r", "p1" if first == "p0" else "p0")]


def test_a_failed_decode_is_prefilled_again() -> None:
    """A hand-off is good for one pull, so a decode retry means a new prefill, elsewhere."""
    scheduler = late("p0", "d0", "d1")
    first = starts(to_decode(scheduler, "r", 0.0))[0][1]

    again = scheduler.observe(Failed("r", Leg.DECODE), 0.03)
    assert again == [StartPrefill("r", "p0")]
    second = scheduler.observe(PrefillDone("r", 30.0), 0.05)

    assert second == [StartDecode("r", "d1" if first == "d0" else "d0")]


def test_nothing_is_retried_after_the_first_token() -> None:
    """Once the client has seen a token, a failure ends the request."""
    scheduler = late("p0", "d0", "d1")
    to_decode(scheduler, "r", 0.0)
    scheduler.observe(TokensStreamed("r", 1), 0.05)

    actions = scheduler.observe(Failed("r", Leg.DECODE), 0.06)

    assert actions == [Reject("r", RejectReason.STREAM_BROKEN)]
    assert empty(scheduler)


def test_retries_end() -> None:
    """After so many placements, or where a failure is final, the request is turned away."""
    scheduler = late("p0", "p1", "p2", "p3", "d0", max_attempts=2)
    scheduler.submit(request("r"), 0.0)
    assert started(scheduler.observe(Failed("r", Leg.PREFILL), 0.01)) == ["r"]
    assert scheduler.observe(Failed("r", Leg.PREFILL), 0.02) == [
        Reject("r", RejectReason.RETRIES_EXHAUSTED)
    ]
    scheduler.submit(request("final", at=1.0), 1.0)
    assert scheduler.observe(Failed("final", Leg.PREFILL, retryable=False), 1.01) == [
        Reject("final", RejectReason.RETRIES_EXHAUSTED)
    ]
    assert empty(scheduler)


def test_a_retry_without_another_instance_is_refused() -> None:
    """Where all others are excluded there is nothing to wait for."""
    scheduler = late("p0", "d0")
    scheduler.submit(request("r"), 0.0)

    assert scheduler.observe(Failed("r", Leg.PREFILL), 0.01) == [
        Reject("r", RejectReason.RETRIES_EXHAUSTED)
    ]


def test_a_joining_engine_gets_work_at_once() -> None:
    """A new prefill engine takes what waits for the old one."""
    scheduler = late("p0", "d0")
    scheduler.submit(request("first", prompt=2000), 0.0)
    scheduler.submit(request("waits", at=0.01), 0.01)

    actions = scheduler.observe(arrival(roster("p0", "p1", "d0", version=2)), 0.02)

    assert starts(actions) == [("waits", "p1")]


def test_a_draining_engine_gets_nothing_new_and_finishes() -> None:
    """What a draining instance has goes on; nothing new is sent to it."""
    scheduler = late("p0", "p1", "d0")
    used = starts(scheduler.submit(request("old"), 0.0))[0][1]
    drained = roster(
        *(replace(instance(n), state=State.DRAINING) if n == used else n for n in ("p0", "p1")),
        "d0",
        version=2,
    )
    scheduler.observe(arrival(drained), 0.005)

    new = starts(scheduler.submit(request("new", at=0.01), 0.01))
    old = scheduler.observe(PrefillDone("old", 30.0), 0.02)

    assert new == [("new", "p1" if used == "p0" else "p0")]
    assert StartDecode("old", "d0") in old


def test_a_lost_boot_loses_its_hand_off() -> None:
    """KV that a restarted engine held is gone: its prompt is prefilled again."""
    scheduler = late("p0", "p1", "d0")
    used = starts(scheduler.submit(request("r"), 0.0))[0][1]
    names = [instance(n, epoch="2") if n == used else instance(n) for n in ("p0", "p1", "d0")]
    scheduler.observe(arrival(roster(*names, version=2)), 0.005)

    actions = scheduler.observe(PrefillDone("r", 30.0), 0.02)

    assert starts(actions) == [("r", "p1" if used == "p0" else "p0")]


def test_without_engines_those_who_wait_are_told() -> None:
    """Where the last engine of a side is gone, nobody is left waiting."""
    scheduler = late("p0", "d0")
    scheduler.submit(request("first", prompt=2000), 0.0)
    scheduler.submit(request("waits", at=0.01), 0.01)

    actions = scheduler.observe(arrival(roster("d0", version=2)), 0.02)

    assert actions == [Reject("waits", RejectReason.NO_PREFILL_INSTANCE)]
    assert scheduler.submit(request("new", at=0.03), 0.03) == [
        Reject("new", RejectReason.NO_PREFILL_INSTANCE)
    ]


def test_a_hand_off_without_decode_is_refused() -> None:
    """A prompt that is done when no decode engine is left ends there."""
    scheduler = late("p0", "d0")
    scheduler.submit(request("r"), 0.0)
    scheduler.observe(arrival(roster("p0", version=2)), 0.01)

    actions = scheduler.observe(PrefillDone("r", 30.0), 0.02)

    assert actions == [Reject("r", RejectReason.NO_DECODE_INSTANCE)]
    assert empty(scheduler)


def test_only_engines_that_pair_are_used() -> None:
    """KV goes to engines of the same layout alone, and those without a partner get nothing."""
    engines = (
        instance("p0", pairing_key="a"),
        instance("p1", pairing_key="b"),
        instance("p2", pairing_key="c"),
        instance("d0", pairing_key="a"),
        instance("d1", pairing_key="b"),
    )
    scheduler = late(*engines)
    for i in range(6):
        scheduler.submit(request(f"r{i}", at=0.0), 0.0)
    pairs = set()
    for i in range(6):
        prefill = next(
            name
            for name, line in scheduler.engines.lines.items()
            if scheduler._flights[f"r{i}"].line is line
        )
        decode = starts(scheduler.observe(PrefillDone(f"r{i}", 30.0), 0.05))[0][1]
        pairs.add((prefill, decode))

    assert pairs == {("p0", "d0"), ("p1", "d1")}


def test_room_is_looked_for_among_partners() -> None:
    """An engine whose partners are full is left alone; the other side goes on."""
    engines = (
        instance("p0", pairing_key="a"),
        instance("p1", pairing_key="b"),
        instance("d0", pairing_key="a", max_num_seqs=1),
        instance("d1", pairing_key="b"),
    )
    scheduler = late(*engines)
    scheduler.pool.charge_decode(request("full"), "d0")

    sent = [starts(scheduler.submit(request(f"r{i}"), 0.0)) for i in range(3)]

    assert {engine for actions in sent for _, engine in actions} == {"p1"}


def test_mixed_engines_do_both() -> None:
    """A MIXED engine gets the decode leg at once, and its first token ends the prefill."""
    scheduler = late("m0", "m1")
    assert starts(scheduler.submit(request("a", prompt=2000), 0.0)) != []
    assert isinstance(scheduler.submit(request("b", prompt=2000), 0.0)[0], StartDecode)
    assert {f.decoder.instance.instance_id for f in scheduler._flights.values()} == {"m0", "m1"}
    assert started(scheduler.submit(request("c", at=0.01), 0.01)) == []

    assert started(scheduler.observe(TokensStreamed("a", 1), 0.14)) == ["c"]
    for name in ("a", "b", "c"):
        scheduler.observe(Finished(name), 1.0)
    assert empty(scheduler)


def test_unknown_requests_change_nothing() -> None:
    """Late news of requests that are gone is ignored."""
    scheduler = late("p0", "d0")

    for event in (
        PrefillDone("x", 1.0),
        TokensStreamed("x", 1),
        Finished("x"),
        Failed("x", Leg.DECODE),
        Cancelled("x"),
        Tick(),
    ):
        assert scheduler.observe(event, 1.0) == []


def test_its_state_is_shown() -> None:
    """The scheduler says how many wait and how many are in flight."""
    scheduler = late("p0", "d0")
    scheduler.submit(request("first", prompt=2000), 0.0)
    scheduler.submit(request("waits", at=0.01), 0.01)

    assert "1 waiting, 1 in flight" in repr(scheduler)


def test_a_request_that_failed_everywhere_is_refused_on_submission() -> None:
    """Where every pair is excluded there is nothing to wait for."""
    scheduler = late("p0", "d0", "d1")
    scheduler.submit(request("first", prompt=2000), 0.0)

    actions = scheduler.submit(request("again", excluded=frozenset({"p0"})), 0.1)

    assert actions == [Reject("again", RejectReason.RETRIES_EXHAUSTED)]
    scheduler.submit(request("other", excluded=frozenset({"d0"}), at=0.1), 0.1)
    assert len(scheduler.queue) == 1


@pytest.mark.parametrize("ending", ["prefilled", "first_token", "cancelled"])
def test_what_another_scheduler_placed_is_kept_account_of(ending: str) -> None:
    """An adopted request holds its engine and its room until it leaves, and teaches nothing."""
    scheduler = late("p0", "d0")
    scheduler.adopt(request("a", prompt=2000), "p0", "d0", 0, 0.0)
    assert started(scheduler.submit(request("waits", at=0.0), 0.0)) == []

    event = {
        "prefilled": PrefillDone("a", 30.0),
        "first_token": TokensStreamed("a", 1),
        "cancelled": Cancelled("a"),
    }[ending]
    sent = started(scheduler.observe(event, 0.05))

    assert sent == ["waits"]
    scheduler.observe(TokensStreamed("a", 1), 0.06)
    assert len(scheduler.handoff._legs) == 0
    assert scheduler.engines.lines["p0"].multiplier.value == 1.0
    for name in ("a", "waits"):
        scheduler.observe(Finished(name), 1.0)
    assert empty(scheduler)


def test_a_stream_is_adopted_with_its_progress() -> None:
    """What was generated before counts as KV on its engine, and unknown engines as nothing."""
    scheduler = late("p0", "d0")
    scheduler.adopt(request("a", prompt=50), "", "d0", 30, 0.0)
    scheduler.adopt(request("b"), "", "d7", 30, 0.0)

    assert scheduler.pool.ledger.columns.decode_kv_tokens[1] == 80.0
    assert len(scheduler.pool.ledger) == 1


def test_a_batch_on_a_lost_engine_is_not_filled() -> None:
    """What is being put together for an engine stops when that one is lost at the same instant."""
    scheduler = late("p0", "p1", "d0")
    for i in range(3):
        scheduler.submit(request(f"r{i}"), 0.0)
    scheduler.observe(arrival(roster("p1", "d0", version=2)), 0.0)

    for i in range(3):
        actions = scheduler.observe(Failed(f"r{i}", Leg.PREFILL), 0.0)
        assert all(engine == "p1" for _, engine in starts(actions))
    assert {f.line.instance.instance_id for f in scheduler._flights.values() if f.line} == {"p1"}
