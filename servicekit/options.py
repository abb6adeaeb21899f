"""Options of servers and channels, apart from them so that settings import in no time."""

from dataclasses import dataclass

DEFAULT_MAX_MESSAGE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where and how to serve."""

    listen: str = "127.0.0.1:0"
    """host:port of gRPC; port 0 takes a free one."""
    http_listen: str | None = None
    """host:port of /metrics and pages; None for no HTTP port."""
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    drain_grace_seconds: float = 10.0
    """How long calls under way may go on once the server stops."""
    notice_seconds: float = 0.0
    """How long it answers NOT_SERVING before it refuses calls, for balancers that look at health."""
