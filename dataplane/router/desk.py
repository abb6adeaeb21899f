"""Decisions without dispatch: reservations, receipts, explanations."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.v1 import router_pb2

from dataplane.core.cluster import Instance
from dataplane.core.errors import NoCandidateError
from dataplane.core.estimate import Estimate, estimate
from dataplane.core.late_binding.preview import Preview
from dataplane.core.policies.base import CandidateTerms, Explanation, Placement
from dataplane.core.policies.registry import POLICIES, Policy, make_policy
from dataplane.core.pool import Pool
from dataplane.core.request import Request
from dataplane.core.view import ClusterView
from dataplane.router.errors import rejection

Foresee = Callable[[str, str], tuple[Preview, ClusterView] | None]
"""Of a pool and a policy that binds late, what it would do now and what it sees; None where it is
not this router that decides."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a request would go.

    Attributes:
        policy: Who says so: the policy asked for, or the fallback.
        held_back: What the policy asked for would have it wait for; empty where nothing.
    """

    placement: Placement
    policy: str
    held_back: str = ""


@dataclass(frozen=True, slots=True)
class Explained:
    """Every candidate's price on both sides, cheapest first, the excluded ones last.

    Attributes:
        priced_by: Whose prices these are.
        placement: Where it would go by the policy's own word; None where it would wait, and
            where that was not asked.
        held_back: As an Answer's.
    """

    prefill: list[router_pb2.CandidateCost]
    decode: list[router_pb2.CandidateCost]
    priced_by: str
    placement: Placement | None = None
    held_back: str = ""


class Desk:
    """Places requests by a pool's policy without dispatching them.

    Policies that bind late say what they would do now; where that is to wait, or where another
    router decides for the pool, the fallback's placement is the answer.

    Args:
        fallback: Name of the placement policy that answers for schedulers that bind late.
        settings: Settings by policy, the same as those of the schedulers.
        foresee: Asks policies that bind late; without it the fallback always answers.
    """

    def __init__(
        self,
        *,
        fallback: str,
        settings: Mapping[str, Mapping[str, Any]],
        foresee: Foresee = lambda _pool, _policy: None,
    ) -> None:
        self._foresee = foresee
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

    def answer(
        self, pool_name: str, request: Request, name: str, view: ClusterView, *, reserving: bool
    ) -> Answer:
        """Return where a request would go now and who says so.

        Args:
            pool_name: The pool.
            request: The request.
            name: The policy asked for.
            view: What this router sees.
            reserving: It will be charged here, where a policy that binds late does not see it:
                the fallback places it.

        Raises:
            Unavailable: No instance can take it.
        """
        foreseen = None if name in POLICIES else self._foresee(pool_name, name)
        held_back = "" if foreseen is None else foreseen[0].held_back(request)
        if foreseen is None or held_back or reserving:
            placement = self.place(pool_name, request, name, view)
            return Answer(placement, self.answering(name), held_back)
        preview, seen = foreseen
        try:
            return Answer(preview.place(request, seen), name)
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
        self, pool_name: str, request: Request, name: str, view: ClusterView, *, now: bool = False
    ) -> Explained:
        """Price every candidate.

        Args:
            pool_name: The pool.
            request: The request.
            name: The policy that decides.
            view: What the decision rests on.
            now: The question is what would become of it now, not what became of it: a policy that
                binds late answers for itself, if this router decides for the pool.

        Raises:
            Unavailable: No instance could take the request.
        """
        foreseen = self._foresee(pool_name, name) if now and name not in POLICIES else None
        try:
            if foreseen is None:
                explanation = self.policy(pool_name, name).explain(request, view)
                return Explained(*_sides(explanation, request, view), self.answering(name))
            preview, seen = foreseen
            sides = _sides(preview.explain(request, seen), request, seen)
            held_back = preview.held_back(request)
            placement = None if held_back else preview.place(request, seen)
        except NoCandidateError as error:
            raise rejection(error.reason) from error
        return Explained(*sides, name, placement, held_back)


def _sides(
    explanation: Explanation, request: Request, view: ClusterView
) -> tuple[list[router_pb2.CandidateCost], list[router_pb2.CandidateCost]]:
    prefill, decode = explanation.prefill, explanation.decode
    return (
        [*_ranked(prefill), *_excluded(prefill, "decode", request, view)],
        [*_ranked(decode), *_excluded(decode, "prefill", request, view)],
    )


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
