"""Round robin: each side's instances in turn, by id, blind to load and size."""

from dataplane.core.policies.base import Explanation, Placement, Terms, TwoSided
from dataplane.core.request import Request
from dataplane.core.view import ClusterView, Side


class InTurn:
    """Price = distance of an instance from the one whose turn it is, counting up by id."""

    def __init__(self) -> None:
        self.turn = 0

    def price(self, request: Request, side: Side) -> Terms:  # noqa: ARG002
        """Return the distance as the only term."""
        turn, count = self.turn, len(side)
        return {"distance": side.map(lambda place: (place - turn) % count, side.position())}


class RoundRobin:
    """Takes both sides' next; every placement moves the turn on, explaining does not."""

    def __init__(self) -> None:
        self._rule = InTurn()
        self._sides = TwoSided(self._rule, self._rule)

    def place(self, request: Request, cluster: ClusterView) -> Placement:
        """Return the next instance of each side.

        Raises:
            NoCandidateError: A side is empty.
        """
        placement = self._sides.place(request, cluster)
        self._rule.turn += 1
        return placement

    def explain(self, request: Request, cluster: ClusterView) -> Explanation:
        """Return how far each instance is from its turn."""
        return self._sides.explain(request, cluster)


def round_robin() -> RoundRobin:
    """Return the policy; no settings."""
    return RoundRobin()
