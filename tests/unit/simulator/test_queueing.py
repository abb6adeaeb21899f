"""The simulated cluster reduced to textbook queues, against closed forms and simpy."""

import numpy as np
import pytest
import simpy

from dataplane.core.events import Finished, PrefillDone, SnapshotArrived, StartDecode, StartPrefill
from simulator.app import simulate
from simulator.values import SILENT, ClusterSpec, SchedulerSpec, pool_of
from tests.unit.simulator.helpers import NO_DELAYS, Kept, arrival, profile_with

# A prefill engine that takes 1 ms a token and nothing else, one prompt at a time; decode is free.
BARE = profile_with(
    p0_seconds=0.0,
    p1_seconds=0.0,
    p2_seconds_per_token=1e-3,
    p3_seconds_per_token_squared=0.0,
    d0_seconds=1e-9,
    d1_seconds_per_sequence=0.0,
    d2_seconds_per_kv_token=0.0,
    h0_seconds=0.0,
    handoff_bytes_per_second=1e18,
    max_num_seqs=1,
    max_batched_tokens=1_000_000,
    kv_total_tokens=10_000_000,
)


class OneQueue:
    """A scheduler that keeps one queue and gives each prefill engine one prompt at a time."""

    def __init__(self, pool):
        self.pool, self.idle, self.queue, self.busy = pool, None, [], {}

    def submit(self, request, now):
        self.queue.append(request.request_id)
        return self._start()

    def observe(self, event, now):
        if isinstance(event, SnapshotArrived):
            roster = event.snapshot.roster.instances
            if self.idle is None:
                self.idle = [i.instance_id for i in roster if i.role.value == "prefill"]
            return []
        if isinstance(event, PrefillDone):
            self.idle.append(self.busy.pop(event.request_id))
            return [StartDecode(event.request_id, "d00"), *self._start()]
        assert not isinstance(event, Finished) or event.request_id not in self.busy
        return []

    def _start(self):
        actions = []
        while self.idle and self.queue:
            request_id, engine = self.queue.pop(0), self.idle.pop(0)
            self.busy[request_id] = engine
            actions.append(StartPrefill(request_id, engine))
        return actions


def waits(arrivals, servers):
    """Return each request's time in the system but its own service, in order of arrival."""
    kept = Kept()
    spec = ClusterSpec(
        engines=pool_of(servers, 1, BARE),
        scheduler=SchedulerSpec(name="one queue"),
        timing=NO_DELAYS,
        noise=SILENT,
    )
    simulate(spec, iter(arrivals), kept, build=lambda _, pool: OneQueue(pool))
    kept.outcomes.sort(key=lambda outcome: outcome.arrival.number)
    return np.array([o.ttft_seconds - o.arrival.prompt_tokens * 1e-3 for o in kept.outcomes])


def by_simpy(arrivals, servers):
    """Return the same waits from simpy's resource."""
    environment = simpy.Environment()
    server = simpy.Resource(environment, servers)
    found = {}

    def customer(one):
        yield environment.timeout(one.at_seconds)
        with server.request() as turn:
            yield turn
            found[one.number] = environment.now - one.at_seconds
            yield environment.timeout(one.prompt_tokens * 1e-3)

    for one in arrivals:
        environment.process(customer(one))
    environment.run()
    return np.array([found[number] for number in sorted(found)])


def poisson(count, rate, prompts, seed=0):
    """Return Poisson arrivals with these prompts."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1.0 / rate, count))
    return [
        arrival(i, float(at), int(prompt), 1)
        for i, (at, prompt) in enumerate(zip(times, prompts, strict=True))
    ]


@pytest.mark.parametrize("servers", [1, 3])
def test_deterministic_service_equals_simpy(servers):
    """With equal prompts, every single request waits as long as in simpy's M/D/c."""
    arrivals = poisson(2000, 0.8 * servers / 0.2, [200] * 2000)

    ours = waits(arrivals, servers)

    assert ours == pytest.approx(by_simpy(arrivals, servers), abs=1e-6)


def test_exponential_service_equals_simpy():
    """With exponential prompts, every single request waits as long as in simpy's M/M/2."""
    prompts = np.maximum(1, np.random.default_rng(1).exponential(200.0, 2000)).astype(int)
    arrivals = poisson(2000, 0.7 * 2 / 0.2, prompts)

    assert waits(arrivals, 2) == pytest.approx(by_simpy(arrivals, 2), abs=1e-6)


def test_mean_wait_of_m_d_1():
    """The mean wait of M/D/1 is rho s / (2 (1 - rho))."""
    rho, service = 0.6, 0.2
    arrivals = poisson(15_000, rho / service, [200] * 15_000)

    expected = rho * service / (2.0 * (1.0 - rho))

    assert waits(arrivals, 1).mean() == pytest.approx(expected, rel=0.05)


def test_mean_wait_of_m_m_1():
    """The mean wait of M/M/1 is rho s / (1 - rho)."""
    rho, service = 0.6, 2.0
    prompts = np.maximum(1, np.random.default_rng(3).exponential(2000.0, 15_000)).astype(int)
    arrivals = poisson(15_000, rho / service, prompts, seed=5)

    expected = rho * service / (1.0 - rho)

    assert waits(arrivals, 1).mean() == pytest.approx(expected, rel=0.1)
