"""What a routed request costs beside other routers, on the same mock engines, in one run.

`make bench-peers`, or `python -m benchmarks.bench_peers [ROUTER…]`. Every router does prefill and decode in two steps before
2 prefill and 4 decode engines (`mock_engine.py`, one process). CPU time is the router process's own, user and system,
kernel TCP included; "agents" are Steelyard's own processes beside the engines, which the others do not have.

Routers: direct (no router: the load on a decode engine), steelyard, steelyard-coalesced (tokens may wait 100 ms in the agent to
travel together), vllm-router and smg, which are installed into environments of their own under .run/peers.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio
import uvloop
from steelyard.v1 import agent_pb2, agent_pb2_grpc, types_pb2

from dataplane.agent.byte_tokenizer import byte_tokenizer, byte_tokenizer_config
from localcluster.processes import environment
from servicekit.channel import open_channel
from servicekit.embedded_redis import EmbeddedRedis
from servicekit.redis_keys import SNAPSHOT
from servicekit.supervise import bound_to_parent

RUN = Path(".run/peers")
INTERVAL_MS, TOKENS = 20, 64
PREFILLS, DECODES = (19_001, 19_002), (19_011, 19_012, 19_013, 19_014)
ROUTER_PORT = 19_100
WARM_UP, REQUESTS, CONNECTIONS = 300, 3_000, 16
STREAMS, ROUNDS = 100, 3
LATENCY_REQUESTS = 400
PROMPT = "The quick brown fox jumps over the lazy dog. " * 2 + "Tell me more."
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Target:
    """A running router: where it is, and whose CPU time counts."""

    port: int
    pids: list[int]
    helper_pids: list[int] = field(default_factory=list)


@dataclass
class Measured:
    """One line of the table."""

    request_us: float
    token_us: float
    helper_request_us: float
    helper_token_us: float
    p50_us: float
    memory_mib: float


def body(*, stream: bool) -> bytes:
    """A completion of one token, or a stream."""
    tokens = TOKENS if stream else 1
    fields = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    return json.dumps(fields | ({"stream": True} if stream else {})).encode()


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: Any = None

    async def ask(self, content: bytes, ending: bytes) -> None:
        """Send a completion and read its answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(content)
        )
        writer.write(head + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer + await reader.read(500))
        if ending:
            await reader.readuntil(ending)
            return
        low = answer.lower()
        length = int(low.partition(b"content-length:")[2].split(b"\r\n")[0])
        await reader.readexactly(length)

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()


async def load(port: int, *, stream: bool, clients: int, each: int) -> list[float]:
    """Run requests on so many connections; returns each one's seconds."""
    content, ending = body(stream=stream), b"0\r\n\r\n" if stream else b""
    seconds: list[float] = []

    async def one() -> None:
        client = Client(port)
        for _ in range(each):
            started = time.perf_counter()
            await client.ask(content, ending)
            seconds.append(time.perf_counter() - started)
        client.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    return seconds


def cpu_us(pids: list[int]) -> float:
    """CPU time of processes, all threads, in microseconds."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / CLOCK_TICKS * 1e6


def memory_mib(pids: list[int]) -> float:
    """Resident memory of processes."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(target: Target) -> Measured:
    """Measure one router."""
    await load(target.port, stream=False, clients=CONNECTIONS, each=WARM_UP // CONNECTIONS)
    groups = (target.pids, target.helper_pids)
    before = [cpu_us(pids) for pids in groups]
    each = REQUESTS // CONNECTIONS
    await load(target.port, stream=False, clients=CONNECTIONS, each=each)
    middle = [cpu_us(pids) for pids in groups]
    requests = each * CONNECTIONS
    request_us = [(m - b) / requests for m, b in zip(middle, before, strict=True)]
    await load(target.port, stream=True, clients=STREAMS, each=ROUNDS)
    after = [cpu_us(pids) for pids in groups]
    streams = STREAMS * ROUNDS
    token_us = [
        (a - m - streams * r) / (streams * TOKENS)
        for a, m, r in zip(after, middle, request_us, strict=True)
    ]
    seconds = await load(target.port, stream=False, clients=1, each=LATENCY_REQUESTS)
    return Measured(
        request_us[0],
        token_us[0],
        request_us[1],
        token_us[1],
        statistics.median(seconds) * 1e6,
        memory_mib(target.pids),
    )


@contextlib.contextmanager
def child(name: str, command: list[str], **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the block ends; its output goes to a file."""
    RUN.mkdir(parents=True, exist_ok=True)
    with (RUN / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            bound_to_parent(command),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def answering(port: int, path: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until GET `path` is 200."""

    def get() -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1) as answer:
            return int(answer.status)

    async with asyncio.timeout(60):
        while True:
            assert process.poll() is None, f"{process.args} has ended"
            with contextlib.suppress(OSError):
                if await asyncio.to_thread(get) == 200:
                    return
            await asyncio.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for below in (task / "children").read_text().split():
            found += descendants(int(below))
    return found


@contextlib.asynccontextmanager
async def steelyard(coalesce_seconds: float):
    """A router with its gateway; an agent beside each engine; a snapshot instead of a control plane."""
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis())
        agents, infos = [], []
        ports = [("prefill", p) for p in PREFILLS] + [("decode", p) for p in DECODES]
        for index, (role, port) in enumerate(ports):
            listen = f"127.0.0.1:{ROUTER_PORT + 1 + index}"
            settings = {
                "role": role,
                "engine": "vllm",
                "instance_id": f"{role}-{port}",
                "vllm_url": f"http://127.0.0.1:{port}",
                "listen": listen,
                "log_level": "WARNING",
            }
            command = [sys.executable, "-m", "dataplane.agent.app"]
            variables = environment("STEELYARD_AGENT_", settings)
            agents.append(stack.enter_context(child(f"agent-{port}", command, **variables)))
            infos.append(await _engine_info(listen))
        roster = types_pb2.Roster()
        for info in infos:
            roster.instances.add(engine=info, state=types_pb2.INSTANCE_STATE_READY, scale=1.0)
        snapshot = types_pb2.ClusterSnapshot(
            sequence=1, roster_version=1, roster=roster.SerializeToString()
        )
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await client.set(SNAPSHOT, snapshot.SerializeToString())
        settings = {
            "redis_url": server.url,
            "listen": f"127.0.0.1:{ROUTER_PORT + 50}",
            "gateway_listen": f"127.0.0.1:{ROUTER_PORT}",
            "policy": "round_robin",
            "coalesce_seconds": coalesce_seconds,
            "stale_after_seconds": 1e9,
            "log_level": "WARNING",
        }
        variables = environment("STEELYARD_ROUTER_", settings)
        command = [sys.executable, "-m", "dataplane.router.app"]
        router = stack.enter_context(child("steelyard", command, **variables))
        await answering(ROUTER_PORT, "/health", router)
        helpers = [pid for agent in agents for pid in descendants(agent.pid)]
        yield Target(ROUTER_PORT, descendants(router.pid), helpers)


