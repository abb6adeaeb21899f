"""Brings a cluster up part by part, each when the one before answers, and takes it down."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from steelyard.v1 import control_pb2, control_pb2_grpc, types_pb2

from localcluster.engines import VllmEngines, engine_url, vllm_python
from localcluster.errors import ClusterError
from localcluster.pace import paced_agent
from localcluster.pace_machine import prefer
from localcluster.ports import Ports
from localcluster.processes import PYTHON, Processes, environment
from localcluster.spec import ClusterSpec
from localcluster.timing import engine_time, stretched_intervals
from servicekit.channel import open_channel
from servicekit.embedded_redis import EmbeddedRedis, redis_cli
from servicekit.probe import probe
from servicekit.redis_client import connect, ping
from servicekit.settings import without_password

START_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclass(slots=True)
class Addresses:
    """Where everything is, once it is up."""

    redis_url: str = ""
    redis_cli: list[str] = field(default_factory=list)
    control: list[str] = field(default_factory=list)
    control_http: list[str] = field(default_factory=list)
    routers: list[str] = field(default_factory=list)
    routers_http: list[str] = field(default_factory=list)
    gateways: list[str] = field(default_factory=list)
    agents: dict[str, str] = field(default_factory=dict)
    solo_url: str = ""


def addresses_at(port_base: int) -> Addresses:
    """Return where a cluster of that port base, with a Redis of its own, is or would be."""
    ports = Ports(port_base)
    return Addresses(
        redis_cli=redis_cli(ports.number("redis")),
        control=[f"127.0.0.1:{ports.number('control')}"],
        control_http=[f"127.0.0.1:{ports.number('control_http')}"],
        routers=[f"127.0.0.1:{ports.number('router')}"],
        routers_http=[f"127.0.0.1:{ports.number('router_http')}"],
        gateways=[f"127.0.0.1:{ports.number('gateway')}"],
    )


class LocalCluster:
    """`async with LocalCluster(spec, on_line) as cluster:` runs until the block ends.

    Start it from the main thread: its processes end with the thread that started them.

    Args:
        spec: What it is made of.
        on_line: Called with (part, line) for everything that parts log.
    """

    def __init__(
        self, spec: ClusterSpec, on_line: Callable[[str, str], None] = lambda _name, _line: None
    ) -> None:
        self.spec = spec
        self.addresses = Addresses()
        self.processes = Processes(on_line)
        self.engines: VllmEngines | None = None
        self.redis: EmbeddedRedis | None = None
        self._ports = Ports(spec.port_base)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Bring everything up.

        Raises:
            ClusterError: A part does not come up; nothing is left behind.
            RedisUnavailable: The Redis of the spec does not answer.
        """
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take everything down."""
        await self._stack.aclose()

    async def _start(self) -> None:
        if self.spec.engine != "emulated":
            vllm_python(self.spec)
        self.spec.directory.mkdir(parents=True, exist_ok=True)
        await self._start_redis()
        self._stack.push_async_callback(self.processes.end_all)
        for index in range(self.spec.control_planes):
            await self.start_control(index)
        if self.spec.engine != "emulated":
            self.engines = VllmEngines(self.spec, self._ports, self.processes)
            await self.engines.start()
            self.addresses.solo_url = self.engines.solo_url
        for instance_id, role in self.spec.pools.names():
            await self.start_agent(instance_id, role)
        await self.wait_ready(len(self.spec.pools.names()))
        for index in range(self.spec.routers):
            await self.start_router(index)
        await self._wait_serving([*self.addresses.routers])

    async def _start_redis(self) -> None:
        if self.spec.redis_url:
            try:
                client = connect(self.spec.redis_url)
            except ValueError as error:
                raise ClusterError(str(error)) from error
            async with client:
                await ping(client, self.spec.redis_url)
            self.addresses.redis_url = self.spec.redis_url
            self.addresses.redis_cli = ["redis-cli", "-u", without_password(self.spec.redis_url)]
            return
        self.redis = EmbeddedRedis(port=self._ports.of("redis"), persist=True)
        self._stack.callback(self.redis.stop)
        self.redis.start()
        self.addresses.redis_url = self.redis.url
        self.addresses.redis_cli = redis_cli(self.redis.port)

    async def start_control(self, index: int) -> None:
        """Start one control plane, or start it again, and wait until it serves."""
        known = index < len(self.addresses.control)
        if not known:
            self.addresses.control.append(f"127.0.0.1:{self._ports.of('control', index)}")
            self.addresses.control_http.append(f"127.0.0.1:{self._ports.of('control_http', index)}")
        address = self.addresses.control[index]
        settings = {
            "listen": address,
            "http_listen": self.addresses.control_http[index],
            "redis_url": self.addresses.redis_url,
            "log_level": self.spec.log_level,
            "log_format": "console",
            **stretched_intervals(self.spec.time_scale),
            **self.spec.control_settings,
        }
        await self._launch(f"control-{index}", "controlplane.app", "CONTROLPLANE", settings)
        await self._wait_serving([address])

    async def start_agent(self, instance_id: str, role: str) -> None:
        """Start one agent, or start it again."""
        index = int(instance_id.rpartition("-")[2])
        old = self.addresses.agents.get(instance_id)
        address = old or f"127.0.0.1:{self._ports.of(role, index)}"
        settings: dict[str, Any] = {
            "instance_id": instance_id,
            "role": role,
            "engine": self.spec.engine,
            "listen": address,
            "control_planes": self.addresses.control,
            "log_level": self.spec.log_level,
            "log_format": "console",
            **engine_time(self.spec.time_scale),
            **({"time_scale": self.spec.time_scale} if self.engines is None else {}),
            **(paced_agent(self.spec) if self.spec.engine == "paced" else {}),
            **self.spec.agent_settings,
            **self.spec.instance_settings.get(instance_id, {}),
        }
        if self.engines is not None:
            settings["vllm_url"] = engine_url(self.engines.ports[instance_id])
        await self._launch(instance_id, "dataplane.agent.app", "AGENT", settings)
        self.addresses.agents[instance_id] = address

    async def start_router(self, index: int) -> None:
        """Start one router, or start it again."""
        known = index < len(self.addresses.routers)
        address = (
            self.addresses.routers[index]
            if known
            else f"127.0.0.1:{self._ports.of('router', index)}"
        )
        http = (
            self.addresses.routers_http[index]
            if known
            else f"127.0.0.1:{self._ports.of('router_http', index)}"
        )
        gateway = (
            self.addresses.gateways[index]
            if known
            else f"127.0.0.1:{self._ports.of('gateway', index)}"
        )
        settings = {
            "router_id": f"router-{index}",
            "listen": address,
            "http_listen": http,
            "gateway_listen": gateway,
            "redis_url": self.addresses.redis_url,
            "control_planes": self.addresses.control,
            "log_level": self.spec.log_level,
            "log_format": "console",
            **engine_time(self.spec.time_scale),
            **self.spec.router_settings,
        }
        await self._launch(f"router-{index}", "dataplane.router.app", "ROUTER", settings)
        if not known:
            self.addresses.routers.append(address)
            self.addresses.routers_http.append(http)
            self.addresses.gateways.append(gateway)

    async def wait_ready(self, count: int, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        """Wait until the control plane counts that many READY instances.

        Raises:
            ClusterError: It does not within the time, or a part has died.
        """
        ready = 0
        try:
            async with asyncio.timeout(timeout_seconds):
                async with open_channel(self.addresses.control[0]) as channel:
                    stub = control_pb2_grpc.ControlServiceStub(channel)
                    while True:
                        self.processes.check()
                        ready = await _count_ready(stub)
                        if ready >= count:
                            return
                        await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            raise ClusterError(
                f"{ready} of {count} instances were ready after {timeout_seconds:g} s"
            ) from error

    async def wait_serving(self) -> None:
        """Wait until all routers serve.

        Raises:
            ClusterError: One does not.
        """
        await self._wait_serving(self.addresses.routers)

    async def _wait_serving(self, addresses: list[str]) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_SECONDS):
                for address in addresses:
                    while await asyncio.to_thread(probe, address, "", 1.0) != "SERVING":
                        self.processes.check()
                        await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            raise ClusterError(f"{addresses} did not serve within a minute") from error

    async def _launch(self, name: str, module: str, prefix: str, settings: dict[str, Any]) -> None:
        variables = environment(f"STEELYARD_{prefix}_", settings)
        child = await self.processes.start(name, [PYTHON, "-m", module], variables)
        if self.spec.engine == "paced":
            prefer(child.process.pid)


async def _count_ready(stub: control_pb2_grpc.ControlServiceStub) -> int:
    try:
        stream = stub.WatchCluster(control_pb2.WatchClusterRequest(), timeout=5.0)
        async for message in stream:
            roster = types_pb2.Roster.FromString(message.snapshot.roster)
            stream.cancel()
            return sum(i.state == types_pb2.INSTANCE_STATE_READY for i in roster.instances)
    except grpc.aio.AioRpcError:
        return 0
    return 0
