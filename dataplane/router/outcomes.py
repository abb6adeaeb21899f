"""Tells the control plane how each request went; never in any request's way."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence

import grpc
import structlog
from steelyard.v1 import control_pb2, control_pb2_grpc

from servicekit.channel import open_channel
from servicekit.clock import Clock

_KEPT = 10_000
_RETRY_SECONDS = 1.0
_SETTLE_SECONDS = 2.0


class OutcomeReporter:
    """Streams outcomes to whichever control plane answers; the oldest go when none does.

    Args:
        addresses: host:port of the control planes; none keeps everything to itself.
        clock: Paces the retries.
    """

    def __init__(self, addresses: Sequence[str], clock: Clock) -> None:
        self._addresses = tuple(addresses)
        self._clock = clock
        self._waiting: deque[control_pb2.Outcome] = deque(maxlen=_KEPT)
        self._arrived = asyncio.Event()
        self._settling = False
        self._settled = asyncio.Event()
        self._log = structlog.get_logger("dataplane.router.outcomes")

    def add(self, outcome: control_pb2.Outcome) -> None:
        """Take one in."""
        if self._addresses:
            self._waiting.append(outcome)
            self._arrived.set()

    async def settle(self) -> None:
        """Have what waits reported, and end; gives up after a moment without a control plane."""
        self._settling = True
        self._arrived.set()
        if not self._addresses:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_SECONDS):
                await self._settled.wait()

    async def run(self) -> None:
        """Report until cancelled or settled."""
        if not self._addresses:
            return
        turn = 0
        while not (self._settling and not self._waiting):
            address = self._addresses[turn % len(self._addresses)]
            turn += 1
            try:
                async with open_channel(address) as channel:
                    stub = control_pb2_grpc.ControlServiceStub(channel)
                    await stub.ReportOutcomes(self._stream())
                if self._settling:
                    continue
            except grpc.aio.AioRpcError as error:
                self._log.debug("outcomes_not_taken", address=address, error=error.details())
            await self._clock.sleep(_RETRY_SECONDS)
        self._settled.set()

    async def _stream(self) -> AsyncIterator[control_pb2.ReportOutcomesRequest]:
        while True:
            while self._waiting:
                yield control_pb2.ReportOutcomesRequest(outcome=self._waiting.popleft())
            if self._settling:
                return
            self._arrived.clear()
            await self._arrived.wait()
