"""How long decisions take: every policy by candidates, late binding by instances and queue.

    python -m benchmarks.bench_decision [--quick] [--json FILE]

Policies: `place` on a cluster of so many prefill and as many decode instances, each with some load.
Late binding: every call into the scheduler counts (a submission, the end of a prefill with the
choice of its decode instance and of who is prefilled next, the end of a generation) while the
queue stays as long as it is said; a third of the instances prefill. Half of the queue is late.
One call may send a whole batch: the line `late_binding` is a call's time by what it decided, each
request sent to prefill or to decode being one decision; below it the calls as a whole.
Times are processor time of the deciding thread, so that a busy machine does not change them; garbage
collection is on, as in a server, with what was there before frozen.
"""

import argparse
import gc
import json
import sys
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from time import thread_time

from dataplane.core.cluster import (
    Instance,
    Measurements,
    PricedConstants,
    Role,
    Roster,
    Snapshot,
    State,
)
from dataplane.core.events import (
    Event,
    Finished,
    PrefillDone,
    StartDecode,
    StartPrefill,
    TokensStreamed,
)
from dataplane.core.late_binding import LateBinding
from dataplane.core.policies.registry import POLICIES, make_policy
from dataplane.core.pool import Pool
from dataplane.core.predictor import LengthEstimate
from dataplane.core.request import Request, Targets
from dataplane.core.slo import DEFAULT_SLO
from enginemodel.profiles import REFERENCE

PLACE_AIMS_SECONDS = {64: 1e-3, 1000: 1e-3}
LATE_AIM_SECONDS = {(100, 1_000): 200e-6}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    candidates: str
    queued: int
    samples: int
    p50_seconds: float
    p99_seconds: float
    max_seconds: float
    aim_seconds: float | None


def instance(name: str, role: Role) -> Instance:
    profile = REFERENCE
    return Instance(
        instance_id=name,
        epoch="1",
        role=role,
        state=State.READY,
        pool="m",
        address="",
        pairing_key="k",
        profile=profile.name,
        scale=1.0,
        max_model_tokens=profile.max_model_tokens,
        vocab_size=1000,
        block_tokens=profile.block_tokens,
        kv_total_tokens=profile.kv_total_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        max_num_seqs=profile.max_num_seqs,
        max_batched_tokens=profile.max_batched_tokens,
        handoff_lease_seconds=30.0,
        tokenizer_sha256="",
    )


def cluster(prefill: int, decode: int) -> Pool:
    instances = tuple(instance(f"p{i:04d}", Role.PREFILL) for i in range(prefill)) + tuple(
        instance(f"d{i:04d}", Role.DECODE) for i in range(decode)
    )
    constants = PricedConstants(version=1, constants=REFERENCE.constants, uncalibrated=False)
    roster = Roster(
        version=1, instances=instances, constants={REFERENCE.name: constants}, slo=DEFAULT_SLO
    )
    zeros = {f.name: array("d", bytes(8 * len(instances))) for f in fields(Measurements)}
    pool = Pool()
    pool.refresh(Snapshot(sequence=1, roster=roster, measurements=Measurements(**zeros)))
    return pool


def request(name: str, random: Random, at: float, targets: Targets | None = None) -> Request:
    slo_class = random.choice(("tight", "loose"))
    return Request(
        request_id=name,
        prompt_tokens=min(4000, 8 + int(random.lognormvariate(5.5, 1.0))),
        max_tokens=1000,
        length=LengthEstimate(random.uniform(20, 900), (), 1000),
        slo_class=slo_class,
        urgency=1.0,
        targets=targets or DEFAULT_SLO.classes[slo_class],
        arrived_at=at,
    )


def row(what: str, candidates: str, queued: int, times: list[float], aim: float | None) -> Row:
    times.sort()
    pick = lambda share: times[min(len(times) - 1, int(share * len(times)))]  # noqa: E731
    return Row(what, candidates, queued, len(times), pick(0.5), pick(0.99), times[-1], aim)


