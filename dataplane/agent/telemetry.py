"""Reports to the control plane: as often as it asks, at once when something changes.

Never in the way of a request: without a control plane the agent serves on and keeps trying quietly.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass
from random import Random

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration
from steelyard.v1 import control_pb2, control_pb2_grpc, types_pb2

from dataplane.agent import wire
from dataplane.agent.agent import Agent
from servicekit.channel import open_channel
from servicekit.clock import Clock
from servicekit.status import from_rpc_error
from servicekit.times import seconds_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryOptions:
    """How to report.

    Attributes:
        addresses: Control planes, host:port; one is used at a time, the next after a failure.
        min_gap_seconds: Changes closer together than this share a report.
        first_backoff_seconds: Wait after the first failure; doubles, with full jitter.
        max_backoff_seconds: Longest wait.
        call_timeout_seconds: For Register, and for a report to be taken.
    """

    addresses: Sequence[str]
    min_gap_seconds: float = 0.02
    first_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 3.0
    call_timeout_seconds: float = 3.0


class _SessionEndedError(Exception):
    """Raised inside a session when it has to be begun anew: register again, at once."""


class Telemetry:
    """One task, `run`."""

    def __init__(
        self,
        agent: Agent,
        options: TelemetryOptions,
        *,
        clock: Clock,
        rng: Random,
        changed: asyncio.Event,
    ) -> None:
        """Prepare; nothing is sent before `run`.

        Args:
            agent: Whose load is reported.
            options: Where and how.
            clock: For intervals.
            rng: For the jitter of retries.
            changed: Set by whoever wants a report soon.
        """
        self._agent = agent
        self._options = options
        self._clock = clock
        self._rng = rng
        self._changed = changed
        self._stopping = asyncio.Event()
        self._log = structlog.get_logger("dataplane.agent.telemetry")
        self._interval_seconds = 0.1
        self._connected_to = ""
        self._lost = False
        self.state = types_pb2.INSTANCE_STATE_UNSPECIFIED

    def __repr__(self) -> str:
        """Show where reports go."""
        return f"Telemetry(connected_to={self._connected_to!r})"

    @property
    def connected(self) -> bool:
        """Whether a control plane takes reports now."""
        return bool(self._connected_to)

    def stop(self) -> None:
        """Ask for a last report, marked as leaving; `run` returns after it."""
        self._stopping.set()
        self._changed.set()

    async def run(self) -> None:
        """Report until stopped."""
        failures = turn = 0
        while self._options.addresses and not self._stopping.is_set():
            address = self._options.addresses[turn % len(self._options.addresses)]
            try:
                await self._session(address)
            except _SessionEndedError:
                failures = 0
                continue
            except (grpc.aio.AioRpcError, TimeoutError, OSError) as error:
                failures = 0 if self._connected_to else failures + 1
                turn += 1
                self._note_loss(address, error)
            if not self._stopping.is_set():
                await self._back_off(failures)

    async def _session(self, address: str) -> None:
        """Register with one control plane and report until something breaks or we stop."""
        async with open_channel(address) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            epoch = self._agent.description.epoch
            registered = await stub.Register(
                control_pb2.RegisterRequest(
                    engine=wire.engine_info(self._agent.identity, self._agent.description)
                ),
                timeout=self._options.call_timeout_seconds,
            )
            self._steer(registered.report_interval)
            call = stub.Report()
            self._connected_to = address
            self._log.info("control_plane_joined", address=address, epoch=epoch)
            reading = asyncio.create_task(self._read(call))
            try:
                await self._write(call, epoch, reading)
                await call.done_writing()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._options.call_timeout_seconds):
                        await asyncio.shield(reading)
            except grpc.aio.AioRpcError as error:
                if from_rpc_error(error).reason == "UNREGISTERED":
                    raise _SessionEndedError from error
                raise
            except asyncio.InvalidStateError as error:  # it ended before its reader noticed
                raise _SessionEndedError from error
            finally:
                reading.cancel()
                call.cancel()
                await asyncio.wait([reading])

    async def _write(
        self,
        call: "grpc.aio.StreamStreamCall[control_pb2.ReportRequest, control_pb2.ReportResponse]",
        epoch: str,
        reading: asyncio.Task[None],
    ) -> None:
        """Send reports; returns after the one that says we leave."""
        sequence = 0
        while True:
            leaving = self._stopping.is_set()
            self._changed.clear()
            load = await self._agent.load()
            if self._agent.description.epoch != epoch:
                raise _SessionEndedError
            sequence += 1
            report = control_pb2.ReportRequest(
                instance_id=self._agent.identity.instance_id,
                epoch=epoch,
                sequence=sequence,
                load=wire.instance_load(load),
                leaving=leaving,
            )
            async with asyncio.timeout(self._options.call_timeout_seconds):
                await call.write(report)
            if leaving:
                return
            await self._until_next(reading)

    async def _until_next(self, reading: asyncio.Task[None]) -> None:
        """Wait for the interval, or for a change after the shortest gap; fail with the reader.

        Raises:
            AioRpcError: the control plane ended the stream.
        """
        if not self._stopping.is_set():
            await self._clock.sleep(min(self._options.min_gap_seconds, self._interval_seconds))
        changed = asyncio.create_task(self._changed.wait())
        try:
            left_seconds = max(self._interval_seconds - self._options.min_gap_seconds, 0.0)
            await asyncio.wait(
                [changed, reading], timeout=left_seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            changed.cancel()
        if reading.done():
            reading.result()
            raise _SessionEndedError

    async def _read(self, responses: AsyncIterable[control_pb2.ReportResponse]) -> None:
        """Take over what the control plane wants."""
        async for response in responses:
            self._steer(response.report_interval)
            self.state = response.state

    def _steer(self, interval: Duration) -> None:
        seconds = seconds_of(interval)
        if seconds > 0:
            self._interval_seconds = seconds

    def _note_loss(self, address: str, error: Exception) -> None:
        """Log the first failure after a success, or the very first; the rest is noise."""
        if self._connected_to or not self._lost:
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else repr(error)
            self._log.warning("control_plane_lost", address=address, reason=reason)
        self._connected_to, self._lost = "", True

    async def _back_off(self, failures: int) -> None:
        """Wait, longer after each failure, by a random share so that agents do not march in step."""
        longest = min(
            self._options.first_backoff_seconds * 2.0 ** min(failures, 10),
            self._options.max_backoff_seconds,
        )
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([stopping], timeout=self._rng.uniform(longest / 2, longest))
        stopping.cancel()
