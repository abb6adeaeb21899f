"""Spawned engines: started, started again, and taken down whole."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from dataplane.agent.app import AgentApp
from dataplane.agent.errors import EngineNotStarted
from dataplane.agent.settings import AgentSettings
from dataplane.agent.supervisor import Supervisor, wait_healthy
from servicekit.clock import SystemClock

pytestmark = pytest.mark.asyncio

ENGINE = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""
"""A process with a child, as a vLLM server is; it writes both ids down."""


class HastyClock(SystemClock):
    """Waits a hundredth of what it is asked to."""

    async def sleep(self, seconds: float) -> None:
        """Return soon."""
        await super().sleep(seconds / 100)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def written(path: Path) -> list[str]:
    """The lines of a file; none where there is no file yet."""
    return path.read_text().splitlines() if path.exists() else []


async def lines_of(path: Path, count: int) -> list[list[int]]:
    """Wait until the engine was started that often; returns the ids it wrote."""
    async with asyncio.timeout(30):
        while True:
            lines = written(path)
            if len(lines) >= count and len(lines[-1].split()) == 2:
                return [[int(pid) for pid in line.split()] for line in lines]
            await asyncio.sleep(0.02)


async def gone(*pids: int) -> None:
    """Wait until no such process runs."""
    async with asyncio.timeout(15):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def supervisor(path: Path) -> Supervisor:
    """A supervisor of such an engine."""
    command = [sys.executable, "-c", ENGINE, str(path)]
    return Supervisor(command, log_path=path.with_suffix(".log"), clock=HastyClock())


async def test_an_engine_that_dies_is_started_again_and_its_children_end(tmp_path):
    """A killed server leaves no child behind, and a new one takes its place."""
    path = tmp_path / "pids"
    engine = supervisor(path)
    await engine.start()
    try:
        [[leader, child]] = await lines_of(path, 1)
        os.kill(leader, signal.SIGKILL)

        second = (await lines_of(path, 2))[1]

        await gone(leader, child)
        assert engine.starts == 2
        assert all(alive(pid) for pid in second)
    finally:
        await engine.stop()
    await gone(*second)
    assert not engine.running


async def test_stopping_ends_the_whole_group(tmp_path):
    """After stop neither the server nor its child runs, and nothing is started again."""
    path = tmp_path / "pids"
    engine = supervisor(path)
    await engine.start()
    [pids] = await lines_of(path, 1)

    await engine.stop()

    await gone(*pids)
    assert engine.starts == 1


async def test_an_engine_ends_with_its_agent(tmp_path):
    """When the agent is killed the kernel ends the server."""
    path = tmp_path / "pids"
    agent = (
        "import asyncio, sys; from pathlib import Path\n"
        "from dataplane.agent.supervisor import Supervisor\n"
        "from servicekit.clock import SystemClock\n"
        "async def main():\n"
        "    await Supervisor(sys.argv[1:], log_path=None, clock=SystemClock()).start()\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", agent, sys.executable, "-c", ENGINE, str(path)
    )
    [[leader, child]] = await lines_of(path, 1)

    process.kill()
    await process.wait()

    await gone(leader)
    os.kill(child, signal.SIGKILL)


async def test_an_engine_that_never_answers_is_not_started():
    """Waiting for health ends with the limit."""

    async def unhealthy() -> bool:
        return False

    with pytest.raises(EngineNotStarted, match="not healthy within"):
        await wait_healthy(unhealthy, 0.05, HastyClock())


async def test_a_command_that_does_not_exist_is_named():
    """Nothing is tried again and again that cannot work."""
    engine = Supervisor(["no-such-vllm", "serve"], log_path=None, clock=HastyClock())

    with pytest.raises(EngineNotStarted, match="no-such-vllm"):
        await engine.start()

    assert engine.starts == 0


async def test_an_engine_is_started_again_once_that_is_possible(tmp_path):
    """A start that fails, here for want of a place for its log, is not the last one."""
    path = tmp_path / "logs" / "pids"
    path.parent.mkdir()
    engine = supervisor(path)
    await engine.start()
    try:
        [[leader, _]] = await lines_of(path, 1)
        path.parent.rename(tmp_path / "moved")
        os.kill(leader, signal.SIGKILL)
        async with asyncio.timeout(30):
            while engine.starts < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        path.parent.mkdir()

        await lines_of(path, 1)
    finally:
        await engine.stop()


async def test_a_command_that_ends_is_tried_again(tmp_path):
    """A wrong command line does not end the agent; it shows in the count of starts."""
    command = [sys.executable, str(tmp_path / "nowhere")]
    engine = Supervisor(command, log_path=tmp_path / "log", clock=HastyClock())
    await engine.start()
    try:
        async with asyncio.timeout(30):
            while engine.starts < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        await engine.stop()


async def test_an_agent_whose_engine_ends_at_every_start_gives_up(tmp_path):
    """The agent says so instead of waiting for its whole start time."""
    settings = AgentSettings(
        engine="vllm",
        spawn_vllm=True,
        vllm_url="http://127.0.0.1:9",
        vllm_command=[sys.executable, "-c", "raise SystemExit('no such model')"],
        vllm_log_path=tmp_path / "log",
    )

    with pytest.raises(EngineNotStarted, match="ended 3 times"):
        await AgentApp(settings, clock=HastyClock()).__aenter__()

    assert "no such model" in written(tmp_path / "log")
