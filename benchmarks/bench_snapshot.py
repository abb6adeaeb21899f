"""What a new snapshot costs a router: reading the blob and handing it to the pools."""

import time

from steelyard.v1 import types_pb2

from benchmarks.rows import Row
from dataplane.core.predictor import HistogramPredictor
from dataplane.core.schedulers import make_scheduler
from dataplane.router.fleet import Fleet
from dataplane.router.journal import Journal
from dataplane.router.snapshots import SnapshotReader
from servicekit.clock import SystemClock

ROUTERS = 4
AIMS_US = {64: 100.0, 1000: 1000.0}


def snapshot(count: int, sequence: int) -> bytes:
    """Make a snapshot of `count` instances, a third of them prefill, seen by four routers."""
    roster = types_pb2.Roster()
    for i in range(count):
        role = types_pb2.ROLE_PREFILL if i % 3 == 0 else types_pb2.ROLE_DECODE
        engine = types_pb2.EngineInfo(
            instance_id=f"instance-{i:04}",
            epoch="0123456789abcdef",
            role=role,
            model="qwen2.5-3b",
            address=f"10.0.{i // 256}.{i % 256}:7000",
            dtype="bfloat16",
            max_model_tokens=8192,
            vocab_size=151_936,
            block_tokens=16,
            kv_total_tokens=60_000,
            kv_bytes_per_token=36_864,
            max_num_seqs=256,
            max_batched_tokens=2048,
            pairing_key="5e0d1f0a",
            profile="a40-qwen2.5-3b",
        )
        roster.instances.add(engine=engine, state=types_pb2.INSTANCE_STATE_READY, scale=1.0)
    message = types_pb2.ClusterSnapshot(
        sequence=sequence, roster_version=7, roster=roster.SerializeToString()
    )
    loads = message.loads
    loads.running.extend([20] * count)
    loads.waiting.extend([1] * count)
    loads.kv_used_tokens.extend([20_000] * count)
    loads.queued_prefill_tokens.extend([500] * count)
    loads.step_seconds.extend([0.0125] * count)
    loads.age_seconds.extend([0.02] * count)
    for i in range(ROUTERS):
        row = message.by_router.add(router_id=f"router-{i}")
        row.prefill_requests.extend([2] * count)
        row.prefill_tokens.extend([900] * count)
        row.decode_requests.extend([5] * count)
        row.decode_kv_tokens.extend([5_000] * count)
        row.held_kv_tokens.extend([0] * count)
    return message.SerializeToString()


def measure() -> list[Row]:
    """Return the cost of a refresh at 64 and at 1,000 instances, roster unchanged."""
    rows = []
    for count, aim in AIMS_US.items():
        clock = SystemClock()
        fleet = Fleet(
            lambda name, pool: make_scheduler(name, {}, pool),
            HistogramPredictor(),
            Journal(None, clock),
            clock,
            lambda _policy, _seconds: None,
        )
        reader = SnapshotReader("router-0")
        fleet.arrived(reader.read(snapshot(count, 1)))
        fleet.driver("").scheduler("marginal_cost")
        blobs = [snapshot(count, sequence) for sequence in range(2, 202)]
        times = []
        for blob in blobs:
            started = time.process_time_ns()
            fleet.arrived(reader.read(blob))
            times.append((time.process_time_ns() - started) / 1e3)
        times.sort()
        rows.append(
            Row(
                what=f"snapshot refresh, {count} instances, {ROUTERS} routers",
                value=times[len(times) // 2],
                unit="us",
                aim=aim,
                note=f"p99 {times[int(len(times) * 0.99)]:.0f} us",
            )
        )
    return rows
