"""Compose projects, driven by the command line that a user has."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "steelyard:test"
SERVICES = {
    "redis",
    *(f"controlplane-{i}" for i in range(2)),
    *(f"router-{i}" for i in range(2)),
    *(f"prefill-{i}" for i in range(2)),
    *(f"decode-{i}" for i in range(4)),
}
AGENTS = {name for name in SERVICES if name.startswith(("prefill", "decode"))}

BUILD_TIMEOUT_SECONDS = 600.0
COMMAND_TIMEOUT_SECONDS = 300.0
HEALTHY_TIMEOUT_SECONDS = 300.0


def run(*command: str, timeout: float = COMMAND_TIMEOUT_SECONDS, **variables: str) -> str:
    """Run a command in the repository; returns its output, fails the test where it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def succeeds(*command: str) -> bool:
    """Whether a command exists and ends with 0."""
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@dataclass(frozen=True, slots=True)
class Project:
    """One compose project of docker-compose.yml under a name of its own, on free ports."""

    name: str
    compose: tuple[str, ...]
    env_file: Path
    files: tuple[str, ...] = ("docker-compose.yml",)
    variables: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str, timeout: float = COMMAND_TIMEOUT_SECONDS) -> str:
        """Run a compose command."""
        files = [part for file in self.files for part in ("-f", file)]
        return run(
            *self.compose, "-p", self.name, "--env-file", str(self.env_file), *files, *arguments,
            timeout=timeout, **self.variables,
        )  # fmt: skip

    def exec(self, service: str, *command: str) -> str:
        """Run a command in a running container."""
        return self("exec", "-T", service, *command)

    def containers(self) -> dict[str, str]:
        """Container ids by service."""
        listing = run(
            "docker", "ps", "-a", "--filter", f"label=com.docker.compose.project={self.name}",
            "--format", '{{.ID}} {{.Label "com.docker.compose.service"}}',
        )  # fmt: skip
        return {service: id_ for id_, service in (line.split() for line in listing.splitlines())}

    def inspect(self, service: str) -> dict:
        """Everything that the engine knows of a service's container."""
        return json.loads(run("docker", "inspect", self.containers()[service]))[0]

    def health(self) -> dict[str, str]:
        """Health by service: starting, healthy or unhealthy."""
        ids = list(self.containers().values())
        details = json.loads(run("docker", "inspect", *ids)) if ids else []
        return {
            row["Config"]["Labels"]["com.docker.compose.service"]: row["State"]
            .get("Health", {})
            .get("Status", "none")
            for row in details
        }

    def wait_healthy(self, services: set[str] = SERVICES) -> None:
        """Wait until these services, and no others, are there and healthy."""
        want = dict.fromkeys(services, "healthy")
        eventually(lambda: self.health() == want, lambda: f"{self.health()}\n{self.tail()}")

    def tail(self) -> str:
        """Last lines of every service's log, for failures."""
        return self("logs", "--no-color", "--tail", "15")

    def left(self) -> list[str]:
        """What the engine still has of this project."""
        kinds = {
            "container": ("ps", "-a", "--format", "{{.Names}}"),
            "network": ("network", "ls", "--format", "{{.Name}}"),
            "volume": ("volume", "ls", "--format", "{{.Name}}"),
        }
        mine = ("--filter", f"label=com.docker.compose.project={self.name}")
        return [
            f"{kind} {name}"
            for kind, command in kinds.items()
            for name in run("docker", *command, *mine).splitlines()
        ]


def eventually(
    condition: Callable[[], bool],
    explain: Callable[[], str] = str,
    timeout_seconds: float = HEALTHY_TIMEOUT_SECONDS,
) -> None:
    """Ask until a condition of the world outside holds; it sends no events to wait on."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_seconds:g} s: {explain()}")
        time.sleep(0.25)
