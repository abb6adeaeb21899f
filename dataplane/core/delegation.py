"""A front end's half of dispatching: one router decides for a pool, the others ask it.

Late binding needs one queue a pool. A front end hands its requests to the pool's dispatcher over a
link and gets bindings back; it keeps its own ledger all the while. When the link is lost it places
whatever waits at once, by a placement policy on that ledger; when there is a link again it tells
the dispatcher what is under way, and new requests go there. Nothing is lost and nothing doubled:
each request has one state here, and a binding that does not fit it is dropped.
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
from dataplane.core.policies.base import PlacementPolicy
from dataplane.core.pool import Pool
from dataplane.core.request import Request
from dataplane.core.scheduler import MAX_ATTEMPTS


@dataclass(frozen=True, slots=True)
class Submission:
    """A request for the dispatcher: to be placed, or placed already and under way.

    Attributes:
        prefill_id: Where its prompt is being computed; empty where it is not.
        decode_id: Where it is decoded or will be; empty where that is to be decided.
    """

    request: Request
    prefill_id: str = ""
    decode_id: str = ""
    generated_tokens: int = 0


Forward = Submission | PrefillDone | TokensStreamed | Finished | Failed


class Link(Protocol):
    """The way to a dispatcher."""

    def send(self, message: Forward) -> None:
        """Pass a message on; never waits, never fails: a broken link is told by `detach`."""
        ...


@dataclass(slots=True)
class Flight:
    """One request here.

    Attributes:
        prefilled: Its prompt is computed.
        local: Placed here, not by the dispatcher, which only keeps account of it.
    """

    request: Request
    prefill_id: str = ""
    decode_id: str = ""
    prefilled: bool = False
    local: bool = False
    attempts: int = 1


class Delegating:
    """A scheduler that asks a dispatcher where there is one."""

    def __init__(self, pool: Pool, fallback: PlacementPolicy) -> None:
        self.pool = pool
        self._fallback = fallback
        self._flights: dict[str, Flight] = {}
        self._link: Link | None = None

    def __repr__(self) -> str:
        state = "attached" if self._link is not None else "on its own"
        return f"<Delegating {state}, {len(self._flights)} in flight>"

    @property
    def attached(self) -> bool:
        """Whether there is a dispatcher."""
        return self._link is not None

    def attach(self, link: Link) -> None:
        """Take a dispatcher: tell it what is under way; new requests go there from now on."""
        self._link = link
        for flight in list(self._flights.values()):
            flight.local = True
            link.send(
                Submission(
                    flight.request,
                    "" if flight.prefilled else flight.prefill_id,
                    flight.decode_id,
                    self.pool.generated_tokens(flight.request.request_id),
                )
            )

    def detach(self) -> list[Action]:
        """Do without a dispatcher: place here what waits for a binding."""
        self._link = None
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            if not flight.prefill_id and not flight.decode_id:
                actions += self._place(flight)
            elif flight.prefilled and not flight.decode_id:
                actions += self._choose_decode(flight)
        return actions

    def submit(self, request: Request, now: float) -> list[Action]:  # noqa: ARG002
        """Hand a new request on, or place it."""
        flight = self._flights[request.request_id] = Flight(request)
        if self._link is None:
            return self._place(flight)
        self._link.send(Submission(request))
        return []

    def bound(self, action: Action) -> list[Action]:
        """Take the dispatcher's word; what does not fit the request's state is dropped."""
        if not isinstance(action, StartPrefill | StartDecode | Reject):
            return []
        flight = self._flights.get(action.request_id)
        if flight is None or flight.local or flight.decode_id:
            return []
        if isinstance(action, Reject):
            self._close(action.request_id)
            return [action]
        if isinstance(action, StartPrefill):
            return [] if flight.prefill_id else self._start_prefill(flight, action)
        return self._bind_decode(flight, action)

    def _bind_decode(self, flight: Flight, action: StartDecode) -> list[Action]:
        if flight.prefill_id and not flight.prefilled:
            return []
        if self.pool.slot(action.instance_id) is None:
            return self._failed(Failed(action.request_id, Leg.DECODE))
        return self._start_decode(flight, action.instance_id)

    def observe(self, event: Event, now: float) -> list[Action]:  # noqa: ARG002
        """Move a request on, here and with the dispatcher."""
        match event:
            case TokensStreamed():
                self.pool.streamed(event.request_id, event.count)
                self._tell(event)
            case PrefillDone():
                return self._prefilled(event)
            case Finished(request_id) | Cancelled(request_id):
                if self._close(request_id):
                    self._tell(Finished(request_id))
            case Failed():
                return self._failed(event)
            case SnapshotArrived():
                self.pool.refresh(event.snapshot)
            case _:
                pass
        return []

    def _prefilled(self, event: PrefillDone) -> list[Action]:
        flight = self._flights.get(event.request_id)
        if flight is None:
            return []
        flight.prefilled = True
        self.pool.ledger.finish_prefill(event.request_id)
        # A dispatcher in this process answers before `_tell` returns; its binding starts the decode.
        bound_before = flight.decode_id
        self._tell(event)
        if bound_before and self.pool.slot(bound_before) is not None:
            return [StartDecode(event.request_id, bound_before)]
        if bound_before:
            # It has left meanwhile; another one can pull as well.
            flight.decode_id = ""
        if self._link is None or flight.local:
            return self._choose_decode(flight)
        return []

    def _failed(self, event: Failed) -> list[Action]:
        request_id = event.request_id
        flight = self._flights.get(request_id)
        if flight is None:
            return []
        if self.pool.generated_tokens(request_id) > 0:
            return self._give_up(request_id, RejectReason.STREAM_BROKEN)
        if not event.retryable or flight.attempts >= MAX_ATTEMPTS:
            return self._give_up(request_id, RejectReason.RETRIES_EXHAUSTED)
        at_decode = event.leg is Leg.DECODE or not flight.prefill_id
        bad = flight.decode_id if at_decode else flight.prefill_id
        bad = bad if event.at_fault else ""
        self.pool.close(request_id)
        known = self._link is not None and not flight.local
        again = Flight(
            replace(flight.request, excluded=flight.request.excluded | ({bad} - {""})),
            attempts=flight.attempts + 1,
        )
        self._flights[request_id] = again
        if self._link is None:
            return self._place(again)
        if known:
            self._link.send(event)
        else:
            self._link.send(Finished(request_id))
            self._link.send(Submission(again.request))
        return []

    def _place(self, flight: Flight) -> list[Action]:
        request = flight.request
        try:
            placement = self._fallback.place(request, self.pool.view)
        except NoCandidateError as error:
            return self._give_up(request.request_id, error.reason)
        flight.local = True
        if placement.prefill_id is None:
            return self._start_decode(flight, placement.decode_id)
        flight.prefill_id, flight.decode_id = placement.prefill_id, placement.decode_id
        self.pool.charge_decode(request, placement.decode_id)
        self.pool.charge_prefill(request, placement.prefill_id)
        return [StartPrefill(request.request_id, placement.prefill_id)]

    def _choose_decode(self, flight: Flight) -> list[Action]:
        """Bind a prefilled request to the emptiest decode engine that can pull its KV."""
        request_id = flight.request.request_id
        prefill = self.pool.instance(flight.prefill_id)
        decoders = [] if prefill is None else self.pool.decoders(prefill.pairing_key)
        usable = [i for i in decoders if i.instance_id not in flight.request.excluded]
        if not usable:
            return self._failed(Failed(request_id, Leg.PREFILL))
        flight.local = True
        return self._start_decode(
            flight, min(usable, key=self.pool.committed_kv_tokens).instance_id
        )

    def _start_prefill(self, flight: Flight, action: StartPrefill) -> list[Action]:
        if self.pool.slot(action.instance_id) is None:
            self._tell(Failed(action.request_id, Leg.PREFILL))
            return []
        flight.prefill_id = action.instance_id
        self.pool.charge_prefill(flight.request, action.instance_id)
        return [action]

    def _start_decode(self, flight: Flight, instance_id: str) -> list[Action]:
        flight.decode_id = instance_id
        self.pool.charge_decode(flight.request, instance_id)
        return [StartDecode(flight.request.request_id, instance_id)]

    def _give_up(self, request_id: str, reason: RejectReason) -> list[Action]:
        self._close(request_id)
        self._tell(Finished(request_id))
        return [Reject(request_id, reason)]

    def _close(self, request_id: str) -> bool:
        self.pool.close(request_id)
        return self._flights.pop(request_id, None) is not None

    def _tell(self, message: Forward) -> None:
        if self._link is not None:
            self._link.send(message)
