"""Token product: tokens times batch.

    prefill cost = (queued prompt tokens + the request's own) (requests + 1)
    decode cost = (KV committed + the prompt) (sequences + 1)

After the `smetric` policy of the vLLM router. It needs neither constants nor lengths of outputs.
"""

from dataplane.core.policies.base import Terms, TwoSided
from dataplane.core.request import Request
from dataplane.core.view import Side


class PrefillProduct:
    """Prices prefill candidates."""

    def price(self, request: Request, side: Side) -> Terms:
        """Return the product, tokens times requests."""
        own = request.prompt_tokens
        return {
            "product": side.map(
                lambda tokens, cached, requests: (tokens + own - cached) * (requests + 1.0),
                side.prefill_tokens(),
                side.cached_tokens(request),
                side.prefill_requests(),
            )
        }


class DecodeProduct:
    """Prices decode candidates."""

    def price(self, request: Request, side: Side) -> Terms:
        """Return the product, tokens times requests."""
        own = request.prompt_tokens
        return {
            "product": side.map(
                lambda kv, requests: (kv + own) * (requests + 1.0),
                side.decode_kv_tokens(),
                side.decode_requests(),
            )
        }


def token_product() -> TwoSided:
    """Return the policy; no settings."""
    return TwoSided(PrefillProduct(), DecodeProduct())
