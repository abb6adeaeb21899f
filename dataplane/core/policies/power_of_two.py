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


@dataclass(frozen=True, slots=True)
class LesserOfTwo:
    """Price = requests on the instance, plus a wall around all but two of them."""

    load: Callable[[Side], Column]
    salt: str

    def price(self, request: Request, side: Side) -> Terms:
        """Return queue and wall."""
        key = crc32(f"{self.salt}:{request.request_id}".encode())
        ranked = sorted(
            range(len(side)),
            key=lambda i: crc32(side.instances[i].instance_id.encode(), key),
        )
        picked = set(ranked[:2])
        wall = [0.0 if i in picked else 1e9 for i in range(len(side))]
        return {"queue": self.load(side), "not_picked": side.fixed_column(wall)}


def power_of_two(*, seed: int = 0) -> TwoSided:
    """Return the policy; `seed` changes which two are picked."""
    return TwoSided(
        LesserOfTwo(Side.prefill_requests, f"{seed}p"),
        LesserOfTwo(Side.decode_requests, f"{seed}d"),
    )
