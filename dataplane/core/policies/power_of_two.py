"""Power of two choices: the less loaded of two instances picked at random, on each side.

Mitzenmacher, IEEE TPDS 12(10), 2001. The two are picked by a hash of the request and a seed, so
that decisions repeat. A candidate that was not picked is priced behind a wall.
"""

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from dataplane.core.policies.base import Terms, TwoSided
from dataplane.core.request import Request
from dataplane.core.view import Column, Side

_WALL = 1e9


@dataclass(frozen=True, slots=True)
class LesserOfTwo:
    """Price = requests on the instance, plus a wall around all but two of them."""

    load: Callable[[Side], Column]
    salt: str

    def price(self, request: Request, side: Side) -> Terms:
        """Return queue and wall."""
        key = crc32(f"{self.salt}:{request.request_id}".encode())
        count = len(side)
        first = key % count
        second = (first + 1 + (key >> 16) % (count - 1)) % count if count > 1 else first
        wall = side.map(lambda place: _WALL * (place != first) * (place != second), side.position())
        return {"queue": self.load(side), "not_picked": wall}


def power_of_two(*, seed: int = 0) -> TwoSided:
    """Return the policy; `seed` changes which two are picked."""
    return TwoSided(
        LesserOfTwo(Side.prefill_requests, f"{seed}p"),
        LesserOfTwo(Side.decode_requests, f"{seed}d"),
    )
