"""The answering side of one request: whole, or as a stream of events."""

import asyncio
from collections.abc import Iterable
from http import HTTPStatus
from typing import Protocol

from dataplane.gateway.values import HttpRequest

Headers = Iterable[tuple[bytes, bytes]]
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_NO_BODY = frozenset({204, 304})


class Wire(Protocol):
    """The part of a transport that an answer is written to."""

    def write(self, data: bytes) -> None:
        """Send bytes, or queue them."""
        ...


class Exchange:
    """One request and its answer. Everything written before `flush` may go out in one piece."""

    __slots__ = (
        "_drained",
        "_head",
        "_wire",
        "chunked",
        "date",
        "ended",
        "keep_alive",
        "request",
        "started",
        "status",
    )

    def __init__(self, request: HttpRequest, wire: Wire, *, keep_alive: bool, date: bytes) -> None:
        self.request = request
        self.keep_alive = keep_alive
        self.date = date
        self.started = False
        self.ended = False
        self.status = 0
        self.chunked = not request.http_1_0
        self._head = b""
        self._wire = wire
        self._drained: asyncio.Future[None] | None = None

    def respond(
        self, status: int, body: bytes, *, content_type: bytes = JSON, headers: Headers = ()
    ) -> None:
        """Send a whole answer."""
        head = self._begin(status, content_type, headers)
        if status not in _NO_BODY:
            head += b"content-length: %d\r\n" % len(body)
        self.ended = True
        content = b"" if self.request.method == b"HEAD" else body
        self._wire.write(head + b"\r\n" + content)

    def stream(self, *, headers: Headers = ()) -> None:
        """Begin a stream of events; the head goes out with the first of them."""
        if not self.chunked:
            self.keep_alive = False
        head = self._begin(200, EVENT_STREAM, headers) + b"cache-control: no-cache\r\n"
        if self.chunked:
            head += b"transfer-encoding: chunked\r\n"
        self._head = head + b"\r\n"

    def send(self, events: bytes) -> None:
        """Send events; not empty."""
        if self.chunked:
            self._wire.write(b"%b%x\r\n%b\r\n" % (self._head, len(events), events))
        else:
            self._wire.write(self._head + events)
        self._head = b""

    def finish(self, events: bytes = b"") -> None:
        """Send the last events and end the stream."""
        self.ended = True
        if not self.chunked:
            self._wire.write(self._head + events)
        elif events:
            self._wire.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (self._head, len(events), events))
        else:
            self._wire.write(self._head + b"0\r\n\r\n")

    def pause(self) -> None:
        """Note that the client reads slower than we write."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        """Note that the client has caught up, or that nothing is sent any more."""
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    @property
    def paused(self) -> bool:
        """Whether to `await drain()` before sending more."""
        return self._drained is not None

    async def drain(self) -> None:
        """Wait until the client has caught up."""
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def _begin(self, status: int, content_type: bytes, headers: Headers) -> bytes:
        assert not self.started, "the answer has begun"
        self.started = True
        self.status = status
        parts = [_STATUS_LINES[status], b"date: ", self.date, b"\r\ncontent-type: ", content_type]
        for name, value in headers:
            parts += (b"\r\n", name, b": ", value)
        if not self.keep_alive:
            parts.append(b"\r\nconnection: close")
        elif self.request.http_1_0:
            parts.append(b"\r\nconnection: keep-alive")
        parts.append(b"\r\n")
        return b"".join(parts)
