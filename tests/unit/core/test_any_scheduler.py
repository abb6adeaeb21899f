"""What holds of every scheduler, whatever comes: requests, cancels, failures, joins and leaves."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.core.cluster import Instance, State
from dataplane.core.events import Event, StartDecode, StartPrefill
from dataplane.core.late_binding import LateBinding
from dataplane.core.pool import Pool
from dataplane.core.request import Request
from dataplane.core.scheduler import Scheduler
from dataplane.core.schedulers import SCHEDULERS, make_scheduler
from tests.unit.core.builders import instance, pool, request
from tests.unit.core.fake_cluster import FakeCluster

NAMES = ("p0", "p1", "p2", "d0", "d1", "d2", "m0")
SEATS = 3
BUDGET = 4000


@dataclass(frozen=True)
class Step:
    """Something that happens after a pause."""

    pause: float
    what: str
    number: int
    name: str


steps = st.lists(
    st.builds(
        Step,
        pause=st.sampled_from([0.0, 0.001, 0.01, 0.1, 2.0]),
        what=st.sampled_from(["submit"] * 6 + ["cancel", "lose", "join", "drain", "snapshot"]),
        number=st.integers(0, 40),
        name=st.sampled_from(NAMES),
    ),
    max_size=60,
)


def engine(name: str, **changes: Any) -> Instance:
    """Return a small engine; the last of each side pairs with nobody but itself."""
    key = "other" if name in {"p2", "d2"} else "k"
    values = {"max_num_seqs": SEATS, "kv_total_tokens": BUDGET, "pairing_key": key} | changes
    return instance(name, **values)


def play(
    name: str, script: list[Step], flaky: set[tuple[int, str]], options: dict[str, Any]
) -> tuple[FakeCluster, Pool]:
    """Run a script against a scheduler until nothing more happens."""
    started = {n: engine(n) for n in ("p0", "p1", "d0", "d1")}
    held = pool(*started.values())
    cluster = FakeCluster(
        make_scheduler(name, options, held),
        started,
        fails=lambda request_id, where: (int(request_id[1:]) % 5, where) in flaky,
    )
    at, count = 0.0, 0
    for step in script:
        at += step.pause
        if step.what == "submit":
            count += 1
            cluster.at(at, lambda step=step, n=count: submit(cluster, step, n))
        else:
            cluster.at(at, lambda step=step: happen(cluster, step))
    cluster.run()
    return cluster, held


def submit(cluster: FakeCluster, step: Step, count: int) -> None:
    """Bring a request of some size and class."""
    slo_class = "tight" if step.number % 2 else "loose"
    made = request(f"r{count}", prompt=20 + 40 * step.number, slo_class=slo_class, at=cluster.now)
    cluster.submit(made, 1 + step.number % 7)


def happen(cluster: FakeCluster, step: Step) -> None:
    """Let something happen to a request or an engine."""
    if step.what == "cancel":
        cluster.cancel(f"r{step.number}")
    elif step.what == "lose":
        cluster.change(None, step.name)
    elif step.what == "drain" and step.name in cluster.engines:
        cluster.change(replace(cluster.engines[step.name], state=State.DRAINING), step.name)
    elif step.what == "join":
        cluster.change(engine(step.name, epoch=str(cluster.version)), step.name)
    elif step.what == "snapshot" and step.name in cluster.engines:
        cluster.change(cluster.engines[step.name], step.name)


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=steps,
    flaky=st.sets(st.tuples(st.integers(0, 4), st.sampled_from(NAMES)), max_size=6),
)
def test_every_request_ends_once(
    name: str, script: list[Step], flaky: set[tuple[int, str]]
) -> None:
    """All requests end exactly once, and nothing is charged or waits at the end."""
    cluster, held = play(name, script, flaky, {})

    assert cluster.held == {}
    assert len(cluster.ends) == sum(step.what == "submit" for step in script)
    assert len(held.ledger) == 0
    for column in type(held.ledger.columns).__slots__:
        assert not any(getattr(held.ledger.columns, column))
    if isinstance(cluster.scheduler, LateBinding):
        late = cluster.scheduler
        assert not late.queue
        assert not late._flights
        assert all(not line.batches for line in late.engines.lines.values())
        assert all(not decoder.targets for decoder in late.engines.decoders.values())
        assert not any(late.gate.booked_requests)
        assert not any(late.gate.booked_tokens)


@pytest.mark.parametrize("fairness", ["goodput_first", "default", "strict"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=steps)
def test_replaying_events_gives_the_same_actions(fairness: str, script: list[Step]) -> None:
    """A scheduler is a function of what it is told and when: a recorded run can be replayed."""
    cluster, _ = play("late_binding", script, set(), {"fairness": fairness})
    replayed: Scheduler = make_scheduler(
        "late_binding",
        {"fairness": fairness},
        pool(*(engine(n) for n in ("p0", "p1", "d0", "d1"))),
    )

    for now, cause, actions in cluster.log:
        if isinstance(cause, Request):
            assert replayed.submit(cause, now) == actions
        else:
            event: Event = cause  # type: ignore[assignment]
            assert replayed.observe(event, now) == actions


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    pause=st.sampled_from([0.0, 0.002, 0.02]),
)
def test_late_binding_never_overfills(sizes: list[int], pause: float) -> None:
    """With its own load alone no engine is given more sequences or KV than it holds."""
    engines = {n: engine(n) for n in ("p0", "p1", "d0", "d1")}
    held = pool(*engines.values())
    cluster = FakeCluster(make_scheduler("late_binding", {}, held), engines)
    for i, size in enumerate(sizes):
        made = request(f"r{i}", prompt=20 * size, at=i * pause)
        cluster.at(i * pause, lambda made=made: cluster.submit(made, 5))
    cluster.run()

    seats, kv = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
    sizes_by_name = {f"r{i}": 20 * size for i, size in enumerate(sizes)}
    where: dict[str, str] = {}
    for _, cause, actions in cluster.log:
        ended = getattr(cause, "request_id", "")
        if type(cause).__name__ == "Finished":
            seats[where[ended]] -= 1
            kv[where[ended]] -= sizes_by_name[ended] + 5
        for action in actions:
            assert not isinstance(action, StartPrefill) or action.instance_id[0] == "p"
            if isinstance(action, StartDecode):
                where[action.request_id] = action.instance_id
                seats[action.instance_id] += 1
                kv[action.instance_id] += sizes_by_name[action.request_id] + 5
        assert max(seats.values()) <= SEATS
        assert max(kv.values()) <= BUDGET
