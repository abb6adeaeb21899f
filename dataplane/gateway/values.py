"""What passes between the HTTP connection and what answers it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a client may cost before it has been served."""

    max_header_bytes: int = 32 * 1024
    max_body_bytes: int = 16 * 1024 * 1024
    max_connections: int = 20_000
    max_pipelined: int = 8
    read_seconds: float = 30.0
    idle_seconds: float = 120.0
    stall_seconds: float = 60.0
    linger_seconds: float = 2.0


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request, whole.

    Attributes:
        method: In capitals.
        path: Without the query.
        headers: By name in small letters; of repeated ones the last.
        body: Bytes as sent, chunking taken off.
        arrived_at: When its last byte came, by the monotonic clock.
        http_1_0: The client speaks HTTP/1.0 and can read no chunks.
    """

    method: bytes
    path: bytes
    # Keys and prompts stay out of logs and tracebacks.
    headers: Mapping[bytes, bytes] = field(repr=False)
    body: bytes = field(repr=False)
    arrived_at: float
    http_1_0: bool = False

    def header(self, name: bytes) -> str:
        """Return a header's value; empty where it is missing."""
        value = self.headers.get(name)
        return value.decode("latin-1").strip() if value else ""
