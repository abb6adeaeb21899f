"""Ports of a local cluster: in a row from a base, or free ones."""

import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ports:
    """Gives each part its port; the same part always gets the same with a base."""

    base: int

    def of(self, part: str, index: int = 0) -> int:
        """Return the port of a part ("router", "prefill", …); a free one without a base."""
        if self.base == 0:
            return free_port()
        return self.base + _OFFSETS[part] + index * _STRIDES.get(part, 1)


_OFFSETS = {
    "router": 0,
    "router_http": 1,
    "control": 20,
    "control_http": 21,
    "redis": 40,
    "solo": 41,
    "prefill": 50,
    "decode": 70,
    "mixed": 90,
    "prefill_engine": 110,
    "decode_engine": 130,
    "mixed_engine": 150,
    "prefill_side": 170,
    "decode_side": 190,
    "mixed_side": 210,
}
_STRIDES = {"router": 2, "router_http": 2, "control": 2, "control_http": 2}


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
