"""The dispatcher's half: one scheduler for all front ends of a pool, for as long as the lease lasts."""

from collections.abc import Callable
from typing import Protocol

import structlog

from dataplane.core.cluster import Snapshot
from dataplane.core.delegation import Forward, Submission
from dataplane.core.events import Action, Cancelled, Finished, Reject, SnapshotArrived, Tick, WakeAt
from dataplane.core.late_binding.preview import Preview
from dataplane.core.pool import Pool
from dataplane.core.request import Request
from dataplane.core.scheduler import Scheduler
from dataplane.router.dispatch.lease import Lease
from servicekit.clock import Clock, Timer

Port = Callable[[Action], None]


class Dispatches(Scheduler, Protocol):
    """A scheduler that also keeps account of what others have placed, and says what it would do."""

    @property
    def pool(self) -> Pool:
        """What it decides on."""
        ...

    def preview(self, now: float) -> Preview:
        """Return what it would do with a request at that time."""
        ...

    def adopt(
        self, request: Request, prefill_id: str, decode_id: str, generated_tokens: int, now: float
    ) -> None:
        """Take over a request that is under way."""
        ...


class Hub:
    """Decides for a pool; front ends are ports by router id.

    It decides nothing once the lease is not certainly held, and tells nobody: front ends notice by
    the silence.
    """

    def __init__(
        self, pool: str, scheduler: Dispatches, lease: Lease, token: int, clock: Clock
    ) -> None:
        self.pool = pool
        self.token = token
        self.scheduler = scheduler
        self._lease = lease
        self._clock = clock
        self._ports: dict[str, Port] = {}
        self._owners: dict[str, str] = {}
        self._timer: Timer | None = None
        self._log = structlog.get_logger("dataplane.router.dispatch")

    def __repr__(self) -> str:
        return f"<Hub {self.pool!r}, {len(self._ports)} front ends, {self.scheduler!r}>"

    @property
    def holds(self) -> bool:
        """Whether it may decide."""
        return self._lease.is_mine

    @property
    def front_ends(self) -> frozenset[str]:
        """Ids of the routers whose requests it keeps account of."""
        return frozenset(self._ports)

    def attach(self, router_id: str, port: Port) -> None:
        """Take a front end; its actions go to `port`."""
        self._drop(router_id)
        self._ports[router_id] = port

    def detach(self, router_id: str, port: Port) -> None:
        """Let a front end go with all its requests, unless it has come back by another way."""
        if self._ports.get(router_id) is port:
            self._drop(router_id)

    def receive(self, router_id: str, message: Forward) -> None:
        """Take in what a front end says."""
        if not self.holds:
            return
        now = self._clock.monotonic()
        if isinstance(message, Submission):
            request_id = message.request.request_id
            self._owners[request_id] = router_id
            if message.prefill_id or message.decode_id:
                self.scheduler.adopt(
                    message.request,
                    message.prefill_id,
                    message.decode_id,
                    message.generated_tokens,
                    now,
                )
                return
            self._deliver(self.scheduler.submit(message.request, now))
        elif self._owners.get(message.request_id) == router_id:
            self._deliver(self.scheduler.observe(message, now))
            if isinstance(message, Finished):
                self._owners.pop(message.request_id, None)

    def refresh(self, snapshot: Snapshot) -> None:
        """Take a new state of the cluster, the front ends' own load left out."""
        if self.holds:
            now = self._clock.monotonic()
            self._deliver(self.scheduler.observe(SnapshotArrived(snapshot), now))

    @property
    def in_flight(self) -> int:
        """Requests of all front ends that it keeps account of."""
        return len(self._owners)

    def stop(self) -> None:
        """Decide nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._ports.clear()

    def _drop(self, router_id: str) -> None:
        if self._ports.pop(router_id, None) is None:
            return
        now = self._clock.monotonic()
        for request_id in [r for r, owner in self._owners.items() if owner == router_id]:
            del self._owners[request_id]
            self._deliver(self.scheduler.observe(Cancelled(request_id), now))

    def _deliver(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, WakeAt):
                self._wake_at(action.at)
                continue
            port = self._ports.get(self._owners.get(action.request_id, ""))
            if port is not None and self.holds:
                port(action)
            if isinstance(action, Reject):
                self._owners.pop(action.request_id, None)

    def _wake_at(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, at - self._clock.monotonic())
        self._timer = self._clock.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self.holds:
            self._deliver(self.scheduler.observe(Tick(), self._clock.monotonic()))
