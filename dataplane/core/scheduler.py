"""Schedulers: one synchronous object a pool that decides; shells perform what it returns.

The router's shell drives it in real time, the simulator in virtual time. `now` is any clock that
does not run backwards, in seconds.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from dataplane.core.errors import NoCandidateError, RejectReason
from dataplane.core.events import (
    Action,
    Cancelled,
    Event,
    Failed,
    Finished,
    Leg,
    PrefillDone,
    Reject,
    SnapshotArrived,
    StartDecode,
    StartPrefill,
    TokensStreamed,
)
from dataplane.core.policies.base import Placement, PlacementPolicy
from dataplane.core.pool import Pool
from dataplane.core.request import Request

MAX_ATTEMPTS = 3


class Scheduler(Protocol):
    """Decides for one pool."""

    def submit(self, request: Request, now: float) -> list[Action]:
        """Take a new request and return what is to be done at once."""
        ...

    def observe(self, event: Event, now: float) -> list[Action]:
        """Take in what happened and return what is to be done because of it."""
        ...


@dataclass(slots=True)
class Flight:
    """A request between its placement and its end."""

    request: Request
    placement: Placement
    attempts: int = 1


class Immediate:
    """Binds both sides on arrival, by a placement policy, as the paper's proxy does.

    A leg that fails before the first token is placed again, elsewhere, with a new prefill (a
    hand-off is good for one pull); after the first token nothing is retried.
    """

    def __init__(
        self, policy: PlacementPolicy, pool: Pool, *, max_attempts: int = MAX_ATTEMPTS
    ) -> None:
        self.policy = policy
        self.pool = pool
        self._max_attempts = max_attempts
        self._flights: dict[str, Flight] = {}

    def __repr__(self) -> str:
        return f"<Immediate {len(self._flights)} in flight, {self.pool!r}>"

    def submit(self, request: Request, now: float) -> list[Action]:  # noqa: ARG002
        """Place a request and start its first leg."""
        try:
            placement = self.policy.place(request, self.pool.view)
        except NoCandidateError as error:
            return [Reject(request.request_id, error.reason)]
        flight = Flight(request, placement)
        self._flights[request.request_id] = flight
        return [self._start(flight)]

    def observe(self, event: Event, now: float) -> list[Action]:  # noqa: ARG002
        """Move a request on."""
        match event:
            case TokensStreamed():
                self.pool.streamed(event.request_id, event.count)
            case PrefillDone():
                return self._prefilled(event)
            case Finished() | Cancelled():
                self._flights.pop(event.request_id, None)
                self.pool.close(event.request_id)
            case Failed():
                return self._failed(event)
            case SnapshotArrived():
                self.pool.refresh(event.snapshot)
            case _:
                pass
        return []

    def _start(self, flight: Flight) -> Action:
        request, placement = flight.request, flight.placement
        self.pool.charge_decode(request, placement.decode_id)
        if placement.prefill_id is None:
            return StartDecode(request.request_id, placement.decode_id)
        self.pool.charge_prefill(request, placement.prefill_id)
        return StartPrefill(request.request_id, placement.prefill_id)

    def _prefilled(self, event: PrefillDone) -> list[Action]:
        flight = self._flights.get(event.request_id)
        if flight is None:
            return []
        if self.pool.instance(flight.placement.decode_id) is None:
            # Gone since it was chosen. The router may not know yet; the roster does.
            return self._failed(Failed(event.request_id, Leg.DECODE))
        self.pool.ledger.finish_prefill(event.request_id)
        return [StartDecode(event.request_id, flight.placement.decode_id)]

    def _failed(self, event: Failed) -> list[Action]:
        flight = self._flights.pop(event.request_id, None)
        if flight is None:
            return []
        streamed = self.pool.generated_tokens(event.request_id) > 0
        self.pool.close(event.request_id)
        if streamed:
            return [Reject(event.request_id, RejectReason.STREAM_BROKEN)]
        if not event.retryable or flight.attempts >= self._max_attempts:
            return [Reject(event.request_id, RejectReason.RETRIES_EXHAUSTED)]
        return self._place_again(flight, event)

    def _place_again(self, flight: Flight, event: Failed) -> list[Action]:
        placement = flight.placement
        decode_failed = event.leg is Leg.DECODE or placement.prefill_id is None
        bad = placement.decode_id if decode_failed else str(placement.prefill_id)
        excluded = flight.request.excluded | ({bad} if event.at_fault else set())
        request = replace(flight.request, excluded=excluded)
        try:
            again = self.policy.place(request, self.pool.view)
        except NoCandidateError:
            return [Reject(event.request_id, RejectReason.RETRIES_EXHAUSTED)]
        retried = Flight(request, again, flight.attempts + 1)
        self._flights[event.request_id] = retried
        return [self._start(retried)]
