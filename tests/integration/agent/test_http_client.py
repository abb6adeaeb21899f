"""The agent's HTTP client: every framing, in any pieces; what breaks is an OSError; nothing leaks."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from dataplane.agent import http_client
from dataplane.agent.errors import EngineUnavailable
from dataplane.agent.http_client import HttpClient
from dataplane.agent.vllm_http import VllmHttp
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"
)


class Server:
    """Answers as its script says; counts connections and keeps requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = 0
        self.closed = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side ends it."""
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                await self.script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


@asynccontextmanager
async def asking(script: Script):
    """Yield a client and its server."""
    server = Server(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}/prefix/")
    try:
        yield client, server
    finally:
        await client.close()
        listening.close()
        await listening.wait_closed()
        await eventually(lambda: server.closed == server.connections)


def saying(*pieces: bytes, close: bool = False) -> Script:
    """Return a script that sends pieces, each by itself."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            raise ConnectionError

    return script


@pytest.mark.parametrize("answer", [SIZED, CHUNKED], ids=["sized", "chunked"])
async def test_answers_in_any_pieces_are_whole(answer):
    """Cut anywhere, or everywhere, an answer has its status and body, on one connection."""
    pieces = [[answer], [answer[i : i + 1] for i in range(len(answer))]]
    pieces += [[answer[:cut], answer[cut:]] for cut in range(1, len(answer))]
    waiting = iter(pieces)

    async def script(reader, writer):
        await saying(*next(waiting))(reader, writer)

    async with asking(script) as (client, server):
        for _ in pieces:
            found = await client.ask("POST", "/x", b"{}")
            assert (found.status, await found.read_all()) == (200, b"hello")
            found.release()

        assert server.connections == 1


async def test_a_request_says_what_it_must():
    """Line, host, framing and headers are those of HTTP/1.1; the server's own path comes first."""
    async with asking(saying(SIZED)) as (client, server):
        answer = await client.ask("POST", "/v1/x", b'{"a":1}', [("x-request-id", "r1")])
        await answer.read_all()
        answer.release()
        await (await client.ask("GET", "/health")).read_all()

        lines = server.requests[0].split(b"\r\n")
        assert lines[0] == b"POST /prefix/v1/x HTTP/1.1"
        assert lines[1].startswith(b"host: 127.0.0.1:")
        assert {b"x-request-id: r1", b"content-length: 7", b"content-type: application/json"} < set(
            lines
        )
        assert lines[-1] == b'{"a":1}'
        assert b"content-length" not in server.requests[1]


async def test_a_body_without_a_length_ends_with_the_connection():
    """An old server's way of ending a body is no failure."""
    async with asking(saying(b"HTTP/1.0 200 OK\r\n\r\n", b"hello", close=True)) as (client, server):
        for _ in range(2):
            answer = await client.ask("GET", "/x")
            assert await answer.read_all() == b"hello"
            answer.release()

        assert server.connections == 2


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"HTTP/1.1 2"],
        [SIZED[:-1]],
        [CHUNKED[:-3]],
        [b"SSH-2.0-OpenSSH\r\n"],
        [CHUNKED.replace(b"3;x=y", b"zz")],
    ],
    ids=["nothing", "half a line", "short", "no last chunk", "no HTTP", "bad chunk"],
)
async def test_what_breaks_is_an_oserror(pieces):
    """A connection that ends too early, or says something else, is no answer."""
    async with asking(saying(*pieces, close=True)) as (client, _):
        with pytest.raises(OSError):
            await (await client.ask("GET", "/x")).read_all()


async def test_a_server_that_is_not_there_is_an_oserror():
    """Where nobody listens, asking fails; so does the engine's interface, by its own name."""
    async with asking(saying(SIZED)) as (client, _):
        pass
    with pytest.raises(OSError):
        await client.ask("GET", "/x")
    with pytest.raises(EngineUnavailable):
        await VllmHttp(client).get("/x")


async def test_a_connection_that_its_server_closed_is_not_used():
    """Neither is one whose answer said so, nor one that has been idle for long."""
    async with asking(saying(SIZED)) as (client, server):
        await _once(client)
        (kept,) = client._idle
        kept._transport.abort()
        await eventually(lambda: not client._open)
        await _once(client)
        assert server.connections == 2
        (kept,) = client._idle
        kept.idle_since -= http_client._IDLE_SECONDS + 1
        await _once(client)
        assert server.connections == 3
        server.script = saying(SIZED.replace(b"content", b"connection: close\r\ncontent"))
        await _once(client)
        assert not client._idle


async def test_a_server_that_speaks_unasked_is_hung_up_on():
    """Bytes after an answer belong to no request, and never to the next."""
    async with asking(saying(SIZED)) as (client, server):
        server.script = saying(SIZED + SIZED)
        await _once(client)
        server.script = saying(SIZED.replace(b"hello", b"other"))

        answer = await client.ask("GET", "/x")

        assert await answer.read_all() == b"other"
        answer.release()


async def test_who_gives_up_hangs_up():
    """A caller that is cancelled while it waits ends its request at the server."""

    async def script(reader, _):
        await reader.read()
        raise ConnectionError

    async with asking(script) as (client, server):
        waiting = asyncio.create_task(client.ask("POST", "/x", b"{}"))
        await eventually(lambda: server.requests)
        waiting.cancel()

        await eventually(lambda: server.closed == 1)
        assert not client._open


async def test_a_reader_that_is_away_holds_the_server_back():
    """What is unread is bounded; once it is read, nothing is missing."""
    size = 64 * 1024 * 1024
    sent = 0

    async def script(_, writer):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * 2**20)
            await writer.drain()
            sent += 2**20

    async with asking(script) as (client, _):
        answer = await client.ask("GET", "/x")
        await eventually(lambda: answer._unread_bytes > http_client._MOST_UNREAD_BYTES)
        for _ in range(100):
            await asyncio.sleep(0)
        assert answer._unread_bytes < 4 * 2**20
        assert sent < size

        assert len(await answer.read_all()) == size


@pytest.mark.parametrize("ends", [True, False])
async def test_an_answer_given_back_early_is_kept_if_it_ends_soon(ends):
    """The last bytes of a stream may still be on their way; one that goes on is hung up on."""
    go = asyncio.Event()

    async def script(_, writer):
        writer.write(CHUNKED[:-5])
        await go.wait()
        writer.write(CHUNKED[-5:])

    async with asking(script) as (client, server):
        answer = await client.ask("GET", "/x")
        while len(await answer.read_some()) < 3:
            pass
        answer.release()
        assert not client._idle
        if ends:
            go.set()
            await eventually(lambda: client._idle == [answer])
        else:
            await eventually(lambda: not client._open)
            go.set()
            await eventually(lambda: server.closed == 1)


@pytest.mark.parametrize("request_id", ["a\r\nx: y", "é"])
async def test_an_id_that_no_header_can_hold_is_left_out(request_id):
    """Nobody writes headers of ours by the name of a request."""
    async with asking(saying(SIZED)) as (client, server):
        await VllmHttp(client).post("/x", b"{}", request_id)

        assert b"x-request-id" not in server.requests[0]
        assert b"x: y" not in server.requests[0]


async def _once(client: HttpClient) -> None:
    answer = await client.ask("GET", "/x")
    assert await answer.read_all() == b"hello"
    answer.release()
