"""Ports of a local cluster: in a row from a base, or free ones."""

from dataclasses import dataclass, field

from localcluster.errors import ClusterError
from servicekit.ports import free_port, is_free

_MOST_PORTS = 65_535


@dataclass(frozen=True, slots=True)
class Ports:
    """Gives each part its port; the same part always gets the same with a base.

    Without one, no port is given twice: most are taken only some time after they were picked.
    """

    base: int
    _given: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    def of(self, part: str, index: int = 0) -> int:
        """Return the port of a part ("router", "prefill", …); a free one without a base.

        Raises:
            ClusterError: Somebody else listens there: it would be taken for our own part.
        """
        if self.base == 0:
            port = free_port()
            while port in self._given:
                port = free_port()
            self._given.add(port)
            return port
        port = self.number(part, index)
        if not is_free(port):
            raise ClusterError(f"port {port}, for {part} {index}, is taken; give another port base")
        return port

    def number(self, part: str, index: int = 0) -> int:
        """Return the port that a part has with a base, whoever listens there now.

        Raises:
            ClusterError: There is no such port.
        """
        port = self.base + _OFFSETS[part] + index * _STRIDES.get(part, 1)
        if not 0 < port <= _MOST_PORTS:
            raise ClusterError(f"port base {self.base} gives {part} port {port}, there is none")
        return port


_OFFSETS = {
    "router": 0,
    "router_http": 1,
    "gateway": 10,
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
