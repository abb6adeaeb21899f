"""Decisions without dispatch: reservations, receipts, explanations."""

import asyncio
from collections.abc import Mapping
from typing import Any

from steelyard.v1 import router_pb2

from dataplane.core.cluster import Instance
from dataplane.core.errors import NoCandidateError
from dataplane.core.estimate import Estimate, estimate
from dataplane.core.policies.base import CandidateTerms, Placement
from dataplane.core.policies.registry import POLICIES, Policy, make_policy
from dataplane.core.pool import Pool
from dataplane.core.request import Request
from dataplane.core.view import ClusterView
from dataplane.router.errors import rejection


class Desk:
    """Places requests by a pool's policy without dispatching them.

    Policies that bind late have no placement on arrival; their answer here is the fallback's.

    Args:
        fallback: Name of the placement policy that answers for schedulers that bind late.
        settings: Settings by policy, the same as those of the schedulers.
    """

    def __init__(self, *, fallback: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self._fallback = fallback
        self._settings = settings
        self._policies: dict[tuple[str, str], Policy] = {}
        self._reservations: dict[str, tuple[Pool, asyncio.TimerHandle]] = {}

    def policy(self, pool_name: str, name: str) -> Policy:
        """Return a pool's placement policy by name, or the fallback for one that binds late."""
        key = (pool_name, name)
        policy = self._policies.get(key)
        if policy is None:
            placing = self.answering(name)
            policy = make_policy(placing, self._settings.get(placing))
            self._policies[key] = policy
        return policy

    def answering(self, name: str) -> str:
        """Return the policy that answers for one: itself, or the fallback where it binds late."""
        return name if name in POLICIES else self._fallback

    def place(self, pool_name: str, request: Request, name: str, view: ClusterView) -> Placement:
        """Return where a request would go.

        Raises:
            Unavailable: No instance can take it.
        """
        try:
            return self.policy(pool_name, name).place(request, view)
        except NoCandidateError as error:
            raise rejection(error.reason) from error

    def reserve(self, pool: Pool, request: Request, placement: Placement, seconds: float) -> str:
        """Charge a placement to the ledger for a while and return the reservation's id."""
        pool.charge_decode(request, placement.decode_id)
        if placement.prefill_id is not None:
            pool.charge_prefill(request, placement.prefill_id)
        timer = asyncio.get_running_loop().call_later(seconds, self.cancel, request.request_id)
        self._reservations[request.request_id] = (pool, timer)
        return request.request_id

    def cancel(self, reservation_id: str) -> bool:
        """Free a reservation; False where there is none of that id."""
        entry = self._reservations.pop(reservation_id, None)
        if entry is None:
            return False
        pool, timer = entry
        timer.cancel()
        return pool.close(reservation_id)

    def stop(self) -> None:
        """Free all reservations."""
        for reservation_id in list(self._reservations):
            self.cancel(reservation_id)

    def predict(
        self, pool: Pool, request: Request, prefill: Instance | None, decode: Instance | None
    ) -> Estimate:
        """Predict the latencies of a placement that is not charged yet."""
        probe = f"{request.request_id}?"
        slots = [None if i is None else pool.slot(i.instance_id) for i in (prefill, decode)]
        if slots[0] is not None:
            pool.ledger.charge_prefill(probe, slots[0], request.prompt_tokens)
        if slots[1] is not None:
            pool.ledger.charge_decode(probe, slots[1], request.prompt_tokens, 1.0)
        try:
            return estimate(pool, request, prefill, decode)
        finally:
            pool.ledger.close(probe)

    def explain(
        self, pool_name: str, request: Request, name: str, view: ClusterView
    ) -> tuple[list[router_pb2.CandidateCost], list[router_pb2.CandidateCost]]:
        """Return every candidate's price on both sides, cheapest first, the excluded ones last.

        Raises:
            Unavailable: No instance could take the request.
        """
        try:
            explanation = self.policy(pool_name, name).explain(request, view)
        except NoCandidateError as error:
            raise rejection(error.reason) from error
        sides = []
        for terms, wrong_role in ((explanation.prefill, "decode"), (explanation.decode, "prefill")):
            sides.append([*_ranked(terms), *_excluded(terms, wrong_role, request, view)])
        return sides[0], sides[1]


def _ranked(terms: CandidateTerms) -> list[router_pb2.CandidateCost]:
    rows = [
        router_pb2.CandidateCost(instance_id=name, total=sum(parts.values()), terms=parts)
        for name, parts in terms.items()
    ]
    return sorted(rows, key=lambda row: (row.total, row.instance_id))


def _excluded(
    terms: CandidateTerms, wrong_role: str, request: Request, view: ClusterView
) -> list[router_pb2.CandidateCost]:
    rows = []
    for instance in view.roster.instances:
        if instance.instance_id in terms or instance.role.value == wrong_role:
            continue
        if instance.instance_id in request.excluded:
            reason = "it failed this request before"
        elif instance.state.value != "ready":
            reason = f"it is {instance.state.name}"
        else:
            reason = "no instance of the other side shares its KV layout"
        rows.append(router_pb2.CandidateCost(instance_id=instance.instance_id, excluded=reason))
    return rows
