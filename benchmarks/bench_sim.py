"""Simulated requests per CPU-second, by policy, and beside Vidur where there is an environment with it.

Usage: python -m benchmarks.bench_sim [--seconds S] [--vidur PYTHON]

The load is the mixed workload at round robin's saturation on 2P4D; CPU seconds count everything:
making the requests, the schedulers, the engines and the scoring. Vidur, which has no prefill-decode
split and no hand-off, is given six replicas, its round-robin scheduler and the same requests as a
trace; its start (loading profiles, fitting its predictor) is left out by running two lengths and
taking the difference.
"""

import argparse
import csv
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.rows import Row, show
from dataplane.core.schedulers import SCHEDULERS
from evaluation.cells import Cell
from evaluation.simulated import SimulatedBackend
from evaluation.workloads import load_workload

RATE = 20.0
SEED = 31
AIMS = {"round_robin": 20_000.0, "late_binding": 10_000.0}


def simulated(policy: str, seconds: float) -> Row:
    """Measure one policy."""
    cell = Cell(
        experiment="bench", label=policy, policy=policy, workload="mixed", rate=RATE,
        seconds=seconds, warmup_seconds=0.0,
    )  # fmt: skip
    begin = time.process_time()
    result = SimulatedBackend().run(cell, SEED)
    spent = time.process_time() - begin
    aim = AIMS.get(policy)
    return Row(
        what=policy,
        value=result.requests / spent,
        unit="req/CPU-s",
        aim=aim,
        note=f"{result.requests} requests, {result.virtual_seconds / spent:.0f} x real time",
    )


def memory_growth(seconds: float) -> Row:
    """Measure how much the process grows over a run four times as long."""
    simulated("round_robin", seconds)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = simulated("round_robin", 4.0 * seconds)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    note = f"peak memory, one run, then one of four times the length ({row.note})"
    return Row(what="memory growth", value=(after - before) / 1024.0, unit="MiB", note=note)


def write_trace(path: Path, seconds: float) -> int:
    """Write the workload as a trace that Vidur reads; return its length."""
    arrivals = list(load_workload("mixed").arrivals(RATE, seconds, SEED))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrived_at", "num_prefill_tokens", "num_decode_tokens"])
        writer.writerows((a.at_seconds, a.prompt_tokens, a.output_tokens) for a in arrivals)
    return len(arrivals)


def vidur_seconds(python: str, trace: Path, folder: Path) -> float:
    """Run Vidur over a trace and return its CPU seconds.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    command = [
        python, "-m", "vidur.main",
        "--replica_config_device", "a40",
        "--replica_config_model_name", "microsoft/phi-2",
        "--cluster_config_num_replicas", "6",
        "--replica_config_tensor_parallel_size", "1",
        "--global_scheduler_config_type", "round_robin",
        "--replica_scheduler_config_type", "vllm",
        "--request_generator_config_type", "trace_replay",
        "--trace_request_generator_config_trace_file", str(trace),
        "--trace_request_generator_config_max_tokens", "8192",
        "--metrics_config_output_dir", str(folder),
        "--no-metrics_config_write_metrics",
        "--no-metrics_config_enable_chrome_trace",
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def vidur(python: str, seconds: float) -> Row:
    """Measure Vidur by the difference of two lengths."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spent, counts = [], []
        for part in (0.25 * seconds, seconds):
            trace = folder / f"trace-{part:g}.csv"
            counts.append(write_trace(trace, part))
            spent.append(vidur_seconds(python, trace, folder))
    rate = (counts[1] - counts[0]) / (spent[1] - spent[0])
    note = (
        f"{counts[1]} requests, six replicas, round robin; start {spent[0]:.0f} CPU-s not counted"
    )
    return Row(what="vidur", value=rate, unit="req/CPU-s", note=note)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0, help="of arrivals a run")
    parser.add_argument(
        "--vidur", default=os.environ.get("VIDUR_PYTHON", ""), help="a Python with Vidur"
    )
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at start")
    rows = [simulated(policy, options.seconds) for policy in SCHEDULERS]
    rows.append(memory_growth(options.seconds))
    if options.vidur:
        try:
            rows.append(vidur(options.vidur, options.seconds))
        except (subprocess.CalledProcessError, OSError) as error:
            reason = str(getattr(error, "stderr", error))[-400:]
            print(f"Vidur did not run: {reason}", file=sys.stderr)
    show("Simulator, mixed workload at 20 requests a second on 2P4D", rows)


if __name__ == "__main__":
    main()