async def _engine_info(address: str) -> types_pb2.EngineInfo:
    async with open_channel(address) as channel:
        async with asyncio.timeout(30):
            await channel.channel_ready()
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        return (await stub.GetEngine(agent_pb2.GetEngineRequest())).engine


def installed(package: str) -> Path:
    """The folder of a router's commands, installed at first use."""
    folder = RUN / package
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "-qq", package], check=True)
        (folder / "done").touch()
    return folder / "bin"


@contextlib.asynccontextmanager
async def peer(package: str, command: list[str]):
    """Another project's router in P/D mode."""
    binaries = installed(package)
    arguments = [str(binaries / command[0]), *command[1:]]
    for port in PREFILLS:
        arguments += ["--prefill", f"http://127.0.0.1:{port}"]
    for port in DECODES:
        arguments += ["--decode", f"http://127.0.0.1:{port}"]
    with child(package, arguments) as process:
        await answering(ROUTER_PORT, "/health", process)
        await _served(ROUTER_PORT)
        yield Target(ROUTER_PORT, descendants(process.pid))


async def _served(port: int) -> None:
    """Wait until a request is answered: routers look at their engines before."""
    async with asyncio.timeout(30):
        while True:
            client = Client(port)
            try:
                await client.ask(body(stream=False), b"")
            except (RuntimeError, OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.3)
            else:
                return
            finally:
                client.close()


@contextlib.asynccontextmanager
async def direct():
    """No router at all: what load and engine take by themselves."""
    yield Target(DECODES[0], [])


def _peer_arguments(*more: str) -> list[str]:
    return ["--host", "127.0.0.1", "--port", str(ROUTER_PORT), "--policy", "round_robin", *more]


ROUTERS: dict[str, Callable[[], Any]] = {
    "direct": direct,
    "steelyard": lambda: steelyard(0.0),
    "steelyard-coalesced": lambda: steelyard(0.1),
    "vllm-router": lambda: peer(
        "vllm-router", ["vllm-router", *_peer_arguments("--vllm-pd-disaggregation")]
    ),
    "smg": lambda: peer("smg", ["smg", "launch", *_peer_arguments("--pd-disaggregation")]),
}


async def run(names: list[str]) -> None:
    """Measure and print."""
    folder = RUN / "model"
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(byte_tokenizer_config())
    (folder / "config.json").write_text('{"vocab_size": 262, "model_type": "llama"}')
    ports = [str(port) for port in (*PREFILLS, *DECODES)]
    command = [
        sys.executable, "-m", "benchmarks.mock_engine", str(folder.resolve()), str(INTERVAL_MS),
        str(TOKENS), *ports,
    ]  # fmt: skip
    print(
        "| router | CPU-µs / request | CPU-µs / token | agents: request, token | p50 at c=1, µs "
        "| added by it, µs | RSS, MiB |\n|--|--|--|--|--|--|--|"
    )
    base = 0.0
    with child("mock", command) as mock:
        await answering(DECODES[-1], "/health", mock)
        for name in names:
            async with ROUTERS[name]() as target:
                seen = await measure(target)
            base = seen.p50_us if name == "direct" else base
            print(
                f"| {name} | {seen.request_us:.0f} | {seen.token_us:.1f} "
                f"| {seen.helper_request_us:.0f}, {seen.helper_token_us:.1f} "
                f"| {seen.p50_us:.0f} | {seen.p50_us - base:.0f} | {seen.memory_mib:.0f} |",
                flush=True,
            )


def main() -> None:
    """Run the command line."""
    work: Awaitable[None] = run(sys.argv[1:] or list(ROUTERS))
    uvloop.run(work)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
