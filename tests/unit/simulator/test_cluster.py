"""Schedulers and the simulated cluster together: nothing is lost, doubled or overfilled."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.core.schedulers import SCHEDULERS, make_scheduler
from evaluation.workloads import load_workload
from simulator.app import simulate
from simulator.decode import DecodeEngine
from simulator.values import (
    Change,
    ClusterSpec,
    End,
    EngineSpec,
    Incident,
    Routing,
    SchedulerSpec,
    pool_of,
)
from tests.unit.simulator.helpers import Kept, arrival, profile_with


def run_mixed(policy, *, seconds=6.0, rate=25.0, seed=4, kept=None, **fields):
    """Run the mixed workload through a cluster and return outcomes and run."""
    kept = kept or Kept()
    spec = ClusterSpec(
        engines=fields.pop("engines", None) or pool_of(2, 4),
        scheduler=SchedulerSpec(name=policy),
        seed=seed,
        **{k: v for k, v in fields.items() if k not in ("build", "watch")},
    )
    extra = {k: v for k, v in fields.items() if k in ("build", "watch")}
    run = simulate(spec, load_workload("mixed").arrivals(rate, seconds, seed), kept, **extra)
    return kept, run


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_same_seed_same_bytes(policy):
    """Two runs with one seed give the same outcomes to the last bit."""
    first, _ = run_mixed(policy)
    second, _ = run_mixed(policy)

    assert msgspec.json.encode(first.outcomes) == msgspec.json.encode(second.outcomes)


def test_another_seed_changes_the_noise():
    """Another cluster seed gives other step times for the same requests."""
    requests = list(load_workload("mixed").arrivals(10.0, 3.0, 1))
    results = []
    for seed in (1, 2):
        kept = Kept()
        spec = ClusterSpec(
            engines=pool_of(1, 1), scheduler=SchedulerSpec(name="round_robin"), seed=seed
        )
        simulate(spec, iter(requests), kept)
        results.append([outcome.ttft_seconds for outcome in kept.outcomes])

    assert results[0] != results[1]


class Recorder:
    """Writes down what a scheduler is told and answers."""

    def __init__(self, scheduler):
        self.scheduler, self.calls = scheduler, []

    def submit(self, request, now):
        actions = self.scheduler.submit(request, now)
        self.calls.append(("submit", request, now, list(actions)))
        return actions

    def observe(self, event, now):
        actions = self.scheduler.observe(event, now)
        self.calls.append(("observe", event, now, list(actions)))
        return actions


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_replay(policy):
    """A fresh scheduler that is told the same at the same times answers the same."""
    recorders = []

    def build(spec, pool):
        recorders.append(Recorder(make_scheduler(spec.name, spec.settings, pool)))
        return recorders[-1]

    _, run = run_mixed(policy, build=build)
    fresh = make_scheduler(policy, {}, type(run.pools[0])())

    for method, told, now, answer in recorders[0].calls:
        assert answer == getattr(fresh, method)(told, now)
    assert len(recorders[0].calls) > 300


def limits_hold(cluster):
    """Assert that no engine holds more than it can."""
    for engine in cluster.engines.values():
        assert 0 <= engine.kv_used_tokens <= engine.kv_total_tokens
        if isinstance(engine, DecodeEngine):
            assert engine.running <= engine._profile.max_num_seqs


REQUEST = st.tuples(
    st.floats(0.0, 4.0),
    st.integers(1, 3000),
    st.integers(1, 200),
    st.sampled_from(["tight", "loose"]),
    st.one_of(st.just(float("inf")), st.floats(0.0, 3.0)),
)
INCIDENT = st.tuples(
    st.floats(0.1, 5.0),
    st.sampled_from(list(Change)),
    st.sampled_from(["p00", "p01", "d00", "d01", "d02"]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(REQUEST, min_size=1, max_size=40),
    st.lists(INCIDENT, max_size=4),
    st.sampled_from(["round_robin", "marginal_cost", "late_binding"]),
    st.tuples(st.sampled_from([6400, 60_000]), st.sampled_from([4, 256])),
    st.sampled_from([(1, False), (3, False), (3, True)]),
)
def test_every_request_ends_once(requests, incidents, policy, limits, front):
    """Whatever arrives, leaves, dies or joins: one end a request, nothing left, no limit passed."""
    kv_tokens, seats = limits
    profile = profile_with(kv_total_tokens=kv_tokens, max_num_seqs=seats)
    ordered = sorted(requests)
    arrivals = [
        arrival(i, at, prompt, output, slo_class=slo_class, cancel_after_seconds=leaves)
        for i, (at, prompt, output, slo_class, leaves) in enumerate(ordered)
    ]
    kept = Kept()
    spec = ClusterSpec(
        engines=pool_of(2, 3, profile),
        scheduler=SchedulerSpec(name=policy),
        routers=front[0],
        routing=Routing.DISPATCHER if front[1] else Routing.INDEPENDENT,
        incidents=tuple(to_incident(i, incident, profile) for i, incident in enumerate(incidents)),
    )

    run = simulate(spec, iter(arrivals), kept, watch=limits_hold)

    ended = [outcome.arrival.number for outcome in kept.outcomes]
    assert sorted(ended) == list(range(len(arrivals)))
    assert [0] * len(run.pools) == [len(pool.ledger) for pool in run.pools]
    left = [len(engine) for engine in run.cluster.engines.values() if engine.alive]
    assert set(left) <= {0}
    if not incidents:
        assert all(
            outcome.end is not End.REJECTED
            for outcome in kept.outcomes
            if outcome.arrival.prompt_tokens + outcome.arrival.output_tokens < kv_tokens
        )


def to_incident(place, incident, profile):
    """Return an incident; newcomers get names of their own."""
    at, change, instance_id = incident
    if change is Change.JOIN:
        role = "prefill" if instance_id.startswith("p") else "decode"
        return Incident(
            at_seconds=at,
            change=change,
            instance_id=f"{instance_id}-{place}",
            engine=EngineSpec(role=role, profile=profile),
        )
    return Incident(at_seconds=at, change=change, instance_id=instance_id)


def test_lost_engine_is_survived():
    """Requests on a decode engine that dies are served by the others, but for begun streams."""
    incidents = (Incident(at_seconds=2.0, change=Change.KILL, instance_id="d01"),)

    kept, _ = run_mixed("round_robin", incidents=incidents)

    ends = [outcome.end for outcome in kept.outcomes]
    rejected = [o for o in kept.outcomes if o.end is End.REJECTED]
    assert ends.count(End.FINISHED) > 0.8 * len(ends)
    assert all(o.ttft_seconds < float("inf") for o in rejected)
    assert any(o.attempts > 1 for o in kept.outcomes)


def test_newcomer_is_used():
    """An instance that joins gets work once the roster has it."""
    joins = Incident(
        at_seconds=1.0, change=Change.JOIN, instance_id="d09", engine=EngineSpec(role="decode")
    )

    kept, _ = run_mixed("least_loaded", incidents=(joins,))

    assert any(outcome.decode == "d09" for outcome in kept.outcomes)


def test_drained_instance_gets_nothing_new():
    """After the roster calls an instance draining, nothing new is placed there."""
    drains = Incident(at_seconds=1.0, change=Change.DRAIN, instance_id="p00")

    kept, _ = run_mixed("round_robin", incidents=(drains,))

    late = [o for o in kept.outcomes if o.arrival.at_seconds > 1.2]
    assert late
    assert all(outcome.prefill == "p01" for outcome in late)


def test_hop_to_the_dispatcher_costs_time():
    """With a dispatcher the first token comes later by the hops on the way."""
    one = [arrival(0, 0.1, 500, 4)]
    ttft = []
    for routing in (Routing.INDEPENDENT, Routing.DISPATCHER):
        kept = Kept()
        spec = ClusterSpec(
            engines=pool_of(1, 1),
            scheduler=SchedulerSpec(name="round_robin"),
            routers=2,
            routing=routing,
        )
        simulate(spec, iter(one), kept)
        ttft.append(kept.outcomes[0].ttft_seconds)

    # Up with the request, down with the binding, up with the end of prefill, down again.
    assert ttft[1] - ttft[0] == pytest.approx(4 * spec.timing.hop_seconds, abs=1e-9)


def test_mixed_instances_need_no_handoff():
    """Instances that do both sides serve requests alone."""
    engines = {f"m{i}": EngineSpec(role="mixed") for i in range(2)}

    kept, _ = run_mixed("least_loaded", engines=engines, rate=4.0)

    assert all(o.end is End.FINISHED and o.prefill == "" for o in kept.outcomes)
