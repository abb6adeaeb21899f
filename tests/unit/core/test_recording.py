"""A recorded scheduler can be replayed, through JSON and over any events."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from dataplane.core.events import PrefillDone, StartDecode, StartPrefill
from dataplane.core.lengths import BUCKET_EDGES, LengthHistogram
from dataplane.core.pool import Pool
from dataplane.core.predictor import LengthEstimate
from dataplane.core.recording import Recording, RecordingDispatcher, replay
from dataplane.core.schedulers import SCHEDULERS, make_late_binding, make_scheduler
from tests.unit.core.builders import arrival, request, roster
from tests.unit.core.fake_cluster import FakeCluster
from tests.unit.core.test_any_scheduler import Step, engine, happen, steps, submit


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=steps)
def test_a_recorded_run_replays_without_a_difference(name: str, script: list[Step]) -> None:
    """Rows that went through JSON give the same actions from a fresh scheduler."""
    rows: list[str] = []
    engines = {n: engine(n) for n in ("p0", "p1", "d0", "d1")}
    recorded = Recording(make_scheduler(name, {}, Pool()), lambda row: rows.append(json.dumps(row)))
    cluster = FakeCluster(recorded, engines)
    cluster.observe(arrival(roster(*engines.values())))
    at, count = 0.0, 0
    for step in script:
        at += step.pause
        if step.what == "submit":
            count += 1
            cluster.at(at, lambda step=step, n=count: submit(cluster, step, n))
        else:
            cluster.at(at, lambda step=step: happen(cluster, step))
    cluster.run()

    differences = replay(map(json.loads, rows), make_scheduler(name, {}, Pool()))

    assert differences == []


def test_a_replay_with_other_rules_shows_where_it_differs() -> None:
    """Replaying with another policy names the events at which it answers otherwise."""
    rows: list[dict] = []
    recorded = Recording(make_scheduler("round_robin", {}, Pool()), rows.append)
    recorded.observe(arrival(roster("p0", "p1", "d0", "d1")), 0.0)
    for i in range(8):
        recorded.submit(request(f"r{i}", prompt=3000 if i % 2 else 10), 0.1)

    differences = replay(rows, make_scheduler("marginal_cost", {}, Pool()))

    assert differences
    assert differences[0].recorded != differences[0].replayed


def test_what_is_known_of_lengths_survives() -> None:
    """A request's length histogram and its error factor come back as they were."""
    weights = [1.0] * len(BUCKET_EDGES)
    length = LengthEstimate(50.0, LengthHistogram(weights), 400, 1.5)
    rows: list[dict] = []
    recorded = Recording(make_scheduler("marginal_cost", {}, Pool()), rows.append)
    recorded.observe(arrival(roster("p0", "d0")), 0.0)
    recorded.submit(replace(request("a"), length=length), 0.1)
    again: list[dict] = []

    replay(
        json.loads(json.dumps(rows)),
        Recording(make_scheduler("marginal_cost", {}, Pool()), again.append),
    )

    assert rows[1]["values"] == again[1]["values"]


def test_what_a_dispatcher_takes_over_is_recorded_too() -> None:
    """Requests that others had placed weigh in a replay as they did; only late binding replays them."""
    rows: list[str] = []
    recorded = RecordingDispatcher(
        make_late_binding({}, Pool()), lambda row: rows.append(json.dumps(row))
    )
    recorded.observe(arrival(roster("p0", "p1", "d0", "d1")), 0.0)
    recorded.adopt(request("old", prompt=4000), "p0", "", 0, 0.1)
    recorded.adopt(request("older", prompt=4000), "", "d1", 12, 0.1)
    (start,) = [a for a in recorded.submit(request("new"), 0.2) if isinstance(a, StartPrefill)]
    decode = recorded.observe(PrefillDone("new", 0.01), 0.25)[0]
    plain = [json.loads(row) for row in rows]
    without = [row for row in plain if row["kind"] != "Adopted"]

    assert (start.instance_id, decode) == ("p1", StartDecode("new", "d0"))
    assert replay(plain, make_late_binding({}, Pool())) == []
    assert replay(without, make_late_binding({}, Pool())) != []
    with pytest.raises(TypeError, match="Immediate"):
        replay(plain, make_scheduler("round_robin", {}, Pool()))
