"""One replica of the control plane: `python -m controlplane.app [--print-config]`."""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Sequence

import structlog
from prometheus_client import CollectorRegistry
from steelyard.v1 import control_pb2, control_pb2_grpc

from controlplane.drift_folder import DriftFolder
from controlplane.feed import SnapshotFeed
from controlplane.lengths import LengthsFolder
from controlplane.library import Library
from controlplane.metrics import ControlMetrics
from controlplane.page.routes import page_routes
from controlplane.publisher import Publisher
from controlplane.service import ControlService
from controlplane.settings import ControlPlaneSettings
from controlplane.sinks import OutcomeSink, ReportSink
from controlplane.store import Store
from controlplane.store_redis import RedisStore
from servicekit.clock import Clock, SystemClock
from servicekit.command import Service, service_main
from servicekit.errors import RedisUnavailable
from servicekit.metrics import new_registry
from servicekit.redis_client import connect
from servicekit.server import RpcServer, ServiceBinding
from servicekit.signals import stop_on_signals
from servicekit.tasks import end_tasks


class ControlPlane:
    """A replica, built but not started: `await start()`, later `await stop()`."""

    def __init__(
        self,
        settings: ControlPlaneSettings,
        *,
        store: Store | None = None,
        clock: Clock | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        clock = clock or SystemClock()
        registry = registry or new_registry()
        self.replica_id = settings.replica_id or _make_replica_id()
        self._log = structlog.get_logger("controlplane.app")
        self._store = store or redis_store(settings)
        self._tasks: list[asyncio.Task[None]] = []
        self.failure: BaseException | None = None
        metrics = ControlMetrics(registry)
        stopping = asyncio.Event()
        self.feed = SnapshotFeed(self._store, clock, metrics)
        self._reports = ReportSink(self._store, clock, metrics, settings.gather_seconds)
        self._outcomes = OutcomeSink(self._store, clock, metrics, settings.gather_seconds)
        self.publisher = Publisher(
            self._store,
            clock,
            metrics,
            LengthsFolder(self._store, half_life_seconds=settings.length_half_life_seconds),
            replica_id=self.replica_id,
            timing=settings.timing(),
            options=settings.publisher_options(),
        )
        self.drift = DriftFolder(
            self._store,
            self.feed,
            self.publisher,
            Library(self._store, metrics),
            metrics=metrics,
            clock=clock,
            publish_after_seconds=(
                settings.publish_after_seconds if settings.auto_publish else None
            ),
        )
        service = ControlService(
            self._store,
            self.feed,
            self._reports,
            self._outcomes,
            metrics=metrics,
            clock=clock,
            timing=settings.timing(),
            stopping=stopping,
        )
        add = control_pb2_grpc.add_ControlServiceServicer_to_server
        self.server = RpcServer(
            settings.server_options(),
            services=[ServiceBinding.of(control_pb2, "ControlService", add, service)],
            registry=registry,
            clock=clock,
            routes=page_routes(self.feed, self._store, self.replica_id),
            stopping=stopping,
        )

    async def start(self) -> None:
        """Accept calls; health is SERVING once Redis has answered.

        Redis need not be there yet: it is asked until it is.

        Raises:
            OSError: an address is taken or not ours.
        """
        await self.server.start()
        self._tasks = [
            asyncio.create_task(self.feed.run(), name="feed"),
            asyncio.create_task(self._reports.run(), name="reports"),
            asyncio.create_task(self._outcomes.run(), name="outcomes"),
            asyncio.create_task(self.drift.run(), name="drift"),
            asyncio.create_task(self.publisher.run(self.server.set_serving), name="publisher"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._end_on_crash)

    async def stop(self) -> None:
        """Stop gracefully: NOT_SERVING, streams end, what waits is written, the lease goes back."""
        self.server.stopping.set()
        self.feed.close()
        await self.server.stop()
        for sink in (self._reports, self._outcomes):
            try:
                await sink.flush()
            except RedisUnavailable as error:
                self._log.warning("not_written_at_stop", reason=error.message)
        await end_tasks(self._tasks)
        await self._store.close()

    def _end_on_crash(self, task: asyncio.Task[None]) -> None:
        """Stop the replica rather than let it go on without one of its loops."""
        if not task.cancelled() and task.exception() is not None:
            self._log.critical("loop_crashed", loop=task.get_name(), exc_info=task.exception())
            self.failure = task.exception()
            self.server.stopping.set()


def redis_store(settings: ControlPlaneSettings) -> RedisStore:
    """Make the store that the settings name; it connects when it is first used."""
    password = settings.redis_password
    client = connect(settings.redis_url, password=password.get_secret_value() if password else None)
    return RedisStore(
        client,
        timing=settings.timing(),
        max_outcomes=settings.max_outcomes,
        max_events=settings.max_events,
    )


async def run(settings: ControlPlaneSettings) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully.

    Raises:
        OSError: an address is taken or not ours.
        Exception: whatever ended one of the replica's loops; that is a bug.
    """
    replica = ControlPlane(settings)
    with stop_on_signals(replica.server.stopping):
        await replica.start()
        try:
            await replica.server.stopping.wait()
        finally:
            await replica.stop()
    if replica.failure is not None:
        raise replica.failure


SERVICE = Service(ControlPlaneSettings, run)


def main(arguments: Sequence[str]) -> int:
    """Run a replica, or print its settings; returns the exit code."""
    return service_main(SERVICE, print_config="--print-config" in arguments)


def _make_replica_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
