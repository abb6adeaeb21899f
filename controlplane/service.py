"""ControlService: the calls of agents, routers and operators, each a few lines over the store."""
# ruff: noqa: N802, ARG002  names and arguments are those of the generated servicer

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from steelyard.v1 import control_pb2, control_pb2_grpc, types_pb2

from controlplane import wire
from controlplane.calibration_lock import CalibrationLock
from controlplane.core.liveness import Signal, State, Timing, step
from controlplane.core.registry import Change
from controlplane.core.values import Outcome
from controlplane.errors import ChangedMeanwhile, UnknownInstance
from controlplane.feed import SnapshotFeed
from controlplane.library import Library
from controlplane.metrics import ControlMetrics
from controlplane.sinks import OutcomeSink, ReportSink
from controlplane.store import Store
from servicekit.clock import Clock
from servicekit.enums import number_of
from servicekit.errors import InvalidArgument
from servicekit.streams import until_stopping
from servicekit.times import duration
from servicekit.tracing import add_log_fields

_STORE_PATIENCE_SECONDS = 2.0
_ATTEMPTS = 5


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Any replica answers any call; nothing of the truth is kept here."""

    def __init__(
        self,
        store: Store,
        feed: SnapshotFeed,
        reports: ReportSink,
        outcomes: OutcomeSink,
        *,
        metrics: ControlMetrics,
        clock: Clock,
        timing: Timing,
        stopping: asyncio.Event,
    ) -> None:
        self._store = store
        self._feed = feed
        self._reports = reports
        self._outcomes = outcomes
        self._metrics = metrics
        self._library = Library(store, metrics)
        self._calibration = CalibrationLock(store, clock)
        self._timing = timing
        self._stopping = stopping

    async def Register(
        self, request: control_pb2.RegisterRequest, context: Any
    ) -> control_pb2.RegisterResponse:
        """Announce one boot of an engine."""
        engine = wire.engine_from(request.engine)
        registration = await self._store.register(engine)
        add_log_fields(
            instance_id=engine.instance_id, epoch=engine.epoch, registration=registration.kind
        )
        if registration.kind == "replaced":
            await self._library.tell("replaced", engine.instance_id, registration.replaced_epoch)
        if registration.kind != "renewed":
            await self._library.tell("joined", engine.instance_id, engine.epoch)
        return control_pb2.RegisterResponse(
            report_interval=duration(self._steered().report_interval_seconds)
        )

    async def Report(
        self, request_iterator: AsyncIterator[control_pb2.ReportRequest], context: Any
    ) -> AsyncIterator[control_pb2.ReportResponse]:
        """Take telemetry; the answer says when the next is wanted at the latest."""
        admitted: tuple[str, str] | None = None
        async with aclosing(until_stopping(request_iterator, self._stopping)) as requests:
            async for request in requests:
                report = wire.report_from(request)
                key = (report.instance_id, report.epoch)
                if key != admitted:
                    await self._reports.admit(*key)
                    admitted = key
                    add_log_fields(instance_id=report.instance_id, epoch=report.epoch)
                self._reports.offer(report)
                state = self._feed.states.get(report.instance_id, State.JOINING)
                yield control_pb2.ReportResponse(
                    accepted_sequence=request.sequence,
                    report_interval=duration(self._steered().report_interval_seconds),
                    state=_state(state),
                )

    async def WatchCluster(
        self, request: control_pb2.WatchClusterRequest, context: Any
    ) -> AsyncIterator[control_pb2.WatchClusterResponse]:
        """Send the latest snapshot, then each newer one."""
        with self._metrics.watchers.track_inprogress():
            async with aclosing(self._feed.watch()) as snapshots:
                async for snapshot in snapshots:
                    yield control_pb2.WatchClusterResponse(snapshot=snapshot)

    async def Drain(
        self, request: control_pb2.DrainRequest, context: Any
    ) -> control_pb2.DrainResponse:
        """Take an instance out of service, or put it back."""
        signal = Signal.UNDRAIN if request.undo else Signal.DRAIN
        for _ in range(_ATTEMPTS):
            member = await self._store.member(request.instance_id)
            if member is None:
                raise UnknownInstance(
                    f"no instance {request.instance_id!r} is registered",
                    metadata={"instance_id": request.instance_id},
                )
            after = step(member.liveness, signal)
            if after == member.liveness:
                return control_pb2.DrainResponse(state=_state(after.state))
            change = Change(member, after, signal, seen_unix_seconds=0.0)
            if await self._store.change(change):
                kind = change.happening.kind
                await self._library.tell(kind, request.instance_id, member.engine.epoch)
                return control_pb2.DrainResponse(state=_state(after.state))
        raise ChangedMeanwhile(f"{request.instance_id} kept changing", retry_after_seconds=0.1)

    async def PublishConstants(
        self, request: control_pb2.PublishConstantsRequest, context: Any
    ) -> control_pb2.PublishConstantsResponse:
        """Publish constants as the next version of their profile."""
        draft = wire.constants_from(request.constants)
        published = await self._library.publish(draft, accept_jump=request.accept_jump)
        return control_pb2.PublishConstantsResponse(constants=wire.constants_to(published))

    async def GetConstants(
        self, request: control_pb2.GetConstantsRequest, context: Any
    ) -> control_pb2.GetConstantsResponse:
        """Return one version of a profile's constants."""
        found = await self._library.get(request.profile, request.version)
        return control_pb2.GetConstantsResponse(constants=wire.constants_to(found))

    async def ListConstants(
        self, request: control_pb2.ListConstantsRequest, context: Any
    ) -> control_pb2.ListConstantsResponse:
        """Return all versions, by profile, newest first."""
        listing = await self._library.list(request.profile)
        return control_pb2.ListConstantsResponse(
            constants=[wire.constants_to(version) for version in listing.versions],
            current=listing.current,
            proposed={name: wire.constants_to(made) for name, made in listing.proposed.items()},
            drifting=[wire.drift_to(drift) for drift in listing.drifting],
        )

    async def RollbackConstants(
        self, request: control_pb2.RollbackConstantsRequest, context: Any
    ) -> control_pb2.RollbackConstantsResponse:
        """Make an earlier version current."""
        found = await self._library.roll_back(request.profile, request.version)
        return control_pb2.RollbackConstantsResponse(constants=wire.constants_to(found))

    async def ReportOutcomes(
        self, request_iterator: AsyncIterator[control_pb2.ReportOutcomesRequest], context: Any
    ) -> control_pb2.ReportOutcomesResponse:
        """Store finished requests as they come; answer once the last is stored.

        A stopping replica answers early with what it has; the caller opens a new stream.
        """
        accepted = ticket = 0
        async with aclosing(until_stopping(request_iterator, self._stopping)) as requests:
            async for request in requests:
                outcome = wire.outcome_from(request.outcome)
                ticket = self._outcomes.offer(outcome)
                accepted += 1
                self._count(outcome)
        add_log_fields(outcomes=accepted)
        await self._outcomes.written(ticket, _STORE_PATIENCE_SECONDS)
        return control_pb2.ReportOutcomesResponse(accepted=accepted)

    async def SetSlo(
        self, request: control_pb2.SetSloRequest, context: Any
    ) -> control_pb2.SetSloResponse:
        """Replace the targets of the SLO classes."""
        slo = await self._library.set_slo(wire.slo_from(request.slo))
        return control_pb2.SetSloResponse(slo=wire.slo_to(slo))

    async def HoldCalibration(
        self, request: control_pb2.HoldCalibrationRequest, context: Any
    ) -> AsyncIterator[control_pb2.HoldCalibrationResponse]:
        """Hold the calibration lock while the caller listens."""
        if not request.holder:
            raise InvalidArgument.of("holder", "is empty; it tells others who holds the lock")
        async with aclosing(self._calibration.hold(request.holder, self._stopping)) as leases:
            async for seconds in leases:
                yield control_pb2.HoldCalibrationResponse(lease=duration(seconds))

    def _count(self, outcome: Outcome) -> None:
        known = outcome.slo_class in self._feed.roster.slo.classes
        slo_class = outcome.slo_class if known else "other"
        slo_met = str(outcome.slo_met).lower()
        self._metrics.outcomes.labels(slo_class, outcome.status, slo_met).inc()

    def _steered(self) -> Timing:
        """How often agents report now: less often where there are very many."""
        return self._timing.steered(len(self._feed.states))


def _state(state: State) -> types_pb2.InstanceState.ValueType:
    return number_of(types_pb2.InstanceState, state)
