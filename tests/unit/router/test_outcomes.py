"""Outcomes reach whichever control plane answers, and those that wait are sent on the way out."""

import asyncio

import grpc
import pytest
from steelyard.v1 import control_pb2, control_pb2_grpc

from dataplane.router.outcomes import OutcomeReporter
from servicekit.clock import ManualClock, SystemClock
from tests.support.waiting import eventually


class Collector(control_pb2_grpc.ControlServiceServicer):
    """A control plane that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._server = grpc.aio.server()
        control_pb2_grpc.add_ControlServiceServicer_to_server(self, self._server)
        self.address = ""

    async def __aenter__(self):
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def ReportOutcomes(self, requests, context):  # noqa: N802
        """Take all in."""
        async for request in requests:
            self.told.append(request.outcome.request_id)
        return control_pb2.ReportOutcomesResponse(accepted=len(self.told))


def outcome(name: str) -> control_pb2.Outcome:
    """Return the outcome of a request."""
    return control_pb2.Outcome(request_id=name)


@pytest.mark.asyncio
async def test_outcomes_arrive_in_order():
    """What is added is told, in its order, while the router runs."""
    async with Collector() as control:
        reporter = OutcomeReporter([control.address], SystemClock())
        task = asyncio.create_task(reporter.run())
        for number in range(50):
            reporter.add(outcome(str(number)))
        await eventually(lambda: len(control.told) == 50)
        reporter.add(outcome("last"))
        await eventually(lambda: control.told[-1] == "last")
        task.cancel()
        await asyncio.wait([task])

        assert control.told[:50] == [str(number) for number in range(50)]


@pytest.mark.asyncio
async def test_settling_tells_what_waits():
    """A router that stops at once has told its outcomes, and its reporter has ended."""
    async with Collector() as control:
        reporter = OutcomeReporter([control.address], SystemClock())
        task = asyncio.create_task(reporter.run())
        for number in range(20):
            reporter.add(outcome(str(number)))
        await reporter.settle()
        await task

        assert len(control.told) == 20


@pytest.mark.asyncio
async def test_another_control_plane_is_told_when_one_is_away():
    """A dead address costs a retry; the next one is told everything."""
    async with Collector() as control:
        clock = ManualClock()
        reporter = OutcomeReporter(["127.0.0.1:1", control.address], clock)
        task = asyncio.create_task(reporter.run())
        reporter.add(outcome("a"))
        await eventually(lambda: clock.sleepers)
        await clock.advance(1.5)
        reporter.add(outcome("b"))
        await eventually(lambda: "b" in control.told)
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.asyncio
async def test_without_a_control_plane_nothing_is_kept():
    """No address: nothing is gathered, running and settling end at once."""
    reporter = OutcomeReporter([], SystemClock())
    reporter.add(outcome("a"))
    await reporter.run()
    await reporter.settle()
