"""A router with its gateway over emulated engines and a real Redis, all in one process."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import redis.asyncio
from steelyard.v1 import agent_pb2, agent_pb2_grpc

from dataplane.agent.app import AgentApp, RunningAgent
from dataplane.agent.settings import AgentSettings
from dataplane.gateway.app import Gateway
from dataplane.router.app import Router, RouterApp
from dataplane.router.settings import RouterSettings
from servicekit.channel import open_channel
from servicekit.redis_client import connect
from tests.support.snapshots import publish, roster, snapshot
from tests.support.waiting import eventually

MODEL = "tiny"


@dataclass
class GatewayCluster:
    """One running router and its agents, and an HTTP client of its gateway."""

    router: Router
    agents: list[RunningAgent]
    http: aiohttp.ClientSession
    redis: redis.asyncio.Redis
    url: str

    @property
    def gateway(self) -> Gateway:
        """The gateway."""
        assert self.router.gateway is not None
        return self.router.gateway

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Post a body; returns status, the answer's object, and its headers."""
        async with self.http.post(path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None), response.headers

    async def stream(self, path: str, body: Any, **headers: str) -> list[Any]:
        """Post a body and return all events; the last is the text "[DONE]"."""
        import msgspec

        async with self.http.post(path, json=body | {"stream": True}, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            data = await response.read()
        events = data.decode().removesuffix("\n\n").split("\n\n")
        assert all(event.startswith("data: ") for event in events)
        payloads = [event.removeprefix("data: ") for event in events]
        assert payloads[-1] == "[DONE]"
        return [msgspec.json.decode(p) for p in payloads[:-1]] + ["[DONE]"]

    def left(self) -> dict[str, Any]:
        """Return what is still kept of requests in router and agents; empty after all ended."""
        (driver,) = self.router.fleet
        found: dict[str, Any] = {
            "tickets": dict(driver.tickets),
            "ledger": list(driver.pool.ledger.request_ids()),
            "leases": len(self.router.board),
            "sessions": dict(self.router.front._sessions),
        }
        for running in self.agents:
            agent = running.agent
            found[f"{agent.identity.instance_id} books"] = agent.accounting.by_router()
        return {name: value for name, value in found.items() if value}

    async def settled(self) -> None:
        """Wait until nothing is left of any request."""

        async def clean() -> bool:
            for running in self.agents:
                await running.agent.load()
            return not self.left()

        try:
            await eventually(clean)
        except AssertionError:
            raise AssertionError(f"left of requests that have ended: {self.left()}") from None


@asynccontextmanager
async def gateway_cluster(
    redis_url: str, *, agent: dict[str, Any] | None = None, **router: Any
) -> AsyncIterator[GatewayCluster]:
    """Run one prefill and two decode agents, and a router with a gateway before them."""
    async with AsyncExitStack() as stack:
        agents = []
        for name, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode")):
            fields = {"time_scale": 20.0, "model": MODEL, "max_model_tokens": 2048} | (agent or {})
            settings = AgentSettings(instance_id=name, role=role, **fields)
            agents.append(await stack.enter_async_context(AgentApp(settings)))
        client = connect(redis_url)
        stack.push_async_callback(client.aclose)
        infos = []
        for running in agents:
            async with open_channel(running.server.address) as channel:
                stub = agent_pb2_grpc.AgentServiceStub(channel)
                infos.append((await stub.GetEngine(agent_pb2.GetEngineRequest())).engine)
        await publish(client, snapshot(roster(*infos)))
        values = {
            "policy": "least_loaded",
            "router_id": "router-0",
            "stale_after_seconds": 1e6,
            "gateway_listen": "127.0.0.1:0",
        }
        settings = RouterSettings.load(redis_url=redis_url, **values | router)
        running_router = await stack.enter_async_context(RouterApp(settings))
        await eventually(lambda: running_router.server.serving)
        assert running_router.gateway is not None
        url = f"http://{running_router.gateway.server.address}"
        http = await stack.enter_async_context(aiohttp.ClientSession(url))
        yield GatewayCluster(running_router, agents, http, client, url)
