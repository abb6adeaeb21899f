"""What the router process spends: a Route call, a Generate request, a relayed token, memory.

The router is a process of its own over emulated engines at full speed; its CPU time is read from
the kernel before and after, so that client and engines do not count. Numbers include gRPC.
"""

import asyncio
import sys
from pathlib import Path

from steelyard.v1 import router_pb2, router_pb2_grpc

from benchmarks.rows import Row
from localcluster.cluster import LocalCluster
from localcluster.spec import ClusterSpec, Pools
from servicekit.channel import open_channel
from servicekit.ports import free_port
from servicekit.supervise import bound_to_parent

PROMPT_TOKENS = 100
Stub = router_pb2_grpc.RouterServiceStub


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, to the nanosecond."""
    return (
        sum(
            int((task / "schedstat").read_text().split()[0])
            for task in Path(f"/proc/{pid}/task").iterdir()
        )
        / 1e9
    )


def resident_megabytes(pid: int) -> float:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def request(tokens: int) -> router_pb2.GenerateRequest:
    """Make a request of a 100-token prompt."""
    message = router_pb2.GenerateRequest(max_tokens=tokens)
    message.token_ids.ids.extend([50] * PROMPT_TOKENS)
    message.sampling.ignore_eos = True
    return message


async def _drain(stub: Stub, message: router_pb2.GenerateRequest) -> int:
    messages = 0
    async for _ in stub.Generate(message):
        messages += 1
    return messages


async def _many(stub: Stub, message: router_pb2.GenerateRequest, count: int, width: int) -> int:
    gate = asyncio.Semaphore(width)

    async def one() -> int:
        async with gate:
            return await _drain(stub, message)

    return sum(await asyncio.gather(*(one() for _ in range(count))))


class Bench:
    """One cluster and the CPU time of its router."""

    def __init__(self, pid: int, stub: Stub) -> None:
        self.pid = pid
        self.stub = stub

    async def microseconds(self, tokens: int, count: int) -> tuple[float, float]:
        """Return router CPU-us a request, and messages a request, for `tokens` output tokens."""
        before = cpu_seconds(self.pid)
        messages = await _many(self.stub, request(tokens), count, 32)
        return (cpu_seconds(self.pid) - before) / count * 1e6, messages / count

    async def route(self, count: int) -> float:
        """Return router CPU-us a Route call."""
        message = router_pb2.RouteRequest(request=request(64))
        await self.stub.Route(message)
        before = cpu_seconds(self.pid)
        gate = asyncio.Semaphore(16)

        async def one() -> None:
            async with gate:
                await self.stub.Route(message)

        await asyncio.gather(*(one() for _ in range(count)))
        return (cpu_seconds(self.pid) - before) / count * 1e6


async def _serving(time_scale: float, coalesce_seconds: float) -> list[Row]:
    spec = ClusterSpec(
        pools=Pools(2, 4),
        agent_settings={"time_scale": time_scale},
        router_settings={"coalesce_seconds": coalesce_seconds},
        log_level="WARNING",
    )
    rows = []
    async with (
        LocalCluster(spec) as cluster,
        open_channel(cluster.addresses.routers[0]) as channel,
    ):
        bench = Bench(cluster.processes["router-0"].process.pid, Stub(channel))
        await bench.microseconds(1, 100)
        name = f"coalesced {coalesce_seconds * 1e3:g} ms" if coalesce_seconds else "uncoalesced"
        if not coalesce_seconds:
            rows.append(
                Row(what="Route call", value=await bench.route(2000), unit="CPU-us", aim=200.0)
            )
        short, _ = await bench.microseconds(1, 600)
        long, messages = await bench.microseconds(129, 600)
        rows.append(Row(what=f"Generate request of 1 token, {name}", value=short, unit="CPU-us"))
        rows.append(
            Row(
                what=f"relayed token, {name}",
                value=(long - short) / 128,
                unit="CPU-us",
                aim=25.0 if coalesce_seconds else 47.0,
                note=f"{129 / messages:.1f} tokens a message",
            )
        )
    return rows


async def _floor() -> list[Row]:
    """Return what grpc.aio costs without anything in it."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *bound_to_parent([sys.executable, "-m", "benchmarks.grpc_floor", str(port)])
    )
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
            bench = Bench(process.pid, Stub(channel))
            await bench.microseconds(1, 200)
            route = await bench.route(2000)
            short, _ = await bench.microseconds(1, 600)
            long, _ = await bench.microseconds(129, 600)
    finally:
        process.kill()
        await process.wait()
    return [
        Row(what="bare grpc.aio: unary call", value=route, unit="CPU-us"),
        Row(what="bare grpc.aio: stream of 1 message", value=short, unit="CPU-us"),
        Row(what="bare grpc.aio: message sent", value=(long - short) / 128, unit="CPU-us"),
    ]


async def _memory() -> list[Row]:
    spec = ClusterSpec(
        pools=Pools(2, 4),
        agent_settings={"time_scale": 0.25, "kv_total_tokens": 1_000_000, "max_num_seqs": 1024},
        log_level="WARNING",
    )
    async with (
        LocalCluster(spec) as cluster,
        open_channel(cluster.addresses.routers[0]) as channel,
    ):
        stub = Stub(channel)
        pid = cluster.processes["router-0"].process.pid
        idle = resident_megabytes(pid)
        streaming = asyncio.Semaphore(0)

        async def one() -> None:
            async for _ in stub.Generate(request(4000)):
                streaming.release()

        tasks = [asyncio.create_task(one()) for _ in range(1000)]
        for _ in range(1000):
            await streaming.acquire()
        busy = resident_megabytes(pid)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    note = f"{idle:.0f} MB with none"
    return [
        Row(what="memory, 1,000 requests in flight", value=busy, unit="MB", aim=200.0, note=note)
    ]


async def measure() -> list[Row]:
    """Return all rows of the router process."""
    rows = await _floor()
    # Engines at five times their pace: steps of 2.5 ms, each a message unless tokens wait.
    rows += await _serving(5.0, 0.0)
    rows += await _serving(5.0, 0.01)
    return rows + await _memory()
