"""A tiny cluster in virtual time: engines that take their time, fail, and count what they hold.

It performs a scheduler's actions and answers with the events that a router would see. It checks
what must hold of any scheduler: engines exist when they are used, a request has one leg at a
time, and every request ends once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dataplane.core.cluster import Instance, Role
from dataplane.core.errors import RejectReason
from dataplane.core.events import (
    Action,
    Cancelled,
    Event,
    Failed,
    Finished,
    Leg,
    PrefillDone,
    Reject,
    StartDecode,
    StartPrefill,
    Tick,
    TokensStreamed,
    WakeAt,
)
from dataplane.core.request import Request
from dataplane.core.scheduler import Scheduler
from tests.unit.core.builders import arrival, roster

PREFILL_SECONDS = 0.02
TOKEN_SECONDS = 0.015


@dataclass
class Held:
    """A request as the cluster knows it; `attempt` marks what older news belong to."""

    request: Request
    output_tokens: int
    attempt: int = 0
    leg: str = "none"
    engine: str = ""
    streamed: int = 0


@dataclass
class FakeCluster:
    """Engines, the clock, and the log of all that was asked of the scheduler."""

    scheduler: Scheduler
    engines: dict[str, Instance]
    fails: Callable[[str, str], bool] = lambda _request, _engine: False
    now: float = 0.0
    version: int = 1
    held: dict[str, Held] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)
    log: list[tuple[float, object, list[Action]]] = field(default_factory=list)
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    def at(self, delay: float, what: Callable[[], None]) -> None:
        """Do something later."""
        self._count += 1
        heappush(self._queue, (self.now + delay, self._count, what))

    def run(self) -> None:
        """Let everything happen."""
        while self._queue:
            at, _, what = heappop(self._queue)
            self.now = max(self.now, at)
            what()

    def submit(self, request: Request, output_tokens: int) -> None:
        """Bring a request."""
        self.held[request.request_id] = Held(request, output_tokens)
        self._perform(request, self.scheduler.submit(request, self.now))

    def cancel(self, request_id: str) -> None:
        """Let the client of a request leave."""
        if request_id in self.held:
            self._end(request_id, "cancelled")
            self.observe(Cancelled(request_id))

    def change(self, engine: Instance | None, name: str) -> None:
        """Let an engine join, change or, None, be lost with all it has."""
        if engine is None:
            self.engines.pop(name, None)
        else:
            self.engines[name] = engine
        self.version += 1
        self.observe(arrival(roster(*self.engines.values(), version=self.version)))
        for request_id, held in list(self.held.items()):
            if engine is None and held.engine == name and request_id in self.held:
                self._news(request_id, held.attempt, self._failed)

    def observe(self, event: Event) -> None:
        """Tell the scheduler something and do what it says."""
        self._perform(event, self.scheduler.observe(event, self.now))

    def _perform(self, cause: object, actions: list[Action]) -> None:
        self.log.append((self.now, cause, actions))
        for action in actions:
            match action:
                case StartPrefill() | StartDecode():
                    self._start(action)
                case Reject():
                    assert isinstance(action.reason, RejectReason)
                    self._end(action.request_id, "rejected")
                case WakeAt():
                    self.at(max(0.0, action.at - self.now), lambda: self.observe(Tick()))

    def _start(self, action: StartPrefill | StartDecode) -> None:
        request_id = action.request_id
        held = self.held[request_id]
        engine = self.engines[action.instance_id]
        assert engine.instance_id not in held.request.excluded
        after_prefill = held.leg == "prefilled"
        held.attempt += 1
        attempt = held.attempt
        if isinstance(action, StartPrefill):
            assert engine.role is not Role.DECODE
            held.leg, held.engine = "prefill", engine.instance_id
        else:
            assert engine.role is Role.MIXED or after_prefill
            assert engine.role is not Role.PREFILL
            held.leg, held.engine = "decode", engine.instance_id
        if self.fails(request_id, engine.instance_id):
            self.at(0.01, lambda: self._news(request_id, attempt, self._failed))
        elif held.leg == "prefill":
            self.at(PREFILL_SECONDS, lambda: self._news(request_id, attempt, self._prefilled))
        else:
            self.at(TOKEN_SECONDS, lambda: self._news(request_id, attempt, self._token))

    def _news(self, request_id: str, attempt: int, what: Callable[[str], None]) -> None:
        held = self.held.get(request_id)
        if held is not None and held.attempt == attempt:
            what(request_id)

    def _failed(self, request_id: str) -> None:
        held = self.held[request_id]
        leg = Leg.PREFILL if held.leg == "prefill" else Leg.DECODE
        held.attempt += 1
        held.leg = held.engine = ""
        self.observe(Failed(request_id, leg))

    def _prefilled(self, request_id: str) -> None:
        held = self.held[request_id]
        held.leg = "prefilled"
        self.observe(PrefillDone(request_id, self.now + 30.0))

    def _token(self, request_id: str) -> None:
        held = self.held[request_id]
        held.streamed += 1
        self.observe(TokensStreamed(request_id, 1))
        if held.streamed < held.output_tokens:
            attempt = held.attempt
            self.at(TOKEN_SECONDS, lambda: self._news(request_id, attempt, self._token))
            return
        self._end(request_id, "finished")
        self.observe(Finished(request_id))

    def _end(self, request_id: str, how: str) -> None:
        assert request_id not in self.ends, f"{request_id} ended twice"
        self.ends[request_id] = how
        del self.held[request_id]
