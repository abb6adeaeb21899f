"""Block overlap: prefill still to compute plus KV held, both in blocks.

    cost = scale (queued prompt tokens + the request's uncached ones) / block + KV blocks
    + weight requests

After the KV router of NVIDIA Dynamo, with its overlap credit as cached tokens. The prefill side
counts the KV that was measured there, the decode side what is committed with the prompt on top;
requests count on the decode side.
"""

from dataclasses import dataclass

from dataplane.core.errors import InvalidSettingError
from dataplane.core.policies.base import Terms, TwoSided
from dataplane.core.request import Request
from dataplane.core.view import Side


@dataclass(frozen=True, slots=True)
class PrefillBlocks:
    """Prices prefill candidates."""

    prefill_scale: float

    def price(self, request: Request, side: Side) -> Terms:
        """Return prefill and held, blocks."""
        scale, own = self.prefill_scale, request.prompt_tokens
        block = side.fixed("block", lambda i, _: float(i.block_tokens))
        return {
            "prefill": side.map(
                lambda tokens, cached, block: scale * (tokens + own - cached) / block,
                side.prefill_tokens(),
                side.cached_tokens(request),
                block,
            ),
            "held": side.map(lambda kv, block: kv / block, side.kv_used_tokens(), block),
        }


@dataclass(frozen=True, slots=True)
class DecodeBlocks:
    """Prices decode candidates."""

    request_weight: float

    def price(self, request: Request, side: Side) -> Terms:
        """Return held and requests, blocks."""
        own, weight = request.prompt_tokens, self.request_weight
        return {
            "held": side.map(
                lambda kv, block: (kv + own) / block,
                side.decode_kv_tokens(),
                side.fixed("block", lambda i, _: float(i.block_tokens)),
            ),
            "requests": side.map(lambda requests: weight * requests, side.decode_requests()),
        }


def block_overlap(*, prefill_scale: float = 1.0, request_weight: float = 0.0) -> TwoSided:
    """Return the policy.

    Args:
        prefill_scale: Weight of prefill blocks against held ones.
        request_weight: Blocks that a request on a decode instance counts for.

    Raises:
        InvalidSettingError: A setting is below 0.
    """
    if not (prefill_scale >= 0.0 and request_weight >= 0.0):
        raise InvalidSettingError("prefill_scale and request_weight are at least 0")
    return TwoSided(PrefillBlocks(prefill_scale), DecodeBlocks(request_weight))
