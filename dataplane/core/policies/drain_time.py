"""Drain time: how long an instance needs for what it has, and how full its memory is.

    cost = (queued and in-flight tokens + the request's own) / throughput + lambda k / (1 - k)

k: share of the KV budget in use, at most .98. After the `least_load` policy of the SGLang model
gateway, which sets the throughput by hand (2,000 tokens a second); here it follows from the
calibrated constants. Prefill candidates count prompt tokens and the KV that was measured there,
decode candidates the tokens still to be generated and the KV committed.
"""

from dataclasses import dataclass

from dataplane.core.errors import InvalidSettingError
from dataplane.core.policies.base import Terms, TwoSided
from dataplane.core.policies.marginal_cost import prefill_seconds_per_token
from dataplane.core.request import Request
from dataplane.core.view import Column, Side
from enginemodel.model import EngineConstants, decode_step_seconds

_BATCH = 32
_BATCH_KV_TOKENS = 16_384
_FULLEST = 0.98


def decode_seconds_per_token(constants: EngineConstants) -> float:
    """Return a token's share of a step of a well-filled batch."""
    return decode_step_seconds(constants, _BATCH, _BATCH_KV_TOKENS) / _BATCH


@dataclass(frozen=True, slots=True)
class PrefillDrain:
    """Prices prefill candidates."""

    memory_seconds: float

    def price(self, request: Request, side: Side) -> Terms:
        """Return drain and memory, seconds."""
        own = request.prompt_tokens
        tau = side.fixed("tau_pre", lambda _, c: prefill_seconds_per_token(c))
        return {
            "drain": side.map(
                lambda tokens, cached, tau: (tokens + own - cached) * tau,
                side.prefill_tokens(),
                side.cached_tokens(request),
                tau,
            ),
            "memory": _memory(self.memory_seconds, side, side.kv_used_tokens()),
        }


@dataclass(frozen=True, slots=True)
class DecodeDrain:
    """Prices decode candidates."""

    memory_seconds: float

    def price(self, request: Request, side: Side) -> Terms:
        """Return drain and memory, seconds."""
        own = request.predicted_tokens
        tau = side.fixed("tau_dec_batch", lambda _, c: decode_seconds_per_token(c))
        return {
            "drain": side.map(
                lambda tokens, tau: (tokens + own) * tau, side.decode_remaining_tokens(), tau
            ),
            "memory": _memory(self.memory_seconds, side, side.decode_kv_tokens()),
        }


def _memory(seconds: float, side: Side, kv_tokens: Column) -> Column:
    budget = side.fixed("kv_total", lambda i, _: float(max(i.kv_total_tokens, 1)))
    use = side.lesser(
        side.map(lambda kv, budget: kv / budget, kv_tokens, budget),
        side.once("fullest", lambda: [_FULLEST] * len(side)),
    )
    return side.map(lambda use: seconds * use / (1.0 - use), use)


def drain_time(*, memory_seconds: float = 0.15) -> TwoSided:
    """Return the policy.

    Args:
        memory_seconds: lambda; 0 leaves memory out.

    Raises:
        InvalidSettingError: It is below 0.
    """
    if not memory_seconds >= 0.0:
        raise InvalidSettingError(f"memory_seconds is {memory_seconds}; it is at least 0")
    return TwoSided(PrefillDrain(memory_seconds), DecodeDrain(memory_seconds))
