"""Asks late binding what it would do with a request, where this router decides for its pool."""

from collections.abc import Callable

from dataplane.core.late_binding import LateBinding
from dataplane.core.late_binding.preview import Preview
from dataplane.core.recording import RecordingDispatcher
from dataplane.core.scheduler import Scheduler
from dataplane.core.view import ClusterView
from dataplane.router.dispatch.hub import Hub
from dataplane.router.fleet import Fleet
from servicekit.clock import Clock


class Foresight:
    """Callable with pool and policy; None where the policy does not bind late, or others decide.

    Args:
        fleet: All pools.
        hub: Gives the hub of a pool that this router decides for; None where no router decides
            for others, and each pool's own scheduler is asked.
        clock: Tells when "now" is.
    """

    def __init__(self, fleet: Fleet, hub: Callable[[str], Hub | None] | None, clock: Clock) -> None:
        self._fleet = fleet
        self._hub = hub
        self._clock = clock

    def __call__(self, pool_name: str, policy: str) -> tuple[Preview, ClusterView] | None:
        """Return what would be done now, and what that rests on."""
        scheduler = self._scheduler(pool_name, policy)
        if not isinstance(scheduler, LateBinding | RecordingDispatcher):
            return None
        return scheduler.preview(self._clock.monotonic()), scheduler.pool.view

    def _scheduler(self, pool_name: str, policy: str) -> Scheduler | None:
        if self._hub is not None:
            hub = self._hub(pool_name)
            return None if hub is None else hub.scheduler
        driver = next((d for d in self._fleet if d.name == pool_name), None)
        return None if driver is None else driver.scheduler(policy)
