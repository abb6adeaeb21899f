"""Which decode engine takes a prompt that was just prefilled: the least occupied.

    occupancy = ((KV + P) / KV budget + (B + 1) / (seats / 4)) * slowness
    + penalties for KV that overflows now, or is expected to, for missing seats and for TPOT

A quarter of the seats weighs as much as the whole KV: batches far smaller than the limit already
fill the memory. slowness: a typical step here over the same step of the fastest candidate.
"""

from dataclasses import dataclass

from dataplane.core.late_binding.gate import DecodeGate
from dataplane.core.late_binding.settings import LateBindingSettings
from dataplane.core.policies.base import Terms
from dataplane.core.request import Request
from dataplane.core.view import Column, Side
from enginemodel.model import decode_step_seconds

_FLAT_OUTPUT_TOKENS = 250.0
_TYPICAL_BATCH = 16
_TYPICAL_KV_TOKENS = 8192
_PENALTY = 5.0


@dataclass(frozen=True, slots=True)
class LeastOccupied:
    """Prices decode candidates at hand-off."""

    gate: DecodeGate
    settings: LateBindingSettings

    def price(self, request: Request, side: Side) -> Terms:
        """Return occupancy, overflow, peak, seats and tpot, all without unit."""
        prompt = request.prompt_tokens
        kv, requests = side.decode_kv_tokens(), side.decode_requests()
        budget = side.fixed("kv_budget", lambda i, _: float(i.kv_total_tokens))
        seats = side.fixed("seats", lambda i, _: float(i.max_num_seqs))
        growth = side.fixed("growth", lambda i, _: 1.0 + i.block_tokens / 2.0)
        slow = side.fixed(
            "typical_step",
            lambda _, c: decode_step_seconds(c, _TYPICAL_BATCH, _TYPICAL_KV_TOKENS),
        )
        fastest = min(slow)
        over = side.positive(
            side.map(
                lambda kv, requests, growth, budget: (
                    (kv + prompt + requests * growth) / budget - 1.0
                ),
                kv,
                requests,
                growth,
                budget,
            )
        )
        rest = side.lesser(
            side.decode_remaining_tokens(),
            side.map(lambda requests: requests * _FLAT_OUTPUT_TOKENS, requests),
        )
        return {
            "occupancy": side.map(
                lambda kv, requests, budget, seats, slow: (
                    ((kv + prompt) / budget + 4.0 * (requests + 1.0) / seats) * (slow / fastest)
                ),
                kv,
                requests,
                budget,
                seats,
                slow,
            ),
            "overflow": side.map(lambda over: (over > 0.0) + _PENALTY * over, over),
            "peak": self._peak(prompt, side, kv, rest, budget),
            "seats": side.map(
                lambda requests, seats: (
                    (requests + 1.0 > seats) * (1.0 + 0.05 * (requests + 1.0 - seats))
                ),
                requests,
                seats,
            ),
            "tpot": self._late_tokens(request, side, kv, requests),
        }

    def _peak(self, prompt: int, side: Side, kv: Column, rest: Column, budget: Column) -> Column:
        """Return by how much the KV is expected to overgrow its share."""
        share = self.settings.kv_share
        grown = side.map(
            lambda kv, rest, budget: (
                _PENALTY * ((kv + prompt + rest + _FLAT_OUTPUT_TOKENS) / budget - share)
            ),
            kv,
            rest,
            budget,
        )
        return side.positive(grown)

    def _late_tokens(self, request: Request, side: Side, kv: Column, requests: Column) -> Column:
        """Return by how much a step would overrun the TPOT target of anybody on the engine."""
        tokens = request.prompt_tokens + self.settings.growth_tokens
        margin = self.settings.tpot_margin
        own = side.fixed_column([request.targets.tpot_seconds] * len(side))
        overrun = side.map(
            lambda d0, d1, d2, factor, limit, kv, requests: (
                _PENALTY
                * ((d0 + d1 * (requests + 1.0) + d2 * (kv + tokens)) * factor / limit - margin)
            ),
            side.fixed("d0", lambda _, c: c.d0_seconds),
            side.fixed("d1", lambda _, c: c.d1_seconds_per_sequence),
            side.fixed("d2_positive", lambda _, c: max(c.d2_seconds_per_kv_token, 1e-15)),
            side.take(self.gate.factors),
            side.lesser(own, side.take(self.gate.tightest)),
            kv,
            requests,
        )
        return side.positive(overrun)
