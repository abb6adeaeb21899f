"""Projects of their own: what `down` leaves, and what happens without a password."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compose.support import ROOT, Project


def test_down_leaves_nothing(new_project: Callable[[str], Project], image: str) -> None:
    """After `down -v` the engine has no container, no network and no volume of the project."""
    project = new_project("down")
    project("up", "-d", "redis", "controlplane-0")
    project.wait_healthy({"redis", "controlplane-0"})
    project.exec("redis", "redis-cli", "set", "steelyard:kept", "1")
    assert project.left()
    project("down", "--volumes", "--remove-orphans")
    assert project.left() == []


def test_services_stop_in_order_when_told(
    new_project: Callable[[str], Project], image: str
) -> None:
    """SIGTERM ends a service by itself, well before Docker would kill it."""
    project = new_project("stop")
    project("up", "-d", "redis", "controlplane-0")
    project.wait_healthy({"redis", "controlplane-0"})
    project("stop")
    for service in ("redis", "controlplane-0"):
        state = project.inspect(service)["State"]
        assert state["ExitCode"] != 137
        assert not state["OOMKilled"]


def test_no_password_no_cluster(compose: tuple[str, ...], tmp_path: Path) -> None:
    """Without a password for Redis nothing starts, and the message says where to set it."""
    nothing = tmp_path / "env"
    nothing.touch()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STEELYARD_")}
    done = subprocess.run(
        [*compose, "-p", "steelyard-test-none", "--env-file", str(nothing), "config"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert ".env.example" in done.stderr


@pytest.mark.parametrize("profile", ["", "observability"])
@pytest.mark.parametrize("overlay", ["", "deploy/compose.vllm.yml", "deploy/compose.vllm-cpu.yml"])
def test_compose_accepts_every_combination(
    new_project: Callable[[str], Project], overlay: str, profile: str
) -> None:
    """Compose itself reads the file with each overlay and profile."""
    project = new_project("config")
    files = ["-f", overlay] if overlay else []
    profiles = ["--profile", profile] if profile else []
    services = set(project(*files, *profiles, "config", "--services").split())
    assert {"prefill-0", "decode-3"} <= services
    assert "grafana" in services or not profile
