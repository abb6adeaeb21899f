"""A control plane on a real Redis and agents with emulated engines, in this process, over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from typing import Any, Self

from rich.console import Console

from calibrator.app import Calibration, Options
from calibrator.campaign import Plan
from calibrator.cluster import ready_targets
from calibrator.control import ControlClient
from calibrator.display import Display
from calibrator.errors import NoReadyInstance
from calibrator.publish import Rules
from calibrator.result import CalibrationResult
from controlplane.app import ControlPlane
from controlplane.settings import ControlPlaneSettings
from dataplane.agent.app import AgentApp, RunningAgent
from dataplane.agent.settings import AgentSettings
from servicekit.channel import open_channel
from servicekit.clock import SystemClock
from tests.support.waiting import eventually


class EmulatedPool:
    """`async with EmulatedPool(redis_url, {"p0": {"role": "prefill"}, …}) as pool:` is READY."""

    def __init__(self, redis_url: str, engines: dict[str, dict[str, Any]]) -> None:
        self._redis_url = redis_url
        self._engines = engines
        self._stack = AsyncExitStack()
        self.agents: dict[str, RunningAgent] = {}
        self._stacks: dict[str, AsyncExitStack] = {}

    async def __aenter__(self) -> Self:
        self.control = ControlPlane(
            ControlPlaneSettings.load(
                listen="127.0.0.1:0", http_listen="127.0.0.1:0", redis_url=self._redis_url
            )
        )
        await self.control.start()
        self._stack.push_async_callback(self.control.stop)
        await eventually(lambda: self.control.server.serving)
        for name, settings in self._engines.items():
            await self.start(name, **settings)
        await self.until_ready(len(self._engines))
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in list(self._stacks):
            await self.stop(name)
        await self._stack.aclose()

    @property
    def address(self) -> str:
        """host:port of the control plane."""
        return self.control.server.address

    async def start(self, name: str, **settings: Any) -> None:
        """Start an agent with its engine."""
        stack = self._stacks[name] = AsyncExitStack()
        loaded = AgentSettings.load(
            instance_id=name,
            listen="127.0.0.1:0",
            http_listen=None,
            control_planes=[self.address],
            profile="a40-qwen2.5-3b",
            drain_grace_seconds=0.0,
            **settings,
        )
        self.agents[name] = await stack.enter_async_context(AgentApp(loaded))

    async def stop(self, name: str) -> None:
        """Stop an agent with its engine; calls under way break off."""
        await self._stacks.pop(name).aclose()
        del self.agents[name]

    def control_client(self) -> AbstractAsyncContextManager[ControlClient]:
        """Open a client of the control plane."""

        @asynccontextmanager
        async def open_client() -> AsyncIterator[ControlClient]:
            async with open_channel(self.address) as channel:
                yield ControlClient(self.address, channel)

        return open_client()

    async def until_ready(self, count: int) -> None:
        """Wait until the control plane knows `count` READY instances."""
        if count == 0:
            return
        async with self.control_client() as client, asyncio.timeout(30):
            while True:
                with suppress(NoReadyInstance):
                    if len(ready_targets((await client.roster()).instances)) == count:
                        return
                await asyncio.sleep(0.05)

    def probing(self, name: str = "") -> bool:
        """Return whether a probe runs now, on any agent or on one of them."""
        agents = [self.agents[name]] if name else self.agents.values()
        return any(
            counts.router_id == "" for a in agents for counts in a.agent.accounting.by_router()
        )

    def calibration(self, budget_seconds: float, **options: Any) -> Calibration:
        """Return a calibration of this cluster that is not running yet."""
        plan = {
            "seed": 1,
            "parallel": 8,
            "rules": Rules(accept_jump=True),
        } | options.pop("plan", {})
        display = Display(Console(quiet=True))
        made = Options(
            control_plane=self.address,
            plan=Plan(budget_seconds=budget_seconds, **plan),
            **options,
        )
        return Calibration(made, display, SystemClock())

    async def calibrate(self, budget_seconds: float, **options: Any) -> CalibrationResult:
        """Calibrate this cluster."""
        return await self.calibration(budget_seconds, **options).run()

    async def idle(self) -> bool:
        """Return whether no engine runs, queues or holds anything."""
        for running in self.agents.values():
            load = await running.agent.load()
            measure = load.measure
            if measure.running or measure.waiting or measure.kv_used_tokens:
                return False
        return True
