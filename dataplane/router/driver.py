"""Drives one pool's schedulers in real time: events in, actions out to the requests they are for."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from dataplane.core.events import Action, Cancelled, Event, SnapshotArrived, Tick, WakeAt
from dataplane.core.pool import Pool
from dataplane.core.request import Request
from dataplane.core.scheduler import Scheduler
from servicekit.clock import Clock, Timer

MakeScheduler = Callable[[str, Pool], Scheduler]
OnDecision = Callable[[str, float], None]


class Ticket:
    """One request's place in a scheduler; gives out the actions that are meant for it."""

    def __init__(self, request: Request, policy: str) -> None:
        self.request = request
        self.policy = policy
        self._actions: deque[Action] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    async def next(self) -> Action:
        """Return the next action, waiting for it where the scheduler holds the request back.

        Raises:
            BaseException: What the ticket was ended with.
        """
        while not self._actions:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._actions.popleft()

    def push(self, action: Action) -> None:
        """Hand an action over."""
        self._actions.append(action)
        self._wake()

    def end(self, error: BaseException) -> None:
        """Make `next` raise once the actions at hand are taken."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PoolDriver:
    """One pool: its state, a scheduler per policy in use, and the tickets of its requests.

    All schedulers of a pool share one ledger, so that requests under different policies see each
    other.
    """

    def __init__(
        self, name: str, make_scheduler: MakeScheduler, clock: Clock, on_decision: OnDecision
    ) -> None:
        self.name = name
        self._on_decision = on_decision
        self.pool = Pool()
        self._make_scheduler = make_scheduler
        self._clock = clock
        self._schedulers: dict[str, Scheduler] = {}
        self._timers: dict[str, Timer] = {}
        self._tickets: dict[str, Ticket] = {}

    def __repr__(self) -> str:
        return f"<PoolDriver {self.name!r}, {len(self._tickets)} requests, {self.pool!r}>"

    @property
    def tickets(self) -> Mapping[str, Ticket]:
        """The requests that have not ended, by id."""
        return self._tickets

    def scheduler(self, policy: str) -> Scheduler:
        """Return the scheduler of a policy, made at its first use.

        Raises:
            UnknownPolicyError: There is no policy of that name.
        """
        scheduler = self._schedulers.get(policy)
        if scheduler is None:
            scheduler = self._schedulers[policy] = self._make_scheduler(policy, self.pool)
        return scheduler

    def install(self, policy: str, scheduler: Scheduler) -> None:
        """Have a policy's requests decided by this scheduler, in place of one made by name."""
        self._schedulers[policy] = scheduler

    def deliver(self, policy: str, actions: list[Action]) -> None:
        """Hand over actions that came from elsewhere than a call of ours."""
        self._deliver(policy, actions)

    def submit(self, request: Request, policy: str) -> Ticket:
        """Give a request to a policy's scheduler.

        Raises:
            UnknownPolicyError: There is no policy of that name.
        """
        scheduler = self.scheduler(policy)
        ticket = self._tickets[request.request_id] = Ticket(request, policy)
        started_at = self._clock.monotonic()
        try:
            actions = scheduler.submit(request, started_at)
        except BaseException:
            self.close(ticket)
            raise
        self._on_decision(policy, self._clock.monotonic() - started_at)
        self._deliver(policy, actions)
        return ticket

    def observe(self, ticket: Ticket, event: Event) -> None:
        """Tell the request's scheduler what happened to it."""
        scheduler = self._schedulers[ticket.policy]
        self._deliver(ticket.policy, scheduler.observe(event, self._clock.monotonic()))

    def close(self, ticket: Ticket) -> None:
        """End a request in whatever state it is; what was ended before is left alone."""
        request_id = ticket.request.request_id
        if self._tickets.pop(request_id, None) is not None:
            self.observe(ticket, Cancelled(request_id))

    def refresh(self, event: SnapshotArrived) -> None:
        """Pass a new snapshot on."""
        self.pool.refresh(event.snapshot)
        now = self._clock.monotonic()
        for policy, scheduler in list(self._schedulers.items()):
            self._deliver(policy, scheduler.observe(event, now))

    def stop(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _deliver(self, policy: str, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, WakeAt):
                self._wake_at(policy, action.at)
                continue
            ticket = self._tickets.get(action.request_id)
            if ticket is not None:
                ticket.push(action)

    def _wake_at(self, policy: str, at: float) -> None:
        timer = self._timers.pop(policy, None)
        if timer is not None:
            timer.cancel()
        delay = max(0.0, at - self._clock.monotonic())
        self._timers[policy] = self._clock.call_later(delay, lambda: self._tick(policy))

    def _tick(self, policy: str) -> None:
        self._timers.pop(policy, None)
        now = self._clock.monotonic()
        self._deliver(policy, self._schedulers[policy].observe(Tick(), now))
