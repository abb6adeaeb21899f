"""A front end that asks a dispatcher, and what it does when that one is gone."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.core.delegation import Delegating, Forward, Submission
from dataplane.core.errors import RejectReason
from dataplane.core.events import (
    Action,
    Cancelled,
    Failed,
    Finished,
    Leg,
    PrefillDone,
    Reject,
    SnapshotArrived,
    StartDecode,
    StartPrefill,
    Tick,
    TokensStreamed,
    WakeAt,
)
from dataplane.core.late_binding import LateBinding
from dataplane.core.policies.registry import make_policy
from dataplane.core.pool import Pool
from tests.unit.core.builders import instance, pool, request, roster, snapshot
from tests.unit.core.fake_cluster import FakeCluster

HOP_SECONDS = 0.002


@dataclass
class RecordingLink:
    """A link that keeps what is sent."""

    sent: list[Forward] = field(default_factory=list)

    def send(self, message: Forward) -> None:
        self.sent.append(message)


def front(*engines: str) -> tuple[Delegating, Pool]:
    """Return a front end over idle engines, on its own."""
    held = pool(*(engines or ("p0", "p1", "d0", "d1")))
    return Delegating(held, make_policy("least_loaded")), held


def test_without_a_dispatcher_requests_are_placed_at_once() -> None:
    """A front end on its own binds both sides by its fallback policy."""
    scheduler, held = front()

    first = scheduler.submit(request("a"), 0.0)
    second = scheduler.submit(request("b"), 0.0)

    assert {a.instance_id for a in (*first, *second) if isinstance(a, StartPrefill)} == {"p0", "p1"}
    assert sum(held.ledger.columns.decode_requests) == 2


def test_with_a_dispatcher_requests_go_there_and_wait() -> None:
    """Nothing is started before the dispatcher binds, and its bindings are charged here too."""
    scheduler, held = front()
    link = RecordingLink()
    scheduler.attach(link)

    assert scheduler.submit(request("a"), 0.0) == []
    assert [type(m) for m in link.sent] == [Submission]

    assert scheduler.bound(StartPrefill("a", "p1")) == [StartPrefill("a", "p1")]
    assert held.ledger.columns.prefill_requests[held.slot("p1") or 0] == 1

    assert scheduler.observe(PrefillDone("a", 30.0), 0.1) == []
    assert scheduler.bound(StartDecode("a", "d0")) == [StartDecode("a", "d0")]

    scheduler.observe(TokensStreamed("a", 3), 0.2)
    scheduler.observe(Finished("a"), 0.3)

    assert [type(m).__name__ for m in link.sent[1:]] == [
        "PrefillDone", "TokensStreamed", "Finished",
    ]  # fmt: skip
    assert len(held.ledger) == 0


def test_losing_the_dispatcher_places_what_waits() -> None:
    """Requests that wait for either binding are placed here the moment the dispatcher is gone."""
    scheduler, _ = front()
    scheduler.attach(RecordingLink())
    scheduler.submit(request("waits"), 0.0)
    scheduler.submit(request("prefilled"), 0.0)
    scheduler.bound(StartPrefill("prefilled", "p0"))
    scheduler.observe(PrefillDone("prefilled", 30.0), 0.1)

    actions = scheduler.detach()

    assert {type(a).__name__: a.request_id for a in actions if not isinstance(a, WakeAt)} == {
        "StartPrefill": "waits",
        "StartDecode": "prefilled",
    }


def test_a_new_dispatcher_is_told_what_is_under_way_and_decides_nothing_about_it() -> None:
    """What was placed here is announced with its places; bindings for it are dropped."""
    scheduler, _ = front()
    scheduler.submit(request("a"), 0.0)
    link = RecordingLink()

    scheduler.attach(link)

    assert isinstance(link.sent[0], Submission)
    assert link.sent[0].prefill_id
    assert link.sent[0].decode_id
    assert scheduler.bound(StartPrefill("a", "p1")) == []
    assert scheduler.bound(StartDecode("a", "d1")) == []
    assert scheduler.bound(Reject("a", RejectReason.QUEUE_FULL)) == []


def test_a_binding_that_comes_twice_is_dropped() -> None:
    """The same request is not started twice, whatever a dispatcher sends."""
    scheduler, _ = front()
    scheduler.attach(RecordingLink())
    scheduler.submit(request("a"), 0.0)
    scheduler.bound(StartPrefill("a", "p0"))

    assert scheduler.bound(StartPrefill("a", "p1")) == []
    assert scheduler.bound(StartDecode("a", "d0")) == []
    assert scheduler.bound(StartPrefill("never seen", "p0")) == []


def test_a_failed_leg_goes_back_to_the_dispatcher() -> None:
    """Before the first token the dispatcher places a failed request again; after it nobody does."""
    scheduler, held = front()
    link = RecordingLink()
    scheduler.attach(link)
    scheduler.submit(request("a"), 0.0)
    scheduler.bound(StartPrefill("a", "p0"))

    assert scheduler.observe(Failed("a", Leg.PREFILL), 0.1) == []
    assert link.sent[-1] == Failed("a", Leg.PREFILL)
    assert scheduler.bound(StartPrefill("a", "p1")) == [StartPrefill("a", "p1")]

    scheduler.observe(PrefillDone("a", 30.0), 0.2)
    scheduler.bound(StartDecode("a", "d0"))
    scheduler.observe(TokensStreamed("a", 1), 0.3)

    assert scheduler.observe(Failed("a", Leg.DECODE), 0.4) == [
        Reject("a", RejectReason.STREAM_BROKEN)
    ]
    assert len(held.ledger) == 0


class Office:
    """A dispatcher a hop away, with a scheduler of its own; gone when it is closed."""

    def __init__(self, cluster: FakeCluster, scheduler: Delegating) -> None:
        self.cluster = cluster
        self.front = scheduler
        self.pool = Pool()
        self.pool.refresh(snapshot(roster(*cluster.engines.values(), version=cluster.version)))
        self.late = LateBinding(self.pool)
        self.open = True

    def send(self, message: Forward) -> None:
        self.cluster.at(HOP_SECONDS, lambda: self._receive(message))

    def tell(self, event: SnapshotArrived) -> None:
        self._perform(self.late.observe(event, self.cluster.now))

    def _receive(self, message: Forward) -> None:
        if not self.open:
            return
        now = self.cluster.now
        if not isinstance(message, Submission):
            self._perform(self.late.observe(message, now))
        elif message.prefill_id or message.decode_id:
            self.late.adopt(
                message.request,
                message.prefill_id,
                message.decode_id,
                message.generated_tokens,
                now,
            )
        else:
            self._perform(self.late.submit(message.request, now))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, WakeAt):
                delay = max(0.0, action.at - self.cluster.now)
                self.cluster.at(delay, self._tick)
            else:
                self.cluster.at(HOP_SECONDS, lambda action=action: self._bind(action))

    def _tick(self) -> None:
        if self.open:
            self._perform(self.late.observe(Tick(), self.cluster.now))

    def _bind(self, action: Action) -> None:
        if self.open:
            self.cluster._perform(action, self.front.bound(action))


class Front:
    """A scheduler whose dispatcher comes and goes."""

    def __init__(self, held: Pool) -> None:
        self.delegating = Delegating(held, make_policy("least_loaded"))
        self.office: Office | None = None
        self.offices: list[Office] = []

    def submit(self, made: object, now: float) -> list[Action]:
        return self.delegating.submit(made, now)  # type: ignore[arg-type]

    def observe(self, event: object, now: float) -> list[Action]:
        actions = self.delegating.observe(event, now)  # type: ignore[arg-type]
        if isinstance(event, SnapshotArrived) and self.office is not None:
            self.office.tell(event)
        return actions

    def come(self, cluster: FakeCluster) -> None:
        self.go(cluster)
        self.office = Office(cluster, self.delegating)
        self.offices.append(self.office)
        self.delegating.attach(self.office)

    def go(self, cluster: FakeCluster) -> None:
        if self.office is not None:
            self.office.open = False
            self.office = None
            cluster._perform("dispatcher lost", self.delegating.detach())


steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.001, 0.005, 0.03, 0.4]),
        st.sampled_from(["submit"] * 6 + ["cancel", "come", "come", "go", "lose", "join"]),
        st.integers(0, 40),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=steps, flaky=st.sets(st.tuples(st.integers(0, 4), st.sampled_from(["p0", "d1"]))))
def test_a_dispatcher_that_comes_and_goes_loses_and_doubles_nothing(
    script: list[tuple[float, str, int]], flaky: set[tuple[int, str]]
) -> None:
    """Whatever happens to dispatcher, engines and clients, every request ends once and frees all."""
    engines = {name: instance(name) for name in ("p0", "p1", "d0", "d1")}
    held = pool(*engines.values())
    scheduler = Front(held)
    cluster = FakeCluster(
        scheduler,  # type: ignore[arg-type]
        dict(engines),
        fails=lambda request_id, where: (int(request_id[1:]) % 5, where) in flaky,
    )
    at, count = 0.0, 0
    for pause, what, number in script:
        at += pause
        if what == "submit":
            count += 1
            cluster.at(at, lambda n=count, size=number: _submit(cluster, n, size))
        else:
            cluster.at(at, lambda what=what, n=number: _happen(cluster, scheduler, what, n))
    cluster.run()

    assert count == len(cluster.ends)
    assert len(held.ledger) == 0
    assert not any(held.ledger.columns.decode_kv_tokens)
    if scheduler.office is not None:
        assert len(scheduler.office.pool.ledger) == 0
        assert len(scheduler.office.late.queue) == 0


def _submit(cluster: FakeCluster, count: int, size: int) -> None:
    made = request(f"r{count}", prompt=20 + 40 * size, at=cluster.now)
    cluster.submit(made, 1 + size % 7)


def _happen(cluster: FakeCluster, scheduler: Front, what: str, number: int) -> None:
    name = ("p0", "p1", "d0", "d1")[number % 4]
    if what == "come":
        scheduler.come(cluster)
    elif what == "go":
        scheduler.go(cluster)
    elif what == "cancel":
        cluster.cancel(f"r{number}")
    elif what == "lose" and len(cluster.engines) > 1:
        cluster.change(None, name)
    elif what == "join":
        cluster.change(instance(name, epoch=f"e{cluster.version}"), name)


def test_cancelled_is_passed_on() -> None:
    """A client that leaves is told to the dispatcher once."""
    scheduler, _ = front()
    link = RecordingLink()
    scheduler.attach(link)
    scheduler.submit(request("a"), 0.0)
    scheduler.observe(Cancelled("a"), 0.1)
    scheduler.observe(Cancelled("a"), 0.2)

    assert [Finished("a")] == link.sent[1:]
