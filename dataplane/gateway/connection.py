"""One HTTP/1.1 connection: llhttp's strict parser, our limits, one answer after the other.

llhttp refuses by itself what smuggling is made of: both lengths, repeated or signed lengths, folded
headers, bare line feeds, odd chunk sizes. What is left to us: sizes, times, codings and hosts.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from enum import Enum
from math import inf
from typing import cast

import httptools
import structlog

from dataplane.gateway.errors import HttpFault, error_body
from dataplane.gateway.exchange import Exchange
from dataplane.gateway.values import HttpLimits, HttpRequest
from servicekit.clock import Clock

Handler = Callable[[Exchange], Awaitable[None]]


class Phase(Enum):
    """Where a connection stands; each phase but SERVING has a deadline."""

    IDLE = "idle"
    READING = "reading"
    SERVING = "serving"
    LINGERING = "lingering"


class Connections:
    """All connections of a gateway, and what they share."""

    def __init__(self, handler: Handler, limits: HttpLimits, clock: Clock) -> None:
        self.handler = handler
        self.limits = limits
        self.clock = clock
        self.open: set[Connection] = set()
        self.closing = False
        self._emptied: asyncio.Event | None = None
        self.date = b""
        self.log = structlog.get_logger("dataplane.gateway")
        self.sweep()

    def sweep(self) -> None:
        """End what is past its time; called every second or so."""
        self.date = formatdate(self.clock.unix(), usegmt=True).encode()
        now = self.clock.monotonic()
        for connection in [c for c in self.open if c.deadline < now]:
            connection.expire()

    async def emptied(self) -> None:
        """Wait until no connection is open."""
        while self.open:
            self._emptied = asyncio.Event()
            await self._emptied.wait()

    def left(self, connection: "Connection") -> None:
        """Forget a connection that is closed."""
        self.open.discard(connection)
        if not self.open and self._emptied is not None:
            self._emptied.set()

    def make(self) -> "Connection":
        """Make the protocol of a new connection."""
        return Connection(self)


class Connection(asyncio.Protocol):
    """Reads requests, has each answered, in order; a client that leaves ends what it asked for."""

    def __init__(self, shared: Connections) -> None:
        self._shared = shared
        self._limits = shared.limits
        self.phase: Phase = Phase.IDLE
        self.deadline = inf
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._fault: HttpFault | None = None
        self._waiting: deque[tuple[HttpRequest, bool]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._paused = False
        self._raw_bytes = 0
        self._reset()

    def __repr__(self) -> str:
        """Show where it stands."""
        return f"<Connection {self.phase.value}, {len(self._waiting)} waiting>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or turn it away where there are too many."""
        # uvloop's transports do what asyncio's do and derive from none of them.
        self._transport = cast("asyncio.Transport", transport)
        shared = self._shared
        shared.open.add(self)
        self._until(Phase.IDLE, self._limits.idle_seconds)
        if len(shared.open) > self._limits.max_connections:
            self._refuse(HttpFault(503, "too many connections are open", retry_after_seconds=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        """End what the client asked for."""
        del exc
        self._shared.left(self)
        self._transport = None
        self._waiting.clear()
        self._abandon()

    def eof_received(self) -> bool:
        """Take a client that stops sending for one that has left, as proxies do."""
        self._waiting.clear()
        self._abandon()
        return False

    def data_received(self, data: bytes) -> None:
        """Parse what has come."""
        if self.phase is Phase.LINGERING or self._fault is not None:
            return
        if self.phase is Phase.IDLE:
            self._until(Phase.READING, self._limits.read_seconds)
        self._raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
            self._check_size()
        except httptools.HttpParserUpgrade:
            self._close_after()
        except httptools.HttpParserError as error:
            self._refuse(self._why(error))
        except HttpFault as fault:
            self._refuse(fault)

    def pause_writing(self) -> None:
        """The client reads slower than we write: its answer waits, though not for ever."""
        self._paused = True
        if self.phase is Phase.SERVING:
            self.deadline = self._shared.clock.monotonic() + self._limits.stall_seconds
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._paused = False
        if self.phase is Phase.SERVING:
            self.deadline = inf
        if self._exchange is not None:
            self._exchange.resume()

    def expire(self) -> None:
        """End the connection, whose time in its phase is over."""
        transport = self._transport
        if transport is None:
            return
        if self.phase is Phase.READING:
            self._refuse(HttpFault(408, "the request did not come in time"))
        elif self.phase is Phase.IDLE:
            transport.close()
        else:
            transport.abort()

    def close_idle(self) -> None:
        """Close now where nothing is served, and after the present answer where something is."""
        if self.phase is Phase.SERVING:
            self._close_after()
        elif self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    # What llhttp calls.

    def on_message_begin(self) -> None:
        """Forget the request before."""
        self._reset()

    def on_url(self, url: bytes) -> None:
        """Gather the target."""
        self._url += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers are read and dropped."""
        self._count_header(len(name) + len(value) + 4)
        if not self._in_body:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Refuse what will not be served before its body comes."""
        self._in_body = True
        headers = self._headers
        self._version = self._parser.get_http_version()
        coding = headers.get(b"transfer-encoding")
        if self._version not in ("1.1", "1.0"):
            self._fail(HttpFault(505, f"HTTP/{self._version} is not spoken here"))
        if coding is not None and (coding.strip().lower() != b"chunked" or self._version == "1.0"):
            self._fail(HttpFault(400, "Transfer-Encoding is other than chunked"))
        if self._version == "1.1" and not headers.get(b"host"):
            self._fail(HttpFault(400, "the Host header is missing"))
        if headers.get(b"content-encoding", b"identity") != b"identity":
            self._fail(HttpFault(415, "Content-Encoding is not supported"))
        if int(headers.get(b"content-length", b"0")) > self._limits.max_body_bytes:
            self._fail(self._too_large())
        if headers.get(b"expect", b"").lower() == b"100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Gather the body."""
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            self._fail(self._too_large())
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Have the request answered, after those before it."""
        request = HttpRequest(
            method=self._parser.get_method(),
            path=self._url.partition(b"?")[0],
            headers=self._headers,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            arrived_at=self._shared.clock.monotonic(),
            http_1_0=self._version == "1.0",
        )
        keep_alive = self._parser.should_keep_alive() and not self._shared.closing
        self._raw_bytes = 0
        if len(self._waiting) >= self._limits.max_pipelined:
            self._fail(HttpFault(400, "too many requests are pipelined"))
        self._waiting.append((request, keep_alive))
        if self._task is None:
            self._next()

    # Our own.

    def _reset(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._header_bytes = 0
        self._in_body = False
        self._version = "1.1"

    def _why(self, error: Exception) -> HttpFault:
        """Return what stopped the parser: one of our own limits, or what it could not read."""
        return self._fault or HttpFault(400, f"malformed HTTP: {error}")

    def _check_size(self) -> None:
        """Bound what the parser holds: headers, and the framing around chunks."""
        if not self._in_body and self._raw_bytes > self._limits.max_header_bytes:
            raise self._headers_too_large()
        if self._raw_bytes > 8 * self._limits.max_body_bytes + self._limits.max_header_bytes:
            raise self._too_large()

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._limits.max_header_bytes:
            self._fail(self._headers_too_large())

    def _headers_too_large(self) -> HttpFault:
        return HttpFault(431, f"the headers exceed {self._limits.max_header_bytes} bytes")

    def _too_large(self) -> HttpFault:
        return HttpFault(413, f"the body exceeds {self._limits.max_body_bytes} bytes")

    def _fail(self, fault: HttpFault) -> None:
        """Stop the parser; `data_received` answers."""
        self._fault = fault
        raise fault

    def _until(self, phase: Phase, seconds: float) -> None:
        self.phase = phase
        self.deadline = self._shared.clock.monotonic() + seconds

    def _next(self) -> None:
        """Serve the next request that waits."""
        request, keep_alive = self._waiting.popleft()
        if self._transport is None:
            return
        self.phase, self.deadline = Phase.SERVING, inf
        exchange = self._exchange = Exchange(
            request, self._transport, keep_alive=keep_alive, date=self._shared.date
        )
        if self._paused:
            self.pause_writing()
        self._task = asyncio.get_running_loop().create_task(self._serve(exchange))

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await self._shared.handler(exchange)
        except Exception:
            self._shared.log.exception("http_crashed", path=exchange.request.path)
            if not exchange.started:
                exchange.respond(500, error_body(HttpFault(500, "internal error")))
        finally:
            self._task = None
            self._exchange = None
            self._served(exchange)

    def _served(self, exchange: Exchange) -> None:
        """Go on after an answer."""
        transport = self._transport
        if transport is None:
            return
        if not exchange.ended:
            transport.abort()  # a stream cut short must not look whole
        elif not exchange.keep_alive or self._shared.closing:
            transport.close()
        elif self._fault is not None:
            self._refuse(self._fault)
        elif self._waiting:
            self._next()
        elif self._raw_bytes:
            self._until(Phase.READING, self._limits.read_seconds)
        else:
            self._until(Phase.IDLE, self._limits.idle_seconds)

    def _refuse(self, fault: HttpFault) -> None:
        """Answer what cannot be parsed, once those before it are answered, and hang up."""
        self._fault = fault
        if self._task is not None or self._transport is None:
            return
        request = HttpRequest(b"", b"", {}, b"", 0.0)
        exchange = Exchange(request, self._transport, keep_alive=False, date=self._shared.date)
        exchange.respond(fault.status, error_body(fault), headers=fault.headers())
        # Closing with unread input would reset the connection under the answer.
        self._until(Phase.LINGERING, self._limits.linger_seconds)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _close_after(self) -> None:
        if self._exchange is not None and not self._exchange.started:
            self._exchange.keep_alive = False

    def _abandon(self) -> None:
        if self._exchange is not None:
            self._exchange.resume()
        if self._task is not None:
            self._task.cancel()
