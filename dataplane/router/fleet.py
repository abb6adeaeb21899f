"""All pools of a router: who is there, by name, and what arrives about them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from dataplane.core.cluster import Snapshot, empty_measurements
from dataplane.core.errors import RejectReason
from dataplane.core.events import SnapshotArrived
from dataplane.core.predictor import HistogramPredictor
from dataplane.router.driver import MakeScheduler, OnDecision, PoolDriver
from dataplane.router.journal import Journal
from dataplane.router.snapshots import ClusterState
from servicekit.clock import Clock
from servicekit.errors import InvalidArgument, NotFound, Unavailable


class Fleet:
    """The pools by name; a pool appears with its first instance and stays, empty, after its last."""

    def __init__(
        self,
        make_scheduler: MakeScheduler,
        predictor: HistogramPredictor,
        journal: Journal,
        clock: Clock,
        on_decision: OnDecision,
    ) -> None:
        self.predictor = predictor
        self._make_scheduler = make_scheduler
        self._journal = journal
        self._clock = clock
        self._on_decision = on_decision
        self._drivers: dict[str, PoolDriver] = {}
        self._pool_listeners: list[Callable[[PoolDriver], None]] = []
        self.sequence = 0

    def __iter__(self) -> Iterator[PoolDriver]:
        return iter(self._drivers.values())

    def on_pool(self, listener: Callable[[PoolDriver], None]) -> None:
        """Have a listener called with every pool that appears, before it gets its first snapshot."""
        self._pool_listeners.append(listener)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return sum(len(driver.tickets) for driver in self._drivers.values())

    @property
    def ledger_requests(self) -> int:
        """Requests and reservations that the ledgers charge somewhere."""
        return sum(len(driver.pool.ledger) for driver in self._drivers.values())

    def addresses(self) -> set[str]:
        """Return the addresses of all agents there are."""
        return {i.address for d in self._drivers.values() for i in d.pool.roster.instances}

    def arrived(self, state: ClusterState) -> None:
        """Take a new state of the cluster."""
        self.sequence = state.sequence
        for name, snapshot in state.pools.items():
            driver = self._drivers.get(name)
            if driver is None:
                driver = PoolDriver(name, self._make_scheduler, self._clock, self._on_decision)
                self._drivers[name] = driver
                for listener in self._pool_listeners:
                    listener(driver)
            self._journal.write_roster(name, snapshot.roster)
            driver.refresh(SnapshotArrived(snapshot))
        for name in self._drivers.keys() - state.pools.keys():
            self._empty(self._drivers[name], state)
        if state.lengths is not None:
            self.predictor.share(state.lengths)

    def driver(self, model: str) -> PoolDriver:
        """Return the pool that serves a model; an empty name is the only model there is.

        Raises:
            NotFound: No pool serves it; the message names those that there are.
            InvalidArgument: No model is named and there is more than one.
            Unavailable: No instance was ever seen.
        """
        names = sorted(self._drivers)
        if not names:
            raise Unavailable(
                "no instance has joined the cluster yet",
                reason=RejectReason.NO_PREFILL_INSTANCE.value,
                retry_after_seconds=1.0,
            )
        if model:
            found = [n for n in names if n == model or n.partition("@")[0] == model]
            if found:
                return self._drivers[found[-1]]
            known = ", ".join(names)
            raise NotFound(
                f"model: no pool serves {model!r}; there are: {known}",
                reason="UNKNOWN_MODEL",
                metadata={"field": "model", "known": known},
            )
        if len(names) == 1:
            return self._drivers[names[0]]
        known = ", ".join(names)
        raise InvalidArgument.of("model", f"is empty and the cluster serves: {known}")

    def _empty(self, driver: PoolDriver, state: ClusterState) -> None:
        """Tell a pool that its last instance has left."""
        roster = driver.pool.roster
        if not roster.instances:
            return
        roster = replace(roster, version=state.roster_version, instances=())
        self._journal.write_roster(driver.name, roster)
        snapshot = Snapshot(
            sequence=state.sequence, roster=roster, measurements=empty_measurements(0)
        )
        driver.refresh(SnapshotArrived(snapshot))

    def stop(self) -> None:
        """Cancel all timers."""
        for driver in self._drivers.values():
            driver.stop()
