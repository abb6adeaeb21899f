"""What policies are made of: a rule for each side, and ties that spread."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

import numpy as np

from dataplane.core.cluster import Instance
from dataplane.core.request import Request
from dataplane.core.view import ClusterView, Column, Side

DECODE_BITS = 16


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes; `prefill_id` is None when the decode instance computes the prompt."""

    prefill_id: str | None
    decode_id: str


class PlacementPolicy(Protocol):
    """Binds both sides of a request on arrival: the seam that the paper's baselines replace."""

    def place(self, request: Request, cluster: ClusterView) -> Placement:
        """Return where it goes.

        Raises:
            NoCandidateError: No instance can take it.
        """
        ...


Terms = Mapping[str, Column]
CandidateTerms = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every candidate's price, term by term, on both sides, by instance id."""

    prefill: CandidateTerms
    decode: CandidateTerms


class Explains(Protocol):
    """A policy that can show what it goes by."""

    def explain(self, request: Request, cluster: ClusterView) -> Explanation:
        """Return the prices that `place` would compare, without placing anything.

        Raises:
            NoCandidateError: No instance can take the request.
        """
        ...


class Rule(Protocol):
    """Prices the candidates of one side: the sum of the terms is the price, lower is better."""

    def price(self, request: Request, side: Side) -> Terms:
        """Return the terms by name, each a column over the side's candidates."""
        ...


def total(terms: Terms, side: Side) -> Column:
    """Add up the terms, candidate by candidate."""
    columns = list(terms.values())
    if len(columns) == 1:
        return columns[0]
    if side.vectorised:
        return np.asarray(np.sum(np.asarray(columns), axis=0))
    return [sum(row) for row in zip(*columns, strict=True)]


def least(costs: Column, request: Request, *, shift: int = 0) -> int:
    """Return the position of the least cost.

    Candidates come in the order of their ids. Of equals, a hash of the request takes one, by its
    place among them: they spread, the same request always falls the same way, and it costs the
    same for any number of them. Sides use different bits of the hash (`shift`), so that a pick on
    one says nothing of the pick on the other.
    """
    if isinstance(costs, list):
        lowest = min(costs)
        count = costs.count(lowest)
        first = costs.index(lowest)
        if count == 1:
            return first
        tied = [i for i, cost in enumerate(costs) if cost == lowest]
    else:
        first = int(costs.argmin())
        tied = np.flatnonzero(costs == costs[first]).tolist()
    if len(tied) == 1:
        return first
    return int(tied[(crc32(request.request_id.encode()) >> shift) % len(tied)])


@dataclass(frozen=True, slots=True)
class TwoSided:
    """A policy that prices each side on its own and takes the cheapest of each."""

    prefill_rule: Rule
    decode_rule: Rule

    def place(self, request: Request, cluster: ClusterView) -> Placement:
        """Return the cheapest prefill instance and the cheapest decode instance it pairs with."""
        prefill = self.choose_prefill(request, cluster)
        side = cluster.decode_side(request, prefill)
        costs = total(self.decode_rule.price(request, side), side)
        decode = side.instances[least(costs, request, shift=DECODE_BITS)]
        return paired(prefill, decode)

    def choose_prefill(self, request: Request, cluster: ClusterView) -> Instance | None:
        """Return the cheapest prefill instance; None where a pool has only MIXED ones."""
        if not cluster.has_prefill and cluster.side("mixed").slots:
            return None
        side = cluster.prefill_side(request)
        costs = total(self.prefill_rule.price(request, side), side)
        return side.instances[least(costs, request)]

    def explain(self, request: Request, cluster: ClusterView) -> Explanation:
        """Return what `place` would go by, without placing anything."""
        prefill_terms: CandidateTerms = {}
        prefill = self.choose_prefill(request, cluster)
        if prefill is not None:
            side = cluster.prefill_side(request)
            prefill_terms = by_candidate(self.prefill_rule.price(request, side), side)
        side = cluster.decode_side(request, prefill)
        return Explanation(prefill_terms, by_candidate(self.decode_rule.price(request, side), side))


def paired(prefill: Instance | None, decode: Instance) -> Placement:
    """Return the placement of two instances; one that is both needs no hand-off."""
    if prefill is None or prefill.instance_id == decode.instance_id:
        return Placement(None, decode.instance_id)
    return Placement(prefill.instance_id, decode.instance_id)


def by_candidate(terms: Terms, side: Side) -> CandidateTerms:
    """Return the terms of each candidate, by instance id."""
    return {
        instance.instance_id: {name: float(column[i]) for name, column in terms.items()}
        for i, instance in enumerate(side.instances)
    }
