"""Constructs a router and runs it: `python -m dataplane.router.app [--print-config]`."""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import redis.asyncio
import structlog
import uvloop
from steelyard.v1 import dispatch_pb2, dispatch_pb2_grpc, router_pb2, router_pb2_grpc

from dataplane.core.delegation import Delegating
from dataplane.core.errors import InvalidSettingError, UnknownPolicyError
from dataplane.core.late_binding import LateBinding
from dataplane.core.policies.registry import make_policy
from dataplane.core.pool import Pool
from dataplane.core.predictor import HistogramPredictor
from dataplane.core.recording import Recording, RecordingDispatcher, Row
from dataplane.core.scheduler import Scheduler
from dataplane.core.schedulers import LATE_BINDING, make_late_binding, make_scheduler
from dataplane.gateway.app import Gateway, picker_services
from dataplane.router.accounts import Accounts
from dataplane.router.agents import AgentChannels
from dataplane.router.desk import Desk
from dataplane.router.dispatch.coordinator import Dispatching
from dataplane.router.dispatch.hub import Dispatches
from dataplane.router.dispatch.service import DispatchServicer
from dataplane.router.feed import SnapshotFeed
from dataplane.router.fleet import Fleet
from dataplane.router.foresight import Foresight
from dataplane.router.front import Front
from dataplane.router.inflight import InflightBoard
from dataplane.router.intake import Intake
from dataplane.router.journal import Journal
from dataplane.router.legs import Legs
from dataplane.router.metrics import RouterMetrics
from dataplane.router.outcomes import OutcomeReporter
from dataplane.router.service import RouterServicer
from dataplane.router.settings import RouterSettings
from dataplane.router.snapshots import SnapshotReader
from dataplane.router.tokenizers import Tokenizers
from servicekit.clock import Clock, clock_at
from servicekit.command import Service, service_main
from servicekit.errors import SettingsInvalid
from servicekit.metrics import new_registry
from servicekit.redis_client import connect
from servicekit.server import RpcServer, ServiceBinding
from servicekit.signals import stop_on_signals
from servicekit.tasks import end_tasks

_KEEP_CHANNELS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Router:
    """A running router's parts that others may want to look at."""

    server: RpcServer
    fleet: Fleet
    front: Front
    board: InflightBoard
    journal: Journal
    gateway: Gateway | None


