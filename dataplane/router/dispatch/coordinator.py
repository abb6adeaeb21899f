"""Keeps each pool's front end attached to whoever holds the pool's lease."""

import asyncio
from collections.abc import Callable

import redis.asyncio
import structlog

from dataplane.core.delegation import Delegating
from dataplane.core.events import Action
from dataplane.core.pool import Pool
from dataplane.router.dispatch.hub import Dispatches, Hub
from dataplane.router.dispatch.lease import Holder, Lease
from dataplane.router.dispatch.links import LocalLink, RemoteLink
from dataplane.router.driver import PoolDriver
from dataplane.router.snapshots import ClusterState
from servicekit.clock import Clock
from servicekit.tasks import end_tasks

_RETRY_SECONDS = 0.1
MakeDispatcher = Callable[[Pool, str, int], Dispatches]
"""Of a fresh pool, its name and the lease's token."""


class PoolCoordinator:
    """One pool: its lease, the hub while the lease is ours, and the link of our own front end."""

    def __init__(
        self,
        driver: PoolDriver,
        delegating: Delegating,
        policy: str,
        *,
        router_id: str,
        clock: Clock,
        make_scheduler: MakeDispatcher,
    ) -> None:
        self.driver = driver
        self.hub: Hub | None = None
        self._delegating = delegating
        self._policy = policy
        self._router_id = router_id
        self._clock = clock
        self._make_scheduler = make_scheduler
        self._lease: Lease | None = None
        self._link: LocalLink | RemoteLink | None = None
        self._state: ClusterState | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._log = structlog.get_logger("dataplane.router.dispatch")

    def follow(self, lease: Lease) -> None:
        """Say which lease is followed; its `on_change` is `changed`."""
        self._lease = lease

    def changed(self, holder: Holder | None) -> None:
        """Take in that the lease has another holder, or none."""
        self._leave()
        if holder is None or self._lease is None:
            return
        if holder.router_id == self._router_id and self._lease.is_mine:
            self._decide(self._lease, holder)
        else:
            self._connect(holder)

    def arrived(self, state: ClusterState) -> None:
        """Pass a new state on to the hub."""
        self._state = state
        hub = self.hub
        if hub is None:
            return
        if not hub.holds:
            # The lease ran out while nobody looked: a frozen process wakes here.
            self._leave()
            return
        snapshot = state.leaving_out(hub.front_ends).get(self.driver.name)
        if snapshot is not None:
            hub.refresh(snapshot)

    def stop(self) -> None:
        """Take leave of everything; what waits for a binding is placed here and finishes."""
        self._leave()

    def _decide(self, lease: Lease, holder: Holder) -> None:
        name, token = self.driver.name, holder.token
        hub = Hub(name, self._make_scheduler(Pool(), name, token), lease, token, self._clock)
        self.hub = hub
        if self._state is not None:
            self.arrived(self._state)
        self._link = LocalLink(hub, self._router_id, self._take)
        self._delegating.attach(self._link)

    def _connect(self, holder: Holder) -> None:
        self._link = RemoteLink(
            holder,
            self.driver.name,
            router_id=self._router_id,
            clock=self._clock,
            on_ready=self._ready,
            on_action=self._take,
            on_lost=self._lost,
        )

    def _ready(self, link: RemoteLink) -> None:
        if link is self._link:
            self._delegating.attach(link)

    def _take(self, action: Action) -> None:
        self.driver.deliver(self._policy, self._delegating.bound(action))

    def _lost(self, link: RemoteLink, reason: str) -> None:
        if link is not self._link:
            return
        holder = link.holder
        if self._delegating.attached:
            self._log.warning(
                "dispatcher_lost",
                pool=self.driver.name,
                dispatcher=holder.router_id,
                token=holder.token,
                reason=reason,
            )
        self._leave()
        self._retry = asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._again, holder)

    def _again(self, holder: Holder) -> None:
        self._retry = None
        if self._link is None and self._lease is not None and self._lease.holder == holder:
            self.changed(holder)

    def _leave(self) -> None:
        """Let go of dispatcher and hub; what waits for a binding is placed by the fallback."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        link, self._link = self._link, None
        hub, self.hub = self.hub, None
        self.driver.deliver(self._policy, self._delegating.detach())
        if link is not None:
            link.close()
        if hub is not None:
            hub.stop()


class Dispatching:
    """All pools' coordinators of one router."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        router_id: str,
        address: Callable[[], str],
        policy: str,
        clock: Clock,
        make_scheduler: MakeDispatcher,
        make_front: Callable[[Pool], Delegating],
    ) -> None:
        self._client = client
        self._router_id = router_id
        self._address = address
        self._policy = policy
        self._clock = clock
        self._make_scheduler = make_scheduler
        self._make_front = make_front
        self._pools: dict[str, PoolCoordinator] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._log = structlog.get_logger("dataplane.router.dispatch")

    def hub(self, pool: str) -> Hub | None:
        """Return the hub of a pool that this router decides for; None where it does not."""
        coordinator = self._pools.get(pool)
        hub = None if coordinator is None else coordinator.hub
        return hub if hub is not None and hub.holds else None

    def add(self, driver: PoolDriver) -> None:
        """Take up a pool."""
        delegating = self._make_front(driver.pool)
        driver.install(self._policy, delegating)
        coordinator = PoolCoordinator(
            driver,
            delegating,
            self._policy,
            router_id=self._router_id,
            clock=self._clock,
            make_scheduler=self._make_scheduler,
        )
        lease = Lease(
            self._client,
            driver.name,
            router_id=self._router_id,
            address=self._address(),
            clock=self._clock,
            on_change=coordinator.changed,
        )
        coordinator.follow(lease)
        self._pools[driver.name] = coordinator
        task = asyncio.get_running_loop().create_task(lease.run(), name=f"lease-{driver.name}")
        task.add_done_callback(self._report_crash)
        self._tasks.append(task)

    def arrived(self, state: ClusterState) -> None:
        """Pass a new state of the cluster on."""
        for coordinator in self._pools.values():
            coordinator.arrived(state)

    async def stop(self) -> None:
        """Give all leases up and take leave; safe to call twice."""
        await end_tasks(self._tasks)
        for coordinator in self._pools.values():
            coordinator.stop()

    def _report_crash(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("task_crashed", task=task.get_name(), exc_info=error)
