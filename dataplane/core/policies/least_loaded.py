"""Join the shortest queue: the instance with the fewest requests, on each side."""

from dataplane.core.policies.base import Terms, TwoSided
from dataplane.core.request import Request
from dataplane.core.view import Side


class FewestPrefills:
    """Price = requests waiting for or in prefill."""

    def price(self, request: Request, side: Side) -> Terms:  # noqa: ARG002
        """Return the queue as the only term."""
        return {"queue": side.prefill_requests()}


class FewestDecodes:
    """Price = sequences generating or waiting to."""

    def price(self, request: Request, side: Side) -> Terms:  # noqa: ARG002
        """Return the queue as the only term."""
        return {"queue": side.decode_requests()}


def least_loaded() -> TwoSided:
    """Return the policy; no settings."""
    return TwoSided(FewestPrefills(), FewestDecodes())
