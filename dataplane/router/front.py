"""Serves requests from intake to books; what every front end (gRPC, HTTP) stands on."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from steelyard.v1 import agent_pb2, router_pb2

from dataplane.router.accounts import Accounts, Ending
from dataplane.router.inflight import InflightBoard
from dataplane.router.intake import Intake, Taken
from dataplane.router.journal import Decision, Journal
from dataplane.router.legs import Legs, Payload
from dataplane.router.metrics import RouterMetrics
from dataplane.router.session import Record, Session
from servicekit.clock import Clock
from servicekit.deadline import Deadline
from servicekit.errors import SteelyardError
from servicekit.tracing import add_log_fields


@dataclass(slots=True)
class Served:
    """One request being served: its parts, for whoever relays it."""

    taken: Taken
    session: Session
    record: Record
    decision: Decision
    deadline: Deadline

    @property
    def request_id(self) -> str:
        """The request's id in the cluster."""
        return self.taken.request.request_id

    @property
    def constants_version(self) -> int:
        """Version of the constants that priced its decode side; 0 for the reference profile."""
        at = self.record.decode or self.record.prefill
        priced = self.decision.view.roster.constants.get(at.profile) if at else None
        return priced.version if priced else 0


class Front:
    """Takes requests in, runs them, books their ends."""

    def __init__(
        self,
        *,
        intake: Intake,
        legs: Legs,
        board: InflightBoard,
        accounts: Accounts,
        journal: Journal,
        metrics: RouterMetrics,
        clock: Clock,
        snapshot_age_seconds: Callable[[], float],
    ) -> None:
        self._intake = intake
        self._legs = legs
        self._board = board
        self._accounts = accounts
        self._journal = journal
        self._metrics = metrics
        self._clock = clock
        self._snapshot_age_seconds = snapshot_age_seconds
        self._sessions: dict[str, Session] = {}

    async def open(
        self,
        message: router_pb2.GenerateRequest,
        arrived_at: float,
        deadline: Deadline,
        policy: str = "",
    ) -> Served:
        """Take a request in; nothing is charged before `responses` is iterated.

        Raises:
            SteelyardError: The request is bad, or cannot be served now.
        """
        deadline.check()
        record = Record(arrived_at, self._clock.unix())
        taken = await self._intake.take(message, arrived_at, policy)
        session = Session(
            Payload(taken.request.request_id, taken.prompt_token_ids, message),
            driver=taken.driver,
            legs=self._legs,
            board=self._board,
            clock=self._clock,
            deadline=deadline,
            record=record,
        )
        decision = self.decision(taken)
        self._journal.remember(decision, record)
        return Served(taken, session, record, decision, deadline)

    def decision(self, taken: Taken) -> Decision:
        """Return what a decision about a request rests on, now."""
        pool = taken.driver.pool
        return Decision(
            request=taken.request,
            policy=taken.policy,
            pool=taken.driver.name,
            sequence=pool.sequence,
            snapshot_age_seconds=self._snapshot_age_seconds(),
            view=pool.view.frozen(),
            blind=pool.stale,
        )

    async def responses(
        self, served: Served, correlation_id: str, trace_id: str
    ) -> AsyncGenerator[agent_pb2.DecodeResponse]:
        """Run the request and yield what its decode engine sends; close it in every case.

        Raises:
            SteelyardError: The request cannot be served, or not to its end.
        """
        taken, status = served.taken, "INTERNAL"
        self._sessions[served.request_id] = served.session
        stream = served.session.stream(taken.request, taken.policy)
        try:
            async with aclosing(stream) as responses:
                async for response in responses:
                    yield response
            status = "ok"
        except SteelyardError as error:
            status = error.code.name
            raise
        except (asyncio.CancelledError, GeneratorExit):
            status = "DEADLINE_EXCEEDED" if served.deadline.passed else "CANCELLED"
            raise
        finally:
            del self._sessions[served.request_id]
            self._book(served, status, correlation_id, trace_id)

    def cancel(self, request_id: str) -> bool:
        """End a request that is being served; False where there is none of that id."""
        session = self._sessions.get(request_id)
        if session is None:
            return False
        session.cancel()
        return True

    def _book(self, served: Served, status: str, correlation_id: str, trace_id: str) -> None:
        record, taken = served.record, served.taken
        if served.decision.blind:
            self._metrics.blind.labels(taken.driver.name).inc()
        add_log_fields(
            routed_request_id=served.request_id,
            pool=taken.driver.name,
            policy=taken.policy,
            prefill_id=record.prefill.instance_id if record.prefill else "",
            decode_id=record.decode.instance_id if record.decode else "",
            prompt_tokens=taken.request.prompt_tokens,
            completion_tokens=record.completion_tokens,
            ttft_seconds=record.ttft_seconds,
            attempts=record.attempts,
        )
        self._accounts.book(
            Ending(
                decision=served.decision,
                query=taken.query,
                record=record,
                status=status,
                correlation_id=correlation_id,
                trace_id=trace_id,
                constants_version=served.constants_version,
            )
        )
