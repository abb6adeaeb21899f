"""Start and steer real vLLM servers from tests: a thin client of the fork launcher."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servicekit.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("VLLM_VENV", REPOSITORY / ".venv-vllm")).absolute() / "bin/python"


def make_tiny_model(directory: Path, *options: str) -> Path:
    """Write the tiny model with the engine kit and return its directory."""
    command = [str(PYTHON), "-m", "steelyard_enginekit.tiny_model", str(directory), *options]
    subprocess.run(command, check=True, timeout=60)
    return directory


def free_ports(count: int) -> list[int]:
    """Ports that are free, all different, and that no outgoing connection can take meanwhile."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def servers_spec(
    directory: Path, *, prefills: int, decodes: int, solo: bool = True
) -> list[dict[str, Any]]:
    """Server entries p0…, d0… and solo on free ports, logging into `directory`."""
    names = [(f"p{i}", "prefill") for i in range(prefills)]
    names += [(f"d{i}", "decode") for i in range(decodes)]
    names += [("solo", "solo")] if solo else []
    ports = iter(free_ports(2 * len(names)))
    return [
        {
            "name": name,
            "role": role,
            "port": next(ports),
            "side_channel_port": next(ports),
            "log": str(directory / f"{name}.log"),
        }
        for name, role in names
    ]


@dataclass
class EngineCluster:
    """A running launcher; `ports` by server name, `spec` as it was given."""

    process: subprocess.Popen[str]
    spec: dict[str, Any]
    ports: dict[str, int]
    pids: dict[str, int]

    def read(self, timeout_seconds: float) -> dict[str, Any]:
        """The launcher's next line; fails when none comes in time."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_seconds)
        assert ready, f"the launcher said nothing for {timeout_seconds} s"
        line = self.process.stdout.readline()
        assert line, f"the launcher ended with {self.process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def command(self, timeout_seconds: float = 60.0, **command: object) -> dict[str, Any]:
        """Send one command, such as `restart="d0"`, and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.read(timeout_seconds)


@contextlib.contextmanager
def engine_cluster(
    model: Path, servers: list[dict[str, Any]], *, flags: tuple[str, ...] = ()
) -> Iterator[EngineCluster]:
    """Run the servers of a spec until the block ends; nothing is left behind."""
    spec = {"model": str(model), "flags": list(flags), "servers": servers}
    errors = Path(servers[0]["log"]).parent / "launcher.log"
    with errors.open("w") as error_file:
        process = subprocess.Popen(
            [PYTHON, "-m", "steelyard_enginekit.fork_launcher", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error_file,
            text=True,
            bufsize=1,
        )
    cluster = EngineCluster(process, spec, {s["name"]: s["port"] for s in servers}, {})
    try:
        first = cluster.read(180)
        assert first["event"] == "ready", f"{first}\n{errors.read_text()[-2000:]}"
        cluster.pids = {name: state["pid"] for name, state in first["servers"].items()}
        yield cluster
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def wait_until(condition: Any, timeout_seconds: float, what: str) -> None:
    """Poll another process's state, which offers nothing to await, until `condition()` holds."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {what}"
        time.sleep(0.02)
