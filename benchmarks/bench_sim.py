"""Simulated requests per CPU-second, by policy, and beside Vidur where there is an environment with it.

Usage: python -m benchmarks.bench_sim [--seconds S] [--vidur PYTHON]

The load is the mixed workload at round robin's saturation on 2P4D; CPU seconds count everything:
making the requests, the schedulers, the engines and the scoring. Vidur, which has no prefill-decode
split and no hand-off, is given six replicas, its round-robin and vLLM schedulers and the same
requests as a trace; its start and its predictor of step times are left out (vidur_trace.py).
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
REPEATS = 5
VIDUR_DATE = "2023-08-21"
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
        writer.writerow(["Date", "Time", "PromptTokenCount", "CompletionTokenCount"])
        writer.writerows(
            (VIDUR_DATE, a.at_seconds, a.prompt_tokens, a.output_tokens) for a in arrivals
        )
    return len(arrivals)


def vidur(python: str, seconds: float) -> Row:
    """Measure Vidur.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "trace.csv"
        count = write_trace(trace, seconds)
        script = Path(__file__).with_name("vidur_trace.py")
        command = [python, str(script), str(trace), str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    spent = float(done.stdout.split()[-1])
    note = f"{count} requests, six replicas, round robin, without its predictor"
    return Row(what="vidur", value=count / spent, unit="req/CPU-s", note=note)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0, help="of arrivals a run")
    parser.add_argument(
        "--vidur", default=os.environ.get("VIDUR_PYTHON", ""), help="a Python with Vidur"
    )
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at start")
    # Shared cores take time off whoever runs: the best of some runs says most about the code.
    rows = [
        max((simulated(policy, options.seconds) for _ in range(REPEATS)), key=lambda row: row.value)
        for policy in SCHEDULERS
    ]
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
