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
    """Takes both sides' next; every placement moves the turn on, explaining does not.

    Requests that must avoid an instance have turns of their own. Else each request that fails on
    a dead prefill engine and is placed again would take two turns, and with two decode engines
    all of them would end on the same one.
    """

    def __init__(self) -> None:
        self._first = InTurn()
        self._again = InTurn()

    def place(self, request: Request, cluster: ClusterView) -> Placement:
        """Return the next instance of each side.

        Raises:
            NoCandidateError: A side is empty.
        """
        rule = self._rule(request)
        placement = TwoSided(rule, rule).place(request, cluster)
        rule.turn += 1
        return placement

    def explain(self, request: Request, cluster: ClusterView) -> Explanation:
        """Return how far each instance is from its turn."""
        rule = self._rule(request)
        return TwoSided(rule, rule).explain(request, cluster)

    def _rule(self, request: Request) -> InTurn:
        return self._again if request.excluded else self._first


def round_robin() -> RoundRobin:
    """Return the policy; no settings."""
    return RoundRobin()
