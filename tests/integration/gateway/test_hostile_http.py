"""Clients that mean harm or know no better: right status, connection closed where due, nothing left."""

import asyncio
import json
import socket

import pytest
import pytest_asyncio

from dataplane.gateway.connection import Connections
from dataplane.gateway.exchange import Exchange
from dataplane.gateway.server import HttpServer
from dataplane.gateway.values import HttpLimits
from servicekit.clock import Clock, SystemClock
from tests.support.waiting import eventually

BODY = b'{"a": 1}'


class Turning(Clock):
    """A clock that tests turn on by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._system = SystemClock()

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return 1.8e9 + self.now

    async def sleep(self, seconds: float) -> None:
        await self._system.sleep(seconds)


class Site:
    """An HTTP server whose handler answers with what it got; /stream and /wait last until told."""

    def __init__(self, **limits) -> None:
        self.clock = Turning()
        self.seen = []
        self.cancelled = 0
        self.go = asyncio.Event()
        defaults = {"max_header_bytes": 4096, "max_body_bytes": 10_000}
        self.connections = Connections(self.handle, HttpLimits(**defaults | limits), self.clock)
        self.server = HttpServer("127.0.0.1:0", self.connections, SystemClock())

    async def handle(self, exchange: Exchange) -> None:
        request = exchange.request
        self.seen.append(request)
        try:
            if request.path == b"/wait":
                await self.go.wait()
            if request.path == b"/flood":
                exchange.stream()
                while True:
                    exchange.send(b"data: " + b"x" * 65_536 + b"\n\n")
                    await exchange.drain()
                    await asyncio.sleep(0)
            if request.path == b"/stream":
                exchange.stream()
                exchange.send(b"data: 1\n\n")
                await self.go.wait()
                exchange.finish(b"data: 2\n\n")
                return
            if request.path == b"/crash":
                raise RuntimeError("a bug")
            if request.path == b"/cut":
                exchange.stream()
                exchange.send(b"data: 1\n\n")
                return
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        body = {"path": request.path.decode(), "body": request.body.decode("latin-1")}
        exchange.respond(200, json.dumps(body).encode())


@pytest_asyncio.fixture(name="site")
async def _site():
    site = Site()
    await site.server.start()
    yield site
    await site.server.stop(0.0)
    assert not site.connections.open


async def talk(site: Site, *pieces: bytes) -> bytes:
    """Send pieces, each in its own packet, and read until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    return answer


def post(*headers: bytes, body: bytes = b"", path: bytes = b"/") -> bytes:
    """A POST with a host and these header lines."""
    lines = [b"POST " + path + b" HTTP/1.1", b"host: x", *headers, b"", b""]
    return b"\r\n".join(lines) + body


LENGTH = b"content-length: 8"
CHUNKED = b"transfer-encoding: chunked"

