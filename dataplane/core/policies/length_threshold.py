"""The paper's length heuristic: long outputs keep to a part of the decode pool.

The paper gives neither threshold nor split. Here requests predicted above `threshold_tokens` share
the last `long_share` of the decode instances by id (at least one, never all), the others share the
rest; within a part, as on the prefill side, the fewest requests win. With one decode instance
there is nothing to part.
"""

from dataclasses import dataclass

from dataplane.core.errors import InvalidSettingError
from dataplane.core.policies.base import Terms, TwoSided
from dataplane.core.policies.least_loaded import FewestPrefills
from dataplane.core.request import Request
from dataplane.core.view import Side

_WALL = 1e9


@dataclass(frozen=True, slots=True)
class FewestOfPart:
    """Price = sequences on the instance, plus a wall around the other part."""

    threshold_tokens: float
    long_share: float

    def price(self, request: Request, side: Side) -> Terms:
        """Return queue and wall."""
        count = len(side)
        long_from = count - min(max(1, round(count * self.long_share)), count - 1)
        is_long = request.predicted_tokens > self.threshold_tokens
        wall = side.map(
            lambda place: _WALL * ((place >= long_from) != is_long) * (count > 1),
            side.position(),
        )
        return {"queue": side.decode_requests(), "other_part": wall}


def length_threshold(*, threshold_tokens: float = 256.0, long_share: float = 0.5) -> TwoSided:
    """Return the policy.

    Args:
        threshold_tokens: Outputs predicted above this are long.
        long_share: Share of the decode instances that long outputs keep to, in (0, 1).

    Raises:
        InvalidSettingError: A setting is outside its range.
    """
    if not 0.0 < long_share < 1.0:
        raise InvalidSettingError(f"long_share is {long_share}; it lies between 0 and 1")
    if not threshold_tokens > 0:
        raise InvalidSettingError(f"threshold_tokens is {threshold_tokens}; it is above 0")
    return TwoSided(FewestPrefills(), FewestOfPart(threshold_tokens, long_share))
