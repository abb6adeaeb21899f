"""Runs the benchmarks of serving and prints each number beside its aim.

Usage: python -m benchmarks.run [--json FILE]
"""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import bench_router, bench_snapshot
from benchmarks.rows import Row, show


def main() -> None:
    """Run everything."""
    load = os.getloadavg()[0]
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load {load:.1f} at start"
    )
    rows: list[Row] = []
    for title, measured in (
        ("State", bench_snapshot.measure),
        ("Router process", lambda: asyncio.run(bench_router.measure())),
    ):
        part = measured()
        show(title, part)
        rows += part
    if sys.argv[1:2] == ["--json"]:
        document = [dataclasses.asdict(row) for row in rows]
        Path(sys.argv[2]).write_text(json.dumps(document, indent=2))
    if Path("benchmarks/bench_decision.py").exists():
        subprocess.run([sys.executable, "-m", "benchmarks.bench_decision"], check=True)


if __name__ == "__main__":
    main()