class RouterApp:
    """One router: `async with RouterApp(settings) as router:` serves until the block ends."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        clock: Clock | None = None,
        stop: asyncio.Event | None = None,
    ) -> None:
        """Take settings; nothing is opened before it is entered.

        Args:
            settings: What it is told.
            clock: Its time.
            stop: Set should one of its loops end by an error: without it the router is no use.
        """
        self._settings = settings
        self._stop = stop or asyncio.Event()
        self._clock = clock or clock_at(settings.clock_rate)
        self._router_id = settings.router_id or f"{socket.gethostname()}-{os.getpid()}"
        self._registry = new_registry()
        self._events = Journal(settings.events_path, self._clock)
        self._stack = AsyncExitStack()
        self._log = structlog.get_logger("dataplane.router")
        self.failure: BaseException | None = None
        """What ended one of its loops; that is a bug."""

    async def __aenter__(self) -> Router:
        """Construct everything, start serving, and return the parts.

        Raises:
            OSError: An address is taken.
            UnknownPolicyError: The policy set is not registered.
            InvalidSettingError: A policy setting is outside its range.
        """
        try:
            return await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> Router:
        settings, clock = self._settings, self._clock
        client = self._redis()
        agents = AgentChannels()
        self._stack.push_async_callback(agents.close)
        journal = Journal(settings.journal_path, clock)
        metrics = RouterMetrics(self._registry)
        feed = SnapshotFeed(
            client,
            SnapshotReader(self._router_id),
            clock=clock,
            stale_after_seconds=settings.stale_after_seconds,
        )
        fleet = self._fleet(journal, metrics, feed)
        board = InflightBoard(client, clock=clock, router_id=self._router_id)
        reporter = OutcomeReporter(settings.control_planes, clock)
        legs = Legs(
            agents,
            clock=clock,
            router_id=self._router_id,
            coalesce_seconds=settings.coalesce_seconds,
        )
        tokenizers = Tokenizers(agents)
        intake = Intake(fleet, tokenizers, clock=clock, default_policy=settings.policy)
        accounts = Accounts(
            router_id=self._router_id,
            journal=journal,
            reporter=reporter,
            metrics=metrics,
            predictor=fleet.predictor,
            clock=clock,
            journal_views=settings.journal_views,
        )
        front = Front(
            intake=intake,
            legs=legs,
            board=board,
            accounts=accounts,
            journal=journal,
            metrics=metrics,
            clock=clock,
            snapshot_age_seconds=lambda: feed.age_seconds,
        )
        dispatching = self._dispatching(client, fleet, feed, lambda: server.address)
        desk, picker = self._picker(fleet, tokenizers, agents, intake, dispatching)
        server = self._server(front, intake, journal, dispatching, desk=desk, more=picker)
        self._background("feed", feed.run())
        self._background("journal", journal.run())
        self._background("board", board.run())
        self._background("outcomes", reporter.run())
        self._background("channels", _keep_channels(agents, fleet, clock))
        self._background("serving", _serve_from(feed, server))
        for last in (board.flush, reporter.settle, legs.settle):
            self._stack.push_async_callback(last)
        await server.start()
        for end in (server.stop, dispatching.stop):  # another router decides while we finish
            self._stack.push_async_callback(end)
        gateway = await self._gateway(front, fleet, tokenizers, agents)
        self._log.info("router_started", router_id=self._router_id, address=server.address)
        return Router(server, fleet, front, board, journal, gateway)

    async def __aexit__(self, *_: object) -> None:
        """Stop serving, end what runs, close what is open."""
        await self._stack.aclose()

    def _redis(self) -> redis.asyncio.Redis:
        password = self._settings.redis_password
        client = connect(
            self._settings.redis_url, password=password.get_secret_value() if password else None
        )
        self._stack.push_async_callback(client.aclose)
        return client

    def _fleet(self, journal: Journal, metrics: RouterMetrics, feed: SnapshotFeed) -> Fleet:
        settings, events = self._settings, self._events
        self._background("events", events.run())

        def scheduler(name: str, pool: Pool) -> Scheduler:
            made = make_scheduler(name, settings.policy_settings.get(name, {}), pool)
            if not events.enabled:
                return made

            def write(row: Row) -> None:
                events.write({**row, "policy": name})

            if isinstance(made, LateBinding):
                return RecordingDispatcher(made, write)
            return Recording(made, write)

        # A policy that cannot be made is told at the start, not to the first client.
        scheduler(settings.policy, Pool())
        predictor = HistogramPredictor(
            default_tokens=settings.default_output_tokens, error=settings.predictor_error
        )
        fleet = Fleet(
            scheduler,
            predictor,
            journal,
            self._clock,
            lambda policy, seconds: metrics.decision.labels(policy).observe(seconds),
        )
        self._stack.callback(fleet.stop)
        metrics.watch(
            snapshot_age_seconds=lambda: feed.age_seconds,
            in_flight=lambda: fleet.in_flight,
            ledger=lambda: fleet.ledger_requests,
        )
        feed.listen(fleet.arrived)
        return fleet

    def _dispatching(
        self,
        client: redis.asyncio.Redis,
        fleet: Fleet,
        feed: SnapshotFeed,
        address: Callable[[], str],
    ) -> Dispatching:
        """Have one router decide for all where the policy binds late and dispatching is on."""
        settings, events = self._settings, self._events

        def dispatcher(pool: Pool, name: str, token: int) -> Dispatches:
            made = make_late_binding(settings.policy_settings.get(LATE_BINDING, {}), pool)
            if not events.enabled:
                return made
            mark = {"policy": LATE_BINDING, "pool": name, "dispatcher": token}
            return RecordingDispatcher(made, lambda row: events.write({**row, **mark}))

        dispatching = Dispatching(
            client,
            router_id=self._router_id,
            address=lambda: settings.advertised_address or _reachable(address()),
            policy=LATE_BINDING,
            clock=self._clock,
            make_scheduler=dispatcher,
            make_front=lambda pool: Delegating(pool, make_policy(settings.fallback_policy)),
        )
        if settings.dispatch:
            fleet.on_pool(dispatching.add)
            feed.listen(dispatching.arrived)
        self._stack.push_async_callback(dispatching.stop)
        return dispatching

    def _server(
        self,
        front: Front,
        intake: Intake,
        journal: Journal,
        dispatching: Dispatching,
        *,
        desk: Desk,
        more: Sequence[ServiceBinding],
    ) -> RpcServer:
        servicer = RouterServicer(
            front=front, intake=intake, desk=desk, journal=journal, clock=self._clock
        )
        binding = ServiceBinding.of(
            router_pb2,
            "RouterService",
            router_pb2_grpc.add_RouterServiceServicer_to_server,
            servicer,
        )
        dispatch = ServiceBinding.of(
            dispatch_pb2,
            "DispatchService",
            dispatch_pb2_grpc.add_DispatchServiceServicer_to_server,
            DispatchServicer(dispatching, self._clock),
        )
        return RpcServer(
            self._settings.server_options(),
            services=[binding, dispatch, *more],
            registry=self._registry,
            clock=self._clock,
        )

    def _picker(
        self,
        fleet: Fleet,
        tokenizers: Tokenizers,
        agents: AgentChannels,
        intake: Intake,
        dispatching: Dispatching,
    ) -> tuple[Desk, list[ServiceBinding]]:
        """Construct what decides without dispatching, and Envoy's side of it where wanted."""
        settings = self._settings
        hub = dispatching.hub if settings.dispatch else None
        desk = Desk(
            fallback=settings.fallback_policy,
            settings=settings.policy_settings,
            foresee=Foresight(fleet, hub, self._clock),
        )
        self._stack.callback(desk.stop)
        services = picker_services(
            settings,
            fleet=fleet,
            tokenizers=tokenizers,
            agents=agents,
            intake=intake,
            desk=desk,
            clock=self._clock,
        )
        return desk, services

    async def _gateway(
        self, front: Front, fleet: Fleet, tokenizers: Tokenizers, agents: AgentChannels
    ) -> Gateway | None:
        """Start the HTTP front, where one is wanted; it stops before everything else."""
        settings = self._settings
        if not settings.gateway_listen:
            return None
        gateway = Gateway(
            settings,
            front=front,
            fleet=fleet,
            tokenizers=tokenizers,
            agents=agents,
            registry=self._registry,
            clock=self._clock,
            grace_seconds=settings.drain_grace_seconds,
        )
        await gateway.start()
        self._stack.push_async_callback(gateway.stop)
        return gateway

    def _background(self, name: str, work: Coroutine[None, None, None]) -> None:
        """Run something until the router stops."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(self._report_crash)

        self._stack.push_async_callback(end_tasks, [task])

    def _report_crash(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.critical("task_crashed", task=task.get_name(), exc_info=error)
            self.failure = self.failure or error
            self._stop.set()


def _reachable(address: str) -> str:
    """Return where others reach a server that listens on all addresses: by this host's name."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in {"0.0.0.0", "[::]", ""} else address


