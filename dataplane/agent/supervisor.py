"""Starts an engine process, keeps it running, and takes all of it down with the agent.

A vLLM server is a tree of processes. It leads a session of its own, so one signal reaches all of it,
and the kernel kills its leader when the agent dies, however that happens.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from dataplane.agent.errors import EngineNotStarted
from servicekit.clock import Clock
from servicekit.supervise import bound_to_parent, end_group_async

_FIRST_BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 30.0
_STEADY_SECONDS = 60.0
"""A process that has run that long starts the backoff anew when it ends."""
_HEALTH_INTERVAL_SECONDS = 0.25


class Supervisor:
    """One engine process at a time; a process that ends, with whatever code, is started again."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path | None,
        clock: Clock,
        stop_grace_seconds: float = 10.0,
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            command: The engine's command line.
            log_path: Where its output goes; None for the agent's own standard error.
            clock: For backoff.
            stop_grace_seconds: Between SIGTERM and SIGKILL.
        """
        self._command = list(command)
        self._log_path = log_path
        self._clock = clock
        self._stop_grace_seconds = stop_grace_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("dataplane.agent.supervisor")
        self.starts = 0

    def __repr__(self) -> str:
        """Show what runs."""
        pid = self._process.pid if self._process else None
        return f"Supervisor(pid={pid}, starts={self.starts})"

    @property
    def running(self) -> bool:
        """Whether a process is there; it may not be healthy yet."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process, and start it again whenever it ends.

        Raises:
            EngineNotStarted: there is no such command, or its log cannot be written.
        """
        if shutil.which(self._command[0]) is None:
            raise EngineNotStarted(f"there is no command {self._command[0]!r} here to start")
        await self._spawn()
        self._watching = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """End the process and everything that it started."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._process is not None:
            await end_group_async(self._process, self._stop_grace_seconds)

    async def _spawn(self) -> None:
        self.starts += 1
        output = None
        try:
            output = self._log_path.open("ab") if self._log_path else None
            self._process = await asyncio.create_subprocess_exec(
                *bound_to_parent(self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output or 2,
                stderr=output or 2,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineNotStarted(f"the engine cannot be started: {error}") from error
        finally:
            if output is not None:
                output.close()
        self._log.info("engine_process_started", pid=self._process.pid, start=self.starts)

    async def _keep_running(self) -> None:
        """Start the process again when it ends, later each time that it ends soon."""
        backoff_seconds = _FIRST_BACKOFF_SECONDS
        while self._process is not None:
            began = self._clock.monotonic()
            code = await self._process.wait()
            await end_group_async(self._process, 0.0)
            if self._clock.monotonic() - began > _STEADY_SECONDS:
                backoff_seconds = _FIRST_BACKOFF_SECONDS
            self._log.warning("engine_process_ended", code=code, next_start_in=backoff_seconds)
            backoff_seconds = await self._spawn_after(backoff_seconds)

    async def _spawn_after(self, backoff_seconds: float) -> float:
        """Start the process after a while, and again where that fails; returns the next wait."""
        while True:
            await self._clock.sleep(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, _MAX_BACKOFF_SECONDS)
            try:
                await self._spawn()
            except EngineNotStarted as error:  # no memory, a full disk: it may be better later
                self._log.warning("engine_process_not_started", reason=error.message)
            else:
                return backoff_seconds


async def wait_healthy(
    healthy: Callable[[], Awaitable[bool]], timeout_seconds: float, clock: Clock
) -> None:
    """Wait until an engine answers.

    Raises:
        EngineNotStarted: it did not in time.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            while not await healthy():
                await clock.sleep(_HEALTH_INTERVAL_SECONDS)
    except TimeoutError as error:
        raise EngineNotStarted(
            f"the engine was not healthy within {timeout_seconds:g} s; see its log"
        ) from error
