"""What HTTP stacks cost a gateway: CPU-µs a request and a streamed event, on one machine in one run.

`python -m benchmarks.http_stacks`. Every server answers POST / with a small JSON object, and POST /stream
with 64 server-sent events, one a tick of 10 ms that all streams share, so that what is measured is the
stack and not the source. CPU time is the server process's own, user and system, kernel TCP included.
"""

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httptools
import uvicorn
import uvloop
from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

EVENTS = 64
TICK_SECONDS = 0.01
REQUESTS, CONNECTIONS, STREAMS = 8_000, 16, 100
ANSWER = b'{"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"text":" tok"}]}'
EVENT = b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,"model":"m","choices":[{"index":0,"text":" tok","logprobs":null,"finish_reason":null}]}\n\n'
BODY = b'{"model":"m","prompt":"The quick brown fox jumps over the lazy dog.","max_tokens":64}'


class Ticker:
    """Wakes every stream once a tick."""

    def __init__(self) -> None:
        self.waiters: list[asyncio.Future[None]] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def tick(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        await waiter


async def serve_httptools(bound: socket.socket, ticker: Ticker) -> None:  # noqa: C901
    """httptools on an asyncio protocol, nothing else."""

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            self.parser = httptools.HttpRequestParser(self)
            self.body = b""
            self.url = b""

        def data_received(self, data: bytes) -> None:
            self.parser.feed_data(data)

        def on_message_begin(self) -> None:
            self.url, self.body, self.headers = b"", b"", []

        def on_url(self, url: bytes) -> None:
            self.url += url

        def on_header(self, name: bytes, value: bytes) -> None:
            self.headers.append((name, value))

        def on_body(self, body: bytes) -> None:
            self.body += body

        def on_message_complete(self) -> None:
            self.task = asyncio.get_running_loop().create_task(self.answer())

        async def answer(self) -> None:
            write = self.transport.write
            if self.url == b"/":
                write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(ANSWER), ANSWER)
                )
                return
            write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            for _ in range(EVENTS):
                await ticker.tick()
                write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            write(b"0\r\n\r\n")

    server = await asyncio.get_running_loop().create_server(Connection, sock=bound)
    await server.serve_forever()


async def serve_uvicorn(bound: socket.socket, app: Any) -> None:
    """Any ASGI application under uvicorn."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", http="httptools"
    )
    await uvicorn.Server(config).serve(sockets=[bound])


def asgi_app(ticker: Ticker) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        kind = b"application/json" if scope["path"] == "/" else b"text/event-stream"
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        if scope["path"] == "/":
            start["headers"].append((b"content-length", b"%d" % len(ANSWER)))
            await send(start)
            await send({"type": "http.response.body", "body": ANSWER})
            return
        await send(start)
        for _ in range(EVENTS):
            await ticker.tick()
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


def starlette_app(ticker: Ticker) -> Any:
    async def unary(request: Request) -> Response:
        await request.body()
        return Response(ANSWER, media_type="application/json")

    async def stream(request: Request) -> Response:
        await request.body()

        async def events() -> Any:
            for _ in range(EVENTS):
                await ticker.tick()
                yield EVENT

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(
        routes=[Route("/", unary, methods=["POST"]), Route("/stream", stream, methods=["POST"])]
    )


async def serve_aiohttp(bound: socket.socket, ticker: Ticker) -> None:
    """aiohttp.web."""

    async def unary(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=ANSWER, content_type="application/json")

    async def stream(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(EVENTS):
            await ticker.tick()
            await response.write(EVENT)
        await response.write_eof()
        return response

    app = web.Application()
    app.add_routes([web.post("/", unary), web.post("/stream", stream)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, bound).start()
    await asyncio.Event().wait()


SERVERS: dict[str, Callable[[socket.socket, Ticker], Any]] = {
    "httptools": serve_httptools,
    "uvicorn": lambda bound, ticker: serve_uvicorn(bound, asgi_app(ticker)),
    "starlette": lambda bound, ticker: serve_uvicorn(bound, starlette_app(ticker)),
    "aiohttp": serve_aiohttp,
}


def serve(name: str, loop: str, descriptor: int) -> None:
    """Run one server on a bound socket until it is killed."""
    bound = socket.socket(fileno=descriptor)

    async def run() -> None:
        ticker = Ticker()
        task = asyncio.create_task(ticker.run())
        await SERVERS[name](bound, ticker)
        del task

    if loop == "uvloop":
        uvloop.run(run())
    else:
        asyncio.run(run())


async def _requests(port: int, path: str, count: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    for _ in range(count):
        writer.write(head.encode() + BODY)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b"chunked" in answer:
            await reader.readuntil(b"0\r\n\r\n")
        else:
            await reader.readexactly(len(ANSWER))
    writer.close()


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(name: str, loop: str) -> tuple[float, float]:
    """Return CPU-µs a request and an event."""
    bound = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = bound.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.http_stacks", name, loop, str(bound.fileno())]
    process = subprocess.Popen(command, pass_fds=[bound.fileno()])  # noqa: ASYNC220
    try:
        await _requests(port, "/", 200)
        before = cpu_seconds(process.pid)
        await asyncio.gather(
            *(_requests(port, "/", REQUESTS // CONNECTIONS) for _ in range(CONNECTIONS))
        )
        middle = cpu_seconds(process.pid)
        rounds = 4
        await asyncio.gather(*(_requests(port, "/stream", rounds) for _ in range(STREAMS)))
        after = cpu_seconds(process.pid)
    finally:
        process.kill()
        process.wait()
        bound.close()
    unary = (middle - before) / REQUESTS * 1e6
    streams = STREAMS * rounds
    return unary, ((after - middle) * 1e6 - streams * unary) / (streams * EVENTS)


def main() -> None:
    """Measure everything and print a table."""
    if len(sys.argv) > 3:
        serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    started = time.monotonic()
    print("| stack | loop | CPU-µs / request | CPU-µs / event |\n|--|--|--|--|")
    for name in SERVERS:
        for loop in ("asyncio", "uvloop"):
            unary, event = asyncio.run(measure(name, loop))
            print(f"| {name} | {loop} | {unary:.0f} | {event:.1f} |", flush=True)
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