async def _keep_channels(agents: AgentChannels, fleet: Fleet, clock: Clock) -> None:
    while True:
        await clock.sleep(_KEEP_CHANNELS_SECONDS)
        await agents.keep(fleet.addresses())


async def _serve_from(feed: SnapshotFeed, server: RpcServer) -> None:
    first_state = asyncio.Event()
    feed.listen(lambda _: first_state.set())
    await first_state.wait()
    await server.set_serving(serving=True)


async def run(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        OSError: An address is taken.
        SettingsInvalid: The policy set is not registered, or one of its settings is outside its range.
        BaseException: Whatever ended one of the router's loops; that is a bug.
    """
    stop = asyncio.Event()
    app = RouterApp(settings, stop=stop)
    with stop_on_signals(stop):
        try:
            async with app:
                gc.freeze()  # what it starts with stays: no collection need look at it again
                await stop.wait()
        except (UnknownPolicyError, InvalidSettingError) as error:
            raise SettingsInvalid(str(error)) from error
    if app.failure is not None:
        raise app.failure


# A router writes to a socket for every token, which uvloop does for less.
SERVICE = Service(RouterSettings, run, uvloop.run)


def main(arguments: Sequence[str]) -> int:
    """Run a router, or print its settings; returns the exit code."""
    return service_main(SERVICE, print_config="--print-config" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
