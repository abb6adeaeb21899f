"""SLO headroom: the busiest instance that still keeps the target.

    headroom = target - predicted latency

Among candidates with positive headroom the least wins, which keeps the others free for requests
that need them; where none has any, the largest. After the latency scorer of the llm-d router,
which predicts with a learned model; here the calibrated constants predict. Prefill: TTFT as the
prompts ahead, the prompt itself and the hand-off; decode: TPOT as the step with the request in it.
"""

from dataclasses import dataclass

from dataplane.core.errors import InvalidSettingError
from dataplane.core.policies.base import Terms, TwoSided
from dataplane.core.policies.marginal_cost import prefill_seconds_per_token
from dataplane.core.request import Request
from dataplane.core.view import Column, Side
from enginemodel.model import handoff_seconds

_NO_HEADROOM = 1e6
_ENDLESS_SECONDS = 1e5


@dataclass(frozen=True, slots=True)
class PrefillHeadroom:
    """Prices prefill candidates."""

    margin: float

    def price(self, request: Request, side: Side) -> Terms:
        """Return headroom, seconds; what has none lies behind all that has some."""
        own = request.prompt_tokens
        latency = side.map(
            lambda tokens, cached, tau, fixed, per_token: (
                (tokens + own - cached) * tau + fixed + own * per_token
            ),
            side.prefill_tokens(),
            side.cached_tokens(request),
            side.fixed("tau_pre", lambda _, c: prefill_seconds_per_token(c)),
            side.fixed("h0", lambda _, c: c.h0_seconds),
            side.fixed(
                "pull_a_token",
                lambda i, c: handoff_seconds(c, 1, i.kv_bytes_per_token) - c.h0_seconds,
            ),
        )
        return {"headroom": _ranked(side, request.targets.ttft_seconds * self.margin, latency)}


@dataclass(frozen=True, slots=True)
class DecodeHeadroom:
    """Prices decode candidates."""

    margin: float

    def price(self, request: Request, side: Side) -> Terms:
        """Return headroom, seconds; what has none lies behind all that has some."""
        own = request.prompt_tokens
        latency = side.map(
            lambda d0, d1, d2, requests, kv: d0 + d1 * (requests + 1.0) + d2 * (kv + own),
            side.fixed("d0", lambda _, c: c.d0_seconds),
            side.fixed("d1", lambda _, c: c.d1_seconds_per_sequence),
            side.fixed("d2", lambda _, c: c.d2_seconds_per_kv_token),
            side.decode_requests(),
            side.decode_kv_tokens(),
        )
        return {"headroom": _ranked(side, request.targets.tpot_seconds * self.margin, latency)}


def _ranked(side: Side, target_seconds: float, latency: Column) -> Column:
    target = min(target_seconds, _ENDLESS_SECONDS)

    def rank(latency: float) -> float:
        headroom = target - latency
        return (headroom > 0.0) * headroom + (headroom <= 0.0) * (_NO_HEADROOM - headroom)

    return side.map(rank, latency)


def slo_headroom(*, margin: float = 1.0) -> TwoSided:
    """Return the policy.

    Args:
        margin: Share of the targets that may be used up; above 0.

    Raises:
        InvalidSettingError: It is not above 0.
    """
    if not margin > 0.0:
        raise InvalidSettingError(f"margin is {margin}; it is above 0")
    return TwoSided(PrefillHeadroom(margin), DecodeHeadroom(margin))
