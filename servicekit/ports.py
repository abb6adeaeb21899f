"""Ports of this host's loopback."""

import contextlib
import secrets
import socket

_FIRST_FREE = 15_000
_FREE_COUNT = 17_000
_TRIES = 200


def free_port() -> int:
    """Return a port that nobody listens on now.

    It lies below those that Linux gives to outgoing connections (32768 and up by default): none of
    them can take it before its part does, as happens to a port that was bound as 0.

    Raises:
        OSError: Many tries have found none.
    """
    for _ in range(_TRIES):
        port = _FIRST_FREE + secrets.randbelow(_FREE_COUNT)
        if is_free(port):
            return port
    raise OSError(f"no free port from {_FIRST_FREE} to {_FIRST_FREE + _FREE_COUNT - 1}")


def is_free(port: int) -> bool:
    """Whether nobody listens on a port now."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False