def bench_policy(name: str, count: int, samples: int) -> Row:
    random = Random(1)
    pool = cluster(count, count)
    for i in range(2 * count):
        one = request(f"load{i}", random, 0.0)
        pool.charge_prefill(one, f"p{random.randrange(count):04d}")
        pool.charge_decode(one, f"d{random.randrange(count):04d}")
    policy = make_policy(name)
    asked = [request(f"r{i}", random, 0.0) for i in range(samples)]
    times = []
    for one in asked:
        start = thread_time()
        policy.place(one, pool.view)
        times.append(thread_time() - start)
    return row(name, f"{count}+{count}", 0, times, PLACE_AIMS_SECONDS.get(count))


class Load:
    """Keeps a scheduler busy: what was sent ends after a while, and the queue is kept full."""

    def __init__(self, instances: int, queued: int) -> None:
        prefill = max(1, instances // 3)
        self.random = Random(2)
        self.scheduler = LateBinding(cluster(prefill, instances - prefill))
        self.queued = queued
        self.now = 1000.0
        self.count = 0
        self.in_prefill: deque[str] = deque()
        self.in_decode: deque[str] = deque()
        self.prefills = prefill
        self.decodes = 20 * (instances - prefill)
        self.times: dict[str, list[float]] = {"submit": [], "prefilled": [], "finished": []}
        self.by_decision: list[float] = []
        self.timed = False

    def call(self, what: str, decide: Callable[[], list]) -> None:
        start = thread_time()
        actions = decide()
        passed = thread_time() - start
        if self.timed:
            self.times[what].append(passed)
            decided = sum(isinstance(a, StartPrefill | StartDecode) for a in actions)
            self.by_decision.append(passed / max(1, decided))
        self.in_prefill.extend(a.request_id for a in actions if isinstance(a, StartPrefill))

    def submit(self) -> None:
        self.count += 1
        late = self.count % 2 == 0
        at = self.now - (5.0 if late else 0.0)
        targets = None if late else Targets(self.random.uniform(5.0, 30.0), 0.1191)
        made = request(f"r{self.count}", self.random, at, targets)
        self.call("submit", lambda: self.scheduler.submit(made, self.now))

    def observe(self, what: str, event: Event) -> None:
        self.call(what, lambda: self.scheduler.observe(event, self.now))

    def step(self) -> None:
        self.now += 0.02 / self.prefills
        if self.in_prefill:
            name = self.in_prefill.popleft()
            self.observe("prefilled", PrefillDone(name, self.now + 30.0))
            self.scheduler.observe(TokensStreamed(name, 1), self.now)
            self.in_decode.append(name)
        if len(self.in_decode) > self.decodes:
            self.observe("finished", Finished(self.in_decode.popleft()))
        while len(self.scheduler.queue) < self.queued:
            self.submit()


def bench_late(instances: int, queued: int, samples: int) -> list[Row]:
    load = Load(instances, queued)
    for _ in range(max(50, min(samples, 2 * instances))):
        load.step()
    gc.collect()
    gc.freeze()
    load.timed = True
    for _ in range(samples):
        load.step()
    gc.unfreeze()
    aim = LATE_AIM_SECONDS.get((instances, queued))
    rows = [row("late_binding", str(instances), queued, load.by_decision, aim)]
    return rows + [
        row(f"  {what}", str(instances), queued, times, None)
        for what, times in load.times.items()
        if times
    ]


def show(rows: list[Row]) -> None:
    print(f"{'':16}{'candidates':>12}{'queued':>9}{'p50 us':>10}{'p99 us':>10}{'max us':>11}  aim")
    for one in rows:
        aim = ""
        if one.aim_seconds is not None:
            aim = f"{one.p99_seconds / one.aim_seconds:.2f} of {one.aim_seconds * 1e6:.0f} us"
        print(
            f"{one.what:16}{one.candidates:>12}{one.queued:>9}{one.p50_seconds * 1e6:>10.1f}"
            f"{one.p99_seconds * 1e6:>10.1f}{one.max_seconds * 1e6:>11.1f}  {aim}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer samples, no longest queue")
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    options = parser.parse_args()
    samples = 300 if options.quick else 2000
    rows = [
        bench_policy(name, count, samples) for name in sorted(POLICIES) for count in (4, 64, 1000)
    ]
    lengths = (10, 1_000) if options.quick else (10, 1_000, 100_000)
    for instances in (6, 100, 1000):
        for queued in lengths:
            rows += bench_late(instances, queued, samples)
    show(rows)
    if options.json is not None:
        names = [field.name for field in fields(Row)]
        table = [{name: getattr(one, name) for name in names} for one in rows]
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
