"""Calibrate a cluster of its own, then compare predicted with measured TTFT on fresh requests.

python -m benchmarks.bench_calibration --engine vllm --budget 150 --parallel 1 --requests 200
python -m benchmarks.bench_calibration --engine emulated --budget 300
python -m benchmarks.bench_calibration --engine paced --pools 1P2D --dilation 2 --parallel 1 --budget 180

On paced engines the truth is known, and no emulation of ours is in the way of it: real vLLM takes as
long as its profile says. Their budget, too, is real seconds.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from steelyard.v1 import router_pb2, router_pb2_grpc

from benchmarks.paced_calls import call_seconds
from calibrator.app import Calibration, Options
from calibrator.campaign import Plan
from calibrator.display import Display
from calibrator.errors import CalibrationError
from calibrator.publish import Rules
from enginemodel.profiles import PROFILES, REFERENCE
from localcluster.cluster import LocalCluster
from localcluster.pace_machine import MachineWatch
from localcluster.pace_records import read_validity
from localcluster.spec import ClusterSpec, Pools
from servicekit import redis_keys
from servicekit.channel import open_channel
from servicekit.clock import Clock, clock_at
from servicekit.redis_client import connect

CALL_TOKENS = (32, 512, 1500)
NOISE = {"jitter_sigma": 0.05, "stall_probability": 0.01, "stall_seconds": 0.02}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("emulated", "vllm", "paced"), default="emulated")
    parser.add_argument("--profile", default=REFERENCE.name, help="of paced engines")
    parser.add_argument("--dilation", type=float, default=2.0, help="of paced engines")
    parser.add_argument("--pools", default="2P4D")
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--gap", type=float, default=0.1, help="mean seconds between requests")
    parser.add_argument("--longest", type=int, default=1500, help="longest fresh prompt, tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/calibration"))
    return parser.parse_args()


async def fresh_requests(
    address: str, args: argparse.Namespace, vocab_size: int, clock: Clock
) -> None:
    """Send requests of log-uniform prompts, Poisson in time."""
    rng = random.Random(args.seed + 1)
    async with open_channel(address) as channel, asyncio.TaskGroup() as group:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        for _ in range(args.requests):
            tokens = round(2 ** rng.uniform(3, (args.longest).bit_length() - 0.5))
            request = router_pb2.GenerateRequest(max_tokens=16)
            request.token_ids.ids.extend(
                rng.randrange(10, vocab_size) for _ in range(min(tokens, args.longest))
            )
            request.sampling.temperature = 0.0
            request.sampling.ignore_eos = True
            group.create_task(drain(stub, request))
            await clock.sleep(rng.expovariate(1 / args.gap))


async def drain(
    stub: router_pb2_grpc.RouterServiceStub, request: router_pb2.GenerateRequest
) -> None:
    async for _ in stub.Generate(request):
        pass


async def ratios(redis_url: str, count: int) -> tuple[list[float], set[str]]:
    """Read predicted over measured TTFT of the last requests, and the versions that priced them."""
    if count == 0:
        return [], set()
    await asyncio.sleep(1.5)  # the last outcomes are under way
    async with connect(redis_url) as client:
        rows = await client.xrevrange(redis_keys.OUTCOMES, count=count)
    found = [
        float(row[b"predicted_ttft_seconds"]) / float(row[b"ttft_seconds"])
        for _, row in rows
        if row.get(b"predicted_ttft_seconds") and row.get(b"ttft_seconds")
    ]
    return found, {row[b"constants_version"].decode() for _, row in rows}


def summary(values: list[float]) -> str:
    if not values:
        return "no request was sent"
    ordered = sorted(values)
    at = [ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9)]
    errors = sorted(abs(value - 1) for value in values)
    middle, tail = errors[len(errors) // 2], errors[int(0.9 * (len(errors) - 1))]
    return (
        f"n={len(values)} ratio P10 {at[0]:.2f} P50 {at[1]:.2f} P90 {at[2]:.2f}; "
        f"|error| P50 {middle:.1%} P90 {tail:.1%}"
    )


async def main() -> None:
    args = arguments()
    paced = args.engine == "paced"
    time_scale = 1.0 / args.dilation if paced else 1.0
    spec = ClusterSpec(
        engine=args.engine,
        pools=Pools.parse(args.pools),
        directory=Path(tempfile.mkdtemp()),
        log_level="ERROR",
        time_scale=time_scale,
        profile=args.profile,
        agent_settings=dict(NOISE) if args.engine == "emulated" else {},
    )
    clock = clock_at(time_scale)
    async with LocalCluster(spec) as cluster, MachineWatch() as watch:
        began_unix = time.time()
        vocab_size = 384 if args.engine == "emulated" else 262
        router = cluster.addresses.routers[0]
        await fresh_requests(router, args, vocab_size, clock)
        before, _ = await ratios(cluster.addresses.redis_url, args.requests)
        print("before calibration (reference profile):", summary(before))
        await calibrate(cluster.addresses.control[0], args, clock)
        await asyncio.sleep(1.0)  # a router takes a new version over within a second
        await fresh_requests(router, args, vocab_size, clock)
        after, versions = await ratios(cluster.addresses.redis_url, args.requests)
        print("after calibration:", summary(after), "priced by versions", sorted(versions))
        document = json.loads((args.out / "result.json").read_text())
        show(document)
        if paced:
            profile = PROFILES[args.profile]
            calls = await call_seconds(cluster.addresses.control[0], profile, clock, CALL_TOKENS)
            show_without_calls(document, calls)
            load = await watch.so_far()
            print(read_validity(spec.directory, began_unix, time.time(), load).text())


async def calibrate(control_plane: str, args: argparse.Namespace, clock: Clock) -> None:
    """Calibrate, and force the publication of what was refused."""
    budget_seconds = args.budget / args.dilation if args.engine == "paced" else args.budget
    options = Options(
        control_plane=control_plane,
        plan=Plan(
            budget_seconds=budget_seconds,
            seed=args.seed,
            parallel=args.parallel,
            rules=Rules(accept_jump=True),
        ),
        json_path=args.out / "result.json",
        report_directory=args.out,
    )
    try:
        with Display(Console(width=200)) as display:
            result = await Calibration(options, display, clock).run()
        print(result.message)
    except CalibrationError as error:
        print(error)
        forced = replace(options, json_path=args.out / "forced.json", force=True)
        with Display(Console(quiet=True)) as display:
            await Calibration(forced, display, clock).run()


def show_without_calls(document: dict, calls: dict[int, float]) -> None:
    """Print the constants that hold a call's own time, without what the calibration found it to be.

    A prefill that runs alone is seen with its call around it, in p0 and p1 alike; so is a pull, in
    h0.
    """
    listed = ", ".join(f"{tokens} tokens {value * 1e3:.2f} ms" for tokens, value in calls.items())
    call = document["fit"]["prefill"]["call_seconds"]
    print(f"a call was found to add {call * 1e3:.2f} ms of engine time; measured apart: {listed}")
    known = PROFILES[document["profile"]].constants
    for name in ("p0_seconds", "p1_seconds", "h0_seconds"):
        value = document["constants"][name] - call
        print(f"{name} without its call: {value:.4g}  {value / getattr(known, name) - 1:+.1%} off")


def show(document: dict) -> None:
    """Print what was found against what is known, where it is."""
    known = PROFILES.get(document.get("profile", ""))
    print(f"{document['elapsed_seconds']:.1f} s of {document['budget_seconds']:.0f} s")
    for name, value in document["constants"].items():
        if not name.endswith("_stderr"):
            error = document["constants"][f"{name}_stderr"]
            true = f"  {value / getattr(known.constants, name) - 1:+.1%} off" if known else ""
            print(f"{name:32} {value:.4g} ± {error / value if value else 0:.1%}{true}")
    for part, held in document["heldout"].items():
        print(
            f"held out, {part}: median {held['median']:.1%}, P90 {held['p90']:.1%}, n={held['count']}"
        )


if __name__ == "__main__":
    asyncio.run(main())
