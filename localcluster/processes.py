"""Child processes with one readable log between them."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localcluster.errors import ClusterError
from servicekit.supervise import bound_to_parent, end_group_async

PYTHON = sys.executable
_LAST_LINES = 20
OnLine = Callable[[str, str], None]


def environment(prefix: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as environment variables, structured ones as JSON."""
    return {
        f"{prefix}{name.upper()}": value if isinstance(value, str) else _text(value)
        for name, value in settings.items()
        if value is not None
    }


def _text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    return repr(value) if isinstance(value, float) else json.dumps(value)


@dataclass(slots=True)
class Child:
    """One process of the cluster."""

    name: str
    process: asyncio.subprocess.Process
    reader: asyncio.Task[None] | None = None
    on_line: Callable[[str], None] | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.returncode is None


class Processes:
    """Starts children, passes their lines on under their name, and ends them all."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line = on_line
        self._children: dict[str, Child] = {}

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    async def start(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> Child:
        """Start a child; it dies with us, however we die."""
        process = await asyncio.create_subprocess_exec(
            *bound_to_parent(command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
            limit=1 << 20,
        )
        child = Child(name, process)
        child.reader = asyncio.create_task(self._read(child), name=f"read-{name}")
        self._children[name] = child
        return child

    async def end(self, name: str, grace_seconds: float = 5.0) -> None:
        """End one child and its own children."""
        child = self._children.pop(name, None)
        if child is not None:
            await end_group_async(child.process, grace_seconds)
            await _done(child)

    async def kill(self, name: str) -> None:
        """Kill one child and its own children, as a crash would."""
        child = self._children.pop(name, None)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            await child.process.wait()
            await _done(child)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to one child's whole group."""
        os.killpg(self._children[name].process.pid, number)

    async def end_all(self) -> None:
        """End all children, the last started first in order, together in time."""
        names = list(self._children)
        await asyncio.gather(*(self.end(name) for name in reversed(names)))

    def check(self) -> None:
        """Make sure that all children run.

        Raises:
            ClusterError: One has ended; shows its last lines.
        """
        for child in self._children.values():
            if not child.alive:
                lines = "\n  ".join(child.last_lines) or "(it wrote nothing)"
                raise ClusterError(
                    f"{child.name} ended with code {child.process.returncode}:\n  {lines}"
                )

    async def _read(self, child: Child) -> None:
        stream = child.process.stdout
        if stream is None:
            return
        async for line in stream:
            text = line.decode(errors="replace").rstrip()
            child.last_lines.append(text)
            if child.on_line is not None:
                child.on_line(text)
            self._on_line(child.name, text)


async def _done(child: Child) -> None:
    if child.reader is not None:
        await child.reader
