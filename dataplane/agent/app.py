"""Constructs an agent and runs it: `python -m dataplane.agent.app [--print-config]`."""

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random

import structlog
import uvloop
from steelyard.v1 import agent_pb2, agent_pb2_grpc

from dataplane.agent.accounting import Accounting
from dataplane.agent.agent import Agent, Identity
from dataplane.agent.emulated_factory import emulated_engine
from dataplane.agent.engine import Engine
from dataplane.agent.metrics import AgentCollector
from dataplane.agent.service import AgentService
from dataplane.agent.settings import AgentSettings
from dataplane.agent.telemetry import Telemetry, TelemetryOptions
from dataplane.agent.vllm_factory import start_vllm
from servicekit.clock import Clock, SystemClock, clock_at
from servicekit.command import Service, service_main
from servicekit.metrics import new_registry
from servicekit.server import RpcServer, ServiceBinding
from servicekit.signals import serve_until, stop_on_signals

_WATCH_SECONDS = 0.5
_LEAVE_SECONDS = 1.0
_SERVICE = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name


@dataclass(frozen=True, slots=True)
class RunningAgent:
    """A running agent's parts that others may want to look at."""

    server: RpcServer
    agent: Agent
    telemetry: Telemetry


class AgentApp:
    """One agent: `async with AgentApp(settings) as running:` serves until the block ends."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        clock: Clock | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        """Prepare.

        Args:
            settings: What it is told.
            clock: Real time by default.
            stop: Set where one of its loops crashed: it is of no use without.
        """
        self._settings = settings
        self._clock = clock or clock_at(settings.clock_rate)
        self._stop = stop or asyncio.Event()
        self.failure: BaseException | None = None
        self._registry = new_registry()
        self._stack = AsyncExitStack()
        self._log = structlog.get_logger("dataplane.agent")

    async def __aenter__(self) -> RunningAgent:
        """Construct everything, start serving, and return the parts."""
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Leave the cluster, stop serving, end the engine."""
        await self._stack.aclose()

    async def _start(self) -> RunningAgent:
        settings, clock = self._settings, self._clock
        engine = await self._engine()
        changed = asyncio.Event()
        agent = Agent(
            engine,
            Identity(instance_id=settings.instance_id, role=settings.role, address=""),
            await engine.describe(),
            clock=clock,
            accounting=Accounting(changed.set),
            handoff_margin_seconds=settings.handoff_margin_seconds,
        )
        stopping = asyncio.Event()
        service = AgentService(
            agent,
            clock,
            stopping=stopping,
            observed=lambda method, handler: server.observed(_SERVICE, method, handler),
        )
        server = self._server(service, stopping)
        await server.start()
        self._stack.push_async_callback(agent.close)
        self._stack.push_async_callback(server.stop)
        address = settings.advertised_address or server.address
        instance_id = settings.instance_id or f"{settings.role.value}-{address}"
        agent.identity = Identity(instance_id=instance_id, role=settings.role, address=address)
        telemetry = Telemetry(
            agent,
            TelemetryOptions(
                addresses=settings.control_planes,
                min_gap_seconds=settings.report_min_gap_seconds,
            ),
            clock=clock,
            rng=Random(instance_id),
            changed=changed,
        )
        self._registry.register(AgentCollector(agent, telemetry))
        self._background("watch", _watch(agent, server, clock))
        await server.set_serving(serving=True)
        self._report(telemetry)
        self._log.info(
            "agent_started",
            instance_id=instance_id,
            address=address,
            epoch=agent.description.epoch,
            engine=agent.description.engine_kind,
            model=agent.description.model,
        )
        return RunningAgent(server, agent, telemetry)

    async def _engine(self) -> Engine:
        if self._settings.engine == "vllm":
            return await start_vllm(self._settings, self._clock, self._stack)
        # Its own time scale makes its steps shorter or longer: it needs the machine's time.
        engine = emulated_engine(self._settings, SystemClock())
        self._stack.push_async_callback(engine.close)
        await engine.start()
        return engine

    def _server(self, service: AgentService, stopping: asyncio.Event) -> RpcServer:
        add = agent_pb2_grpc.add_AgentServiceServicer_to_server
        return RpcServer(
            self._settings.server_options(),
            services=[ServiceBinding.of(agent_pb2, "AgentService", add, service)],
            registry=self._registry,
            clock=self._clock,
            stopping=stopping,
        )

    def _report(self, telemetry: Telemetry) -> None:
        """Report until the agent stops; then say so, if a control plane still listens."""
        task = asyncio.create_task(telemetry.run(), name="telemetry")
        task.add_done_callback(self._report_crash)

        async def leave() -> None:
            telemetry.stop()
            await asyncio.wait([task], timeout=_LEAVE_SECONDS)
            task.cancel()
            await asyncio.wait([task])

        self._stack.push_async_callback(leave)

    def _background(self, name: str, work: Coroutine[None, None, None]) -> None:
        """Run something until the agent stops."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._report_crash)

        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])

        self._stack.push_async_callback(end)

    def _report_crash(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.critical("task_crashed", task=task.get_name(), exc_info=error)
            self.failure = error
            self._stop.set()


async def _watch(agent: Agent, server: RpcServer, clock: Clock) -> None:
    """Keep health in step with the engine, with or without a control plane."""
    while True:
        await clock.sleep(_WATCH_SECONDS)
        healthy = (await agent.load()).measure.healthy
        if healthy != server.serving:
            await server.set_serving(serving=healthy)


async def run(settings: AgentSettings) -> None:
    """Serve until SIGTERM or SIGINT, which also end the wait for an engine that starts.

    Raises:
        OSError: An address is taken.
        SettingsInvalid: Settings do not fit together.
        EngineNotStarted: The engine does not answer.
        Exception: Whatever ended one of the agent's loops; that is a bug.
    """
    stop = asyncio.Event()
    with stop_on_signals(stop):
        app = AgentApp(settings, stop=stop)
        await serve_until(stop, app)
    if app.failure is not None:
        raise app.failure


# An agent reads a socket for every token of every stream, which uvloop does for less.
SERVICE = Service(AgentSettings, run, uvloop.run)


def main(arguments: Sequence[str]) -> int:
    """Run an agent, or print its settings; returns the exit code."""
    return service_main(SERVICE, print_config="--print-config" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