SMUGGLING = {
    "both lengths": post(LENGTH, CHUNKED, body=b"0\r\n\r\n"),
    "both lengths, other order": post(CHUNKED, LENGTH, body=b"0\r\n\r\n"),
    "two lengths": post(LENGTH, LENGTH, body=BODY),
    "two different lengths": post(LENGTH, b"content-length: 9", body=BODY),
    "listed lengths": post(b"content-length: 8, 8", body=BODY),
    "signed length": post(b"content-length: +8", body=BODY),
    "hexadecimal length": post(b"content-length: 0x8", body=BODY),
    "huge length": post(b"content-length: 99999999999999999999", body=BODY),
    "folded header": post(b"a: b", b" c", LENGTH, body=BODY),
    "folded coding": post(b"transfer-encoding:", b" chunked", body=b"0\r\n\r\n"),
    "space before colon": post(b"content-length : 8", body=BODY),
    "coding identity": post(b"transfer-encoding: identity", body=BODY),
    "coding xchunked": post(b"transfer-encoding: xchunked", body=b"0\r\n\r\n"),
    "two codings": post(b"transfer-encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "coding twice": post(CHUNKED, b"transfer-encoding: identity", body=b"0\r\n\r\n"),
    "coding with vertical tab": post(b"transfer-encoding: \x0bchunked", body=b"0\r\n\r\n"),
    "bad chunk size": post(CHUNKED, body=b"zz\r\nabc\r\n0\r\n\r\n"),
    "negative chunk size": post(CHUNKED, body=b"-1\r\nabc\r\n0\r\n\r\n"),
    "overflowing chunk size": post(CHUNKED, body=b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n"),
    "chunk longer than said": post(CHUNKED, body=b"3\r\nabcd\r\n0\r\n\r\n"),
    "chunk with bare line feed": post(CHUNKED, body=b"3\nabc\n0\n\n"),
    "bare line feeds": b"POST / HTTP/1.1\nhost: x\ncontent-length: 0\n\n",
    "bare carriage return": post(b"a: b\rc: d", LENGTH, body=BODY),
    "zero byte in header": post(b"a: b\x00c", LENGTH, body=BODY),
    "empty header name": post(b": b", LENGTH, body=BODY),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(100),
    "noise": b"\x00\x01\x02\x03 hello\r\n\r\n",
}


@pytest.mark.asyncio
async def test_smuggling_tries_are_refused_and_hung_up_on(site):
    """Each gets 400 in the usual shape, the connection ends, and the handler sees none of it."""
    for name, data in SMUGGLING.items():
        follow = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
        answer = await talk(site, data + follow)

        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), (name, answer)
        assert b"connection: close" in head, name
        assert json.loads(body)["error"]["code"] == 400, name
    assert not site.seen


@pytest.mark.asyncio
async def test_requests_cut_into_bytes_are_read_whole(site):
    """The same request, one byte a packet, by length and in chunks, with extensions and trailers."""
    plain = post(LENGTH, b"connection: close", body=BODY)
    chunks = post(
        CHUNKED, b"connection: close", body=b'3;x=y\r\n{"a\r\n5\r\n": 1}\r\n0\r\nt: v\r\n\r\n'
    )
    for data in (plain, chunks):
        answer = await talk(site, *(data[i : i + 1] for i in range(len(data))))
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert site.seen[-1].body == BODY
        assert b"t" not in site.seen[-1].headers


@pytest.mark.asyncio
async def test_sizes_are_bounded(site):
    """Bodies: 413 by their length before they come, and by what has come; headers and target: 431."""
    announced = await talk(site, post(b"content-length: 10001"))
    assert announced.startswith(b"HTTP/1.1 413 ")
    chunked = await talk(site, post(CHUNKED), *[b"fff\r\n" + b"x" * 4095 + b"\r\n"] * 4)
    assert chunked.startswith(b"HTTP/1.1 413 ")
    framing = await talk(site, post(CHUNKED), *[b"1;" + b"e" * 16_000 + b"\r\nx\r\n"] * 8)
    assert framing.startswith(b"HTTP/1.1 413 ")
    for data in (
        post(b"a: " + b"b" * 5000),
        post(*[b"a%d: b" % i for i in range(1000)]),
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ):
        assert (await talk(site, data)).startswith(b"HTTP/1.1 431 ")
        assert (await talk(site, data[:4500])).startswith(b"HTTP/1.1 431 ")
    encoded = await talk(site, post(LENGTH, b"content-encoding: gzip", body=BODY))
    assert encoded.startswith(b"HTTP/1.1 415 ")
    assert not site.seen


@pytest.mark.asyncio
async def test_a_body_is_waited_for_with_100_continue(site):
    """A client that asks first is told to go on, and one whose body is too long is told so."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    writer.write(post(LENGTH, b"expect: 100-continue"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    answer = await talk(site, post(b"content-length: 99999", b"expect: 100-continue"))
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.asyncio
async def test_pipelined_requests_are_answered_in_order(site):
    """A slow first one holds the others back; too many end the connection after those before."""
    site.go.set()
    gets = b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(4))
    gets += b"GET /4 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = await talk(site, b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n" + gets)
    paths = [json.loads(line)["path"] for line in _bodies(answer)]
    assert paths == ["/wait", "/0", "/1", "/2", "/3", "/4"]
    site.go.clear()
    site.seen.clear()
    many = b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n" * 20
    asking = asyncio.create_task(talk(site, many))
    await eventually(lambda: site.seen)
    site.go.set()
    answer = await asking
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.count(b"HTTP/1.1 400 ") == 1
    assert len(site.seen) == 1


def _bodies(answer: bytes) -> list[bytes]:
    return [piece.split(b"\r\n\r\n")[1] for piece in answer.split(b"HTTP/1.1 200 OK")[1:]]


@pytest.mark.asyncio
async def test_who_sends_or_reads_too_slowly_is_let_go(site):
    """Half a request: 408 after its time. An idle connection: closed after its own, longer one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-le")
    await eventually(lambda: any(c.phase.value == "reading" for c in site.connections.open))
    await eventually(lambda: len(site.connections.open) == 2)
    site.clock.now += 31
    site.connections.sweep()
    assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
    await eventually(lambda: any(c.phase.value == "idle" for c in site.connections.open))
    site.clock.now += 100
    site.connections.sweep()
    assert await idle_reader.read() == b""
    writer.close()
    idle_writer.close()
    await eventually(lambda: not site.connections.open)


@pytest.mark.asyncio
async def test_a_client_that_does_not_read_stops_the_stream_and_is_let_go(site):
    """Writing waits for the reader, memory stays bounded, and after its time it is cut off."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.settimeout(0)
    await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", site.server.port))
    _, writer = await asyncio.open_connection(sock=small, limit=1024)
    writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
    (connection,) = await eventually(lambda: [c for c in site.connections.open if c._paused])
    assert connection._transport.get_write_buffer_size() < 1 << 20
    site.clock.now += 61
    site.connections.sweep()
    await eventually(lambda: site.cancelled == 1)
    writer.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [b"/wait", b"/stream"])
@pytest.mark.parametrize("how", ["reset", "close", "half"])
async def test_a_client_that_leaves_ends_its_request(site, path, how):
    """Reset, closed or half closed: the handler is cancelled at once."""
    _, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    await eventually(lambda: site.seen)
    if how == "reset":
        writer.transport.abort()
    elif how == "close":
        writer.close()
    else:
        writer.write_eof()
    await eventually(lambda: site.cancelled == 1)
    await eventually(lambda: not site.connections.open)
    writer.close()


@pytest.mark.asyncio
async def test_a_bug_is_500_and_a_stream_cut_short_does_not_look_whole(site):
    """A handler that raises answers 500; one that stops in mid stream ends the connection."""
    answer = await talk(site, b"GET /crash HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 500 ")
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    writer.write(b"GET /cut HTTP/1.1\r\nhost: x\r\n\r\n")
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()


@pytest.mark.asyncio
async def test_old_clients_get_no_chunks(site):
    """HTTP/1.0: a stream without chunks that the end of the connection ends; keep-alive if asked."""
    site.go.set()
    answer = await talk(site, b"GET /stream HTTP/1.0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"data: 1\n\ndata: 2\n\n"
    answer = await talk(
        site, b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\nGET /b HTTP/1.0\r\n\r\n"
    )
    assert [json.loads(body)["path"] for body in _bodies(answer)] == ["/a", "/b"]


@pytest.mark.asyncio
async def test_too_many_connections_are_answered_503():
    """Beyond the limit a connection is told to come back, and those before it go on."""
    site = Site(max_connections=3)
    await site.server.start()
    held = [await asyncio.open_connection("127.0.0.1", site.server.port) for _ in range(3)]
    await eventually(lambda: len(site.connections.open) == 3)
    answer = await talk(site)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in answer
    held[0][1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await held[0][0].readline()) == b"HTTP/1.1 200 OK\r\n"
    for _, writer in held:
        writer.close()
    await site.server.stop(0.0)


@pytest.mark.asyncio
async def test_stopping_lets_answers_end_within_the_grace(site):
    """No new connections, idle ones close, an answer under way is finished whole."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    idle, idle_writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"data: 1\n\n")
    stopping = asyncio.create_task(site.server.stop(5.0))
    assert await idle.read() == b""
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", site.server.port)
    site.go.set()
    rest = await reader.read()
    assert rest.endswith(b"data: 2\n\n\r\n0\r\n\r\n")
    await stopping
    writer.close()
    idle_writer.close()


@pytest.mark.asyncio
async def test_ten_thousand_idle_connections_cost_little_and_leave_nothing(site):
    """Ten thousand keep-alive connections are held, one among them is served, all are closed."""
    import resource

    count = 10_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * count + 200
    if hard < needed:
        count = (hard - 200) // 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, needed), hard))
    clients = []
    try:
        loop = asyncio.get_running_loop()
        for start in range(0, count, 500):
            batch = [socket.socket() for _ in range(min(500, count - start))]
            clients += batch
            for client in batch:
                client.settimeout(0)
            address = ("127.0.0.1", site.server.port)
            await asyncio.gather(*(loop.sock_connect(client, address) for client in batch))
        await eventually(lambda: len(site.connections.open) == count, within_seconds=30)
        for client in (clients[0], clients[-1]):
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await loop.sock_recv(client, 15)) == b"HTTP/1.1 200 OK"
        site.connections.sweep()
        assert len(site.connections.open) == count
        site.clock.now += 121
        site.connections.sweep()
        await eventually(lambda: not site.connections.open, within_seconds=30)
    finally:
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
