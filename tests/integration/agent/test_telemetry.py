"""Reports to the control plane over real gRPC: never in the way, always back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from steelyard.v1 import control_pb2, control_pb2_grpc, types_pb2

from dataplane.agent.engine import EngineMeasure
from dataplane.agent.errors import EngineUnavailable
from servicekit.errors import NotFound
from servicekit.status import to_grpc
from tests.integration.agent.agents import agents, decode_request, generate, new_prompt

pytestmark = pytest.mark.asyncio
WAIT_SECONDS = 15.0


class ControlPlane(control_pb2_grpc.ControlServiceServicer):
    """Takes registrations and reports, and shows them to the test."""

    def __init__(self, interval_seconds: float = 0.05) -> None:
        self.registered: asyncio.Queue[types_pb2.EngineInfo] = asyncio.Queue()
        self.reports: asyncio.Queue[control_pb2.ReportRequest] = asyncio.Queue()
        self.interval = Duration()
        self.interval.FromNanoseconds(int(interval_seconds * 1e9))
        self.forget = False

    async def Register(self, request, context):  # noqa: N802
        """Note an engine."""
        self.registered.put_nowait(request.engine)
        self.forget = False
        return control_pb2.RegisterResponse(report_interval=self.interval)

    async def Report(self, requests, context):  # noqa: N802
        """Note reports; while `forget` is set, act as one who knows nobody."""
        async for report in requests:
            if self.forget:
                await context.abort_with_status(
                    to_grpc(NotFound("who is that?", reason="UNREGISTERED"))
                )
            self.reports.put_nowait(report)
            yield control_pb2.ReportResponse(
                accepted_sequence=report.sequence,
                report_interval=self.interval,
                state=types_pb2.INSTANCE_STATE_READY,
            )

    async def report_with(self, condition) -> control_pb2.ReportRequest:
        """Wait for a report that satisfies a condition."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition(report := await self.reports.get()):
                pass
        return report

    async def registration(self) -> types_pb2.EngineInfo:
        """Wait for the next registration."""
        async with asyncio.timeout(WAIT_SECONDS):
            return await self.registered.get()


@asynccontextmanager
async def serving(plane: ControlPlane, port: int = 0) -> AsyncIterator[int]:
    """Serve a control plane; yields its port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    control_pb2_grpc.add_ControlServiceServicer_to_server(plane, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)


def reporting_to(*ports: int, **more: object) -> dict[str, object]:
    """Settings of an agent that reports there."""
    return {"control_planes": [f"127.0.0.1:{port}" for port in ports], **more}


async def test_an_agent_registers_what_it_is_and_reports():
    """The control plane learns the engine, then its load, counted up from 1."""
    plane = ControlPlane()
    async with serving(plane) as port, agents(reporting_to(port, role="decode")) as (client,):
        engine = await plane.registration()
        first = await plane.report_with(lambda _: True)
        second = await plane.report_with(lambda _: True)

        assert engine.role == types_pb2.ROLE_DECODE
        assert engine.address == client.running.server.address
        assert engine.epoch == client.running.agent.description.epoch
        assert (first.sequence, second.sequence) == (1, 2)
        assert first.load.engine_healthy
        assert client.running.telemetry.connected


async def test_changes_are_reported_at_once():
    """With an interval of an hour a request's arrival and end are reported all the same."""
    plane = ControlPlane(interval_seconds=3600)
    async with serving(plane) as port, agents(reporting_to(port)) as (client,):
        await plane.report_with(lambda report: report.sequence == 1)

        await generate(client, decode_request(new_prompt(), max_tokens=300))

        busy = await plane.report_with(lambda report: len(report.load.by_router) == 1)
        idle = await plane.report_with(lambda report: len(report.load.by_router) == 0)
        assert busy.load.by_router[0].router_id == "a"
        assert idle.sequence > busy.sequence


async def test_an_agent_that_was_forgotten_registers_again():
    """UNREGISTERED is answered with a registration, and reports go on from 1."""
    plane = ControlPlane()
    async with serving(plane) as port, agents(reporting_to(port)):
        first = await plane.registration()
        await plane.report_with(lambda report: report.sequence == 2)
        plane.forget = True

        second = await plane.registration()
        report = await plane.report_with(lambda report: report.sequence == 1)

        assert second == first
        assert report.epoch == first.epoch


