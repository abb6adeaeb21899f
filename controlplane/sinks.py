"""Reports and outcomes on their way to the store: gathered for some ms, written in one go.

While the store is away reports wait here, the latest of each instance, and outcomes up to a limit.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from controlplane.core.values import Outcome, Report
from controlplane.errors import Unregistered
from controlplane.metrics import ControlMetrics
from controlplane.store import MemberStore, StreamStore
from servicekit.clock import Clock
from servicekit.errors import RedisUnavailable

_RETRY_SECONDS = 0.1
_MAX_REFUSED = 10_000
_MAX_WAITING_OUTCOMES = 20_000
_BATCH = 500


class Gatherer:
    """Calls `flush` some ms after the first `wake`, and again while the store is away."""

    def __init__(
        self, flush: Callable[[], Awaitable[None]], clock: Clock, gather_seconds: float, name: str
    ) -> None:
        self._flush = flush
        self._clock = clock
        self._gather_seconds = gather_seconds
        self._name = name
        self._log = structlog.get_logger("controlplane.sinks")
        self._waiting = asyncio.Event()

    def wake(self) -> None:
        """Say that something waits to be written."""
        self._waiting.set()

    async def run(self) -> None:
        """Write what comes until cancelled."""
        while True:
            await self._waiting.wait()
            await self._clock.sleep(self._gather_seconds)
            self._waiting.clear()
            try:
                await self._flush()
            except RedisUnavailable as error:
                self._log.debug("writing_interrupted", what=self._name, reason=error.message)
                self._waiting.set()
                await self._clock.sleep(_RETRY_SECONDS)


class ReportSink:
    """The latest report of each instance, on its way to the store."""

    def __init__(
        self,
        store: MemberStore,
        clock: Clock,
        metrics: ControlMetrics,
        gather_seconds: float,
    ) -> None:
        self._gatherer = Gatherer(self.flush, clock, gather_seconds, "reports")
        self.run = self._gatherer.run
        self._store = store
        self._metrics = metrics
        self._pending: dict[str, Report] = {}
        self._refused: dict[tuple[str, str], None] = {}

    async def admit(self, instance_id: str, epoch: str) -> None:
        """Make sure that an epoch is registered, at the beginning of its stream.

        While the store is away everybody is let in; who is not registered learns it later.

        Raises:
            Unregistered: it is not.
        """
        self._refused.pop((instance_id, epoch), None)
        try:
            member = await self._store.member(instance_id)
        except RedisUnavailable:
            return
        if member is None or member.engine.epoch != epoch:
            self._metrics.reports.labels("unregistered").inc()
            raise _unregistered(instance_id, epoch)

    def offer(self, report: Report) -> None:
        """Take a report.

        Raises:
            Unregistered: the store refused an earlier one of this epoch.
        """
        key = (report.instance_id, report.epoch)
        if key in self._refused:
            del self._refused[key]
            self._metrics.reports.labels("unregistered").inc()
            raise _unregistered(*key)
        self._pending[report.instance_id] = report
        self._metrics.reports.labels("accepted").inc()
        self._gatherer.wake()

    async def flush(self) -> None:
        """Write the reports that wait.

        Raises:
            RedisUnavailable: nothing is lost, it waits on.
        """
        batch, self._pending = self._pending, {}
        try:
            refused = await self._store.write_reports(list(batch.values()))
        except RedisUnavailable:
            self._pending = batch | self._pending
            raise
        for key in sorted(refused):
            self._refused[key] = None
        while len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]


class OutcomeSink:
    """Finished requests on their way to the stream."""

    def __init__(
        self,
        store: StreamStore,
        clock: Clock,
        metrics: ControlMetrics,
        gather_seconds: float,
    ) -> None:
        self._gatherer = Gatherer(self.flush, clock, gather_seconds, "outcomes")
        self.run = self._gatherer.run
        self._store = store
        self._metrics = metrics
        self._pending: deque[Outcome] = deque()
        self._taken = 0
        self._done = 0
        self._progress = asyncio.Event()
        self._writing = asyncio.Lock()

    def offer(self, outcome: Outcome) -> int:
        """Take an outcome; returns the ticket that `written` waits for."""
        self._taken += 1
        self._pending.append(outcome)
        if len(self._pending) > _MAX_WAITING_OUTCOMES:
            self._pending.popleft()
            self._metrics.outcomes_dropped.inc()
            self._advance(1)
        self._gatherer.wake()
        return self._taken

    async def written(self, ticket: int, timeout_seconds: float) -> None:
        """Wait until an outcome is stored.

        Raises:
            RedisUnavailable: it is not within the time; it waits on to be stored.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._done < ticket:
                    await self._progress.wait()
        except TimeoutError as error:
            raise RedisUnavailable(
                f"{ticket - self._done} outcomes are not stored yet", retry_after_seconds=1.0
            ) from error

    async def flush(self) -> None:
        """Write the outcomes that wait, in order.

        Raises:
            RedisUnavailable: nothing is lost, it waits on.
        """
        # Two at once (the gatherer's and that of a stop) would write the same ones.
        async with self._writing:
            while self._pending:
                await self._write_batch()

    async def _write_batch(self) -> None:
        batch = [self._pending[i] for i in range(min(_BATCH, len(self._pending)))]
        await self._store.add_outcomes(batch)
        kept = 0
        for outcome in batch:  # some may have been dropped for room meanwhile
            if self._pending and self._pending[0] is outcome:
                self._pending.popleft()
                kept += 1
        self._advance(kept)

    def _advance(self, count: int) -> None:
        self._done += count
        progress, self._progress = self._progress, asyncio.Event()
        progress.set()


def _unregistered(instance_id: str, epoch: str) -> Unregistered:
    return Unregistered(
        f"{instance_id} is not registered under epoch {epoch}; register again",
        metadata={"instance_id": instance_id, "epoch": epoch},
    )
