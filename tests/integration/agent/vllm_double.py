"""A small HTTP server with vLLM's answers, for what a real one does only when it breaks."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from dataplane.agent.engine_vllm import EngineVllm
from dataplane.agent.http_client import HttpClient
from dataplane.agent.vllm_describe import Fallbacks
from dataplane.agent.vllm_http import VllmHttp
from servicekit.clock import SystemClock

HANDOFF = {
    "remote_engine_id": "boot-1",
    "remote_block_ids": [[4, 5]],
    "remote_num_tokens": 200,
    "remote_port": 5601,
}


class VllmDouble:
    """Answers as it is told; keeps the bodies it got."""

    def __init__(self) -> None:
        self.start_time = "1.5e+09"
        self.engine_id = "boot-1"
        self.dev_mode = True
        self.bodies: list[dict] = []
        self.events: list[str] = []
        self.break_stream = False
        self.refuse_with = 400
        self.handoff: dict | None = HANDOFF

    def application(self) -> web.Application:
        """The server's routes."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "root": "", "max_model_len": 2048}]})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text=f"process_start_time_seconds {self.start_time}\n"
            'vllm:num_requests_running{engine="0"} 2.0\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
            'vllm:cache_config_info{block_size="128",kv_cache_size_tokens="65536"} 1.0\n'
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        if not self.dev_mode:
            raise web.HTTPNotFound
        transfer = {"kv_connector": "NixlConnector", "engine_id": self.engine_id}
        return web.json_response({"vllm_config": {"kv_transfer_config": transfer}})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["max_tokens"] > 2048:
            error = {"error": {"message": "too long", "param": "max_tokens"}}
            return web.json_response(error, status=self.refuse_with)
        if not body.get("stream"):
            usage = {"prompt_tokens": len(body["prompt"])}
            answer = {"choices": [], "usage": usage, "kv_transfer_params": self.handoff}
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            await response.write(f"data: {event}\n\n".encode())
        if self.break_stream:
            assert request.transport is not None
            request.transport.abort()
        return response


def event(**choice: object) -> str:
    """One event of a stream."""
    return json.dumps({"choices": [choice]})


@asynccontextmanager
async def serving(double: VllmDouble, port: int = 0) -> AsyncIterator[int]:
    """Serve it; yields the port."""
    runner = web.AppRunner(double.application(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def engine_at(port: int) -> AsyncIterator[EngineVllm]:
    """An engine that speaks to it."""
    engine = EngineVllm(
        VllmHttp(HttpClient(f"http://127.0.0.1:{port}")),
        SystemClock(),
        fallbacks=Fallbacks(
            dtype="auto", max_num_seqs=8, max_batched_tokens=512, lease_seconds=30.0, profile=""
        ),
        metrics_interval_seconds=0.02,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