async def test_without_a_control_plane_the_agent_serves():
    """Nobody listens at the address: requests run, and reports begin once somebody does."""
    plane = ControlPlane()
    async with serving(ControlPlane()) as port:
        pass
    async with agents(reporting_to(port)) as (client,):
        tokens, _ = await generate(client, decode_request(new_prompt()))
        assert len(tokens) == 20
        assert not client.running.telemetry.connected

        async with serving(plane, port):
            await plane.registration()


async def test_the_next_control_plane_takes_over():
    """When the first one ends, the agent registers with the second."""
    first, second = ControlPlane(), ControlPlane()
    async with serving(second) as second_port, AsyncExitStack() as stack:
        first_port = await stack.enter_async_context(serving(first))
        async with agents(reporting_to(first_port, second_port)):
            await first.registration()
            await first.report_with(lambda _: True)
            assert second.registered.empty()

            await stack.aclose()

            await second.registration()
            await second.report_with(lambda report: report.sequence == 1)


async def test_an_orderly_end_is_said():
    """The last report of an agent that stops is marked as leaving."""
    plane = ControlPlane(interval_seconds=3600)
    async with serving(plane) as port:
        async with agents(reporting_to(port)):
            await plane.report_with(lambda report: not report.leaving)

        await plane.report_with(lambda report: report.leaving)


async def test_a_restarted_engine_registers_under_its_new_epoch(monkeypatch):
    """An engine that measures another boot is described anew; what it held is gone."""
    plane = ControlPlane()
    async with serving(plane) as port, agents(reporting_to(port)) as (client,):
        old = await plane.registration()
        engine = client.running.agent.engine
        description = replace(await engine.describe(), epoch="next boot")

        async def describe():
            return description

        async def measure():
            return EngineMeasure(healthy=True, epoch="next boot")

        monkeypatch.setattr(engine, "describe", describe)
        monkeypatch.setattr(engine, "measure", measure)
        new = await plane.registration()
        report = await plane.report_with(lambda report: report.epoch == "next boot")

        assert old.epoch != "next boot"
        assert new.epoch == report.epoch == "next boot"


async def test_a_new_boot_that_cannot_be_described_yet_is_unhealthy_and_reports_go_on(monkeypatch):
    """An engine that restarts and fails again does not silence its agent."""
    plane = ControlPlane()
    async with serving(plane) as port, agents(reporting_to(port)) as (client,):
        await plane.report_with(lambda report: report.load.engine_healthy)
        engine = client.running.agent.engine
        description = replace(await engine.describe(), epoch="next boot")
        describable = asyncio.Event()

        async def describe():
            if not describable.is_set():
                raise EngineUnavailable("the engine does not answer")
            return description

        async def measure():
            return EngineMeasure(healthy=True, epoch="next boot")

        monkeypatch.setattr(engine, "describe", describe)
        monkeypatch.setattr(engine, "measure", measure)
        await plane.report_with(lambda report: not report.load.engine_healthy)
        describable.set()

        report = await plane.report_with(lambda report: report.epoch == "next boot")

        assert report.load.engine_healthy


async def test_a_stream_that_ends_while_a_report_is_made_does_not_end_reporting(monkeypatch):
    """The report that finds its stream closed is lost; the agent registers and reports again."""
    first, second = ControlPlane(), ControlPlane()
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(serving(first))
        async with agents(reporting_to(port)) as (client,):
            await first.report_with(lambda _: True)
            agent, measuring, go_on = client.running.agent, asyncio.Event(), asyncio.Event()
            measured = agent.load

            async def load():
                if asyncio.current_task().get_name() == "telemetry":
                    measuring.set()
                    await go_on.wait()
                return await measured()

            monkeypatch.setattr(agent, "load", load)
            await measuring.wait()
            await stack.aclose()
            await until_no_task_runs("Telemetry._read")
            go_on.set()

            async with serving(second, port):
                await second.registration()
                await second.report_with(lambda report: report.sequence == 1)


async def until_no_task_runs(name):
    """Wait until no task of this loop is in a coroutine of that name."""
    async with asyncio.timeout(WAIT_SECONDS):
        while any(task.get_coro().__qualname__ == name for task in asyncio.all_tasks()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
