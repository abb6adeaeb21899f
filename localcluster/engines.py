"""Real vLLM servers for a local cluster, forked from one warm image."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from localcluster.errors import ClusterError
from localcluster.pace import (
    MODEL_OPTIONS,
    WORKER,
    paced_flags,
    paced_profile,
    paced_server,
    record_path,
)
from localcluster.ports import Ports
from localcluster.processes import Processes
from localcluster.spec import ClusterSpec
from servicekit.supervise import bound_to_parent, end_group_async

READY_TIMEOUT_SECONDS = 240.0
_LAUNCHER = "engines"
_MAKE_MODEL_TIMEOUT_SECONDS = 120.0


def engine_url(port: int) -> str:
    """Return the base URL of a vLLM server on this machine."""
    return f"http://127.0.0.1:{port}"


def vllm_python(spec: ClusterSpec) -> Path:
    """Return the Python that engines run in.

    Raises:
        ClusterError: There is none.
    """
    python = spec.vllm_python.absolute()
    if not python.exists():
        raise ClusterError(f"{python} does not exist: make the environment, `make venv-vllm`")
    return python


class VllmEngines:
    """The engines behind a cluster's agents, and one beside them where the spec wants it."""

    def __init__(self, spec: ClusterSpec, ports: Ports, processes: Processes) -> None:
        self._spec = spec
        self._paced = spec.engine == "paced"
        self._processes = processes
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.ports: dict[str, int] = {}
        self._servers: list[dict[str, Any]] = []
        logs = (spec.directory / "engines").resolve()
        logs.mkdir(parents=True, exist_ok=True)
        for instance_id, role in spec.pools.names():
            index = int(instance_id.rpartition("-")[2])
            port = self.ports[instance_id] = ports.of(f"{role}_engine", index)
            self._servers.append(
                {
                    "name": instance_id,
                    "role": role,
                    "port": port,
                    "side_channel_port": ports.of(f"{role}_side", index),
                    "log": str(logs / f"{instance_id}.log"),
                    **(paced_server(spec, instance_id) if self._paced else {}),
                }
            )
        if spec.solo:
            port = self.ports["solo"] = ports.of("solo")
            log = str(logs / "solo.log")
            self._servers.append({"name": "solo", "role": "solo", "port": port, "log": log})

    @property
    def solo_url(self) -> str:
        """Base URL of the engine that no router knows; empty where there is none."""
        return engine_url(self.ports["solo"]) if "solo" in self.ports else ""

    async def start(self) -> None:
        """Start all servers and wait until each is healthy.

        Raises:
            ClusterError: The vLLM environment is missing, or a server does not come up.
        """
        python = vllm_python(self._spec)
        for instance_id in self.ports if self._paced else ():
            record_path(self._spec.directory, instance_id).unlink(missing_ok=True)
        spec = {
            "model": await self._model(python),
            "servers": self._servers,
            "flags": [*self._shared_flags(), *self._spec.vllm_flags],
            "preload": [WORKER] if self._paced else [],
            "ready_timeout_seconds": READY_TIMEOUT_SECONDS,
        }
        path = self._spec.directory / "engines" / "spec.json"
        path.write_text(json.dumps(spec))
        command = [
            str(python), "-m", "steelyard_enginekit.fork_launcher", str(path.resolve()),
        ]  # fmt: skip
        child = await self._processes.start(_LAUNCHER, command, {})
        child.on_line = self._take
        event = await self._expect({"ready", "failed"}, READY_TIMEOUT_SECONDS)
        if event["event"] == "failed":
            raise ClusterError(f"the engines did not start: {event.get('message')}")

    async def command(self, answer: str, **command: str) -> dict[str, Any]:
        """Send a command to the launcher ("kill", "restart", "freeze", "thaw") and await its answer.

        Raises:
            ClusterError: It answers with an error, or not at all.
        """
        stdin = self._processes[_LAUNCHER].process.stdin
        if stdin is None:
            raise ClusterError("the engines' launcher takes no commands")
        stdin.write(json.dumps(command).encode() + b"\n")
        await stdin.drain()
        event = await self._expect({answer, "error"}, READY_TIMEOUT_SECONDS)
        if event["event"] == "error":
            raise ClusterError(f"the engines' launcher: {event.get('message')}")
        return event

    def _shared_flags(self) -> list[str]:
        return paced_flags(paced_profile(self._spec)) if self._paced else []

    async def _model(self, python: Path) -> str:
        if self._spec.vllm_model:
            return self._spec.vllm_model
        folder = (
            self._spec.directory / ("tiny-model-paced" if self._paced else "tiny-model")
        ).resolve()
        if not (folder / "config.json").exists():
            make = [str(python), "-m", "steelyard_enginekit.tiny_model", str(folder), "--seed", "0"]
            for name, value in MODEL_OPTIONS.items() if self._paced else ():
                make += [f"--{name.replace('_', '-')}", str(value)]
            process = await asyncio.create_subprocess_exec(
                *bound_to_parent(make),
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            code: int | None = None
            try:
                async with asyncio.timeout(_MAKE_MODEL_TIMEOUT_SECONDS):
                    code = await process.wait()
            except TimeoutError:
                pass  # told below, as any other failure
            finally:
                await end_group_async(process, 0.0)
            if code != 0:
                raise ClusterError(f"the tiny model could not be made (code {code})")
        return str(folder)

    def _take(self, line: str) -> None:
        # Its own lines are events; what else is written there only looks like one now and then.
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                self._events.put_nowait(event)

    async def _expect(self, kinds: set[str], timeout_seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    self._processes.check()
                    try:
                        async with asyncio.timeout(1.0):
                            event = await self._events.get()
                    except TimeoutError:
                        continue
                    if event.get("event") in kinds:
                        return event
        except TimeoutError as error:
            raise ClusterError(
                f"the engines did not answer within {timeout_seconds:g} s"
            ) from error
