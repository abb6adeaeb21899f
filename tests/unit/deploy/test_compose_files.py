"""What docker-compose.yml and its overlays promise, read from the files themselves."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane.settings import ControlPlaneSettings
from dataplane.agent.settings import AgentSettings
from dataplane.agent.vllm_factory import spawn_command
from dataplane.router.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[3]
BASE = ROOT / "docker-compose.yml"
OVERLAYS = (ROOT / "deploy/compose.vllm.yml", ROOT / "deploy/compose.vllm-cpu.yml")
SETTINGS = (ControlPlaneSettings, RouterSettings, AgentSettings)


def services(path: Path) -> dict[str, dict[str, Any]]:
    """Services of a file, anchors resolved."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
    return found


def interpolated() -> set[str]:
    """Variables that any of the files reads; `$$` is the containers' own business."""
    text = "".join(path.read_text() for path in (BASE, *OVERLAYS))
    return set(re.findall(r"(?<!\$)\$\{(\w+)", text))


def default(path: Path, variable: str) -> set[str]:
    """What a file takes for a variable that is not set."""
    return set(re.findall(rf"\$\{{{variable}:-([^}}]*)\}}", path.read_text()))


EXAMPLE = dict(
    line.split("=", 1)
    for line in (ROOT / ".env.example").read_text().splitlines()
    if line and not line.startswith("#")
)


def test_the_example_lists_exactly_what_is_read() -> None:
    """Every variable that a compose file reads is in .env.example, and no other."""
    assert set(EXAMPLE) == interpolated()


@pytest.mark.parametrize("variable", sorted(set(EXAMPLE) - {"STEELYARD_REDIS_PASSWORD"}))
def test_the_example_shows_the_defaults(variable: str) -> None:
    """A copied .env.example changes nothing but the password: it holds the files' own defaults."""
    found = set().union(*(default(path, variable) for path in (BASE, *OVERLAYS)))
    assert found == {EXAMPLE[variable]}


@pytest.mark.parametrize("path", [BASE, *OVERLAYS], ids=lambda path: path.name)
def test_services_are_told_only_settings_that_exist(path: Path) -> None:
    """Each STEELYARD_… variable given to a container is a setting of what runs in it."""
    known = {cls.variable(field) for cls in SETTINGS for field in cls.model_fields}
    for name, service in services(path).items():
        told = {key for key in service.get("environment", {}) if key.startswith("STEELYARD_")}
        assert told <= known, name


def test_ports_are_published_on_the_loopback_only() -> None:
    """No port is published without 127.0.0.1 before it, and Redis publishes none."""
    for service in services(BASE).values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert "ports" not in services(BASE)["redis"]
    assert not any("ports" in s for path in OVERLAYS for s in services(path).values())


def test_every_service_is_bounded_and_checked() -> None:
    """Each service has a healthcheck, limits of memory, CPU and logs, and waits for what it needs."""
    for name, service in services(BASE).items():
        assert {"healthcheck", "mem_limit", "cpus", "logging"} <= service.keys(), name
        if name not in {"redis", "prometheus", "grafana"}:
            conditions = {entry["condition"] for entry in service["depends_on"].values()}
            assert conditions == {"service_healthy"}
            assert service["stop_grace_period"] == "20s"


def test_agents_know_their_own_names() -> None:
    """An agent advertises the name under which its peers find it, and its role matches."""
    agents = {n: s for n, s in services(BASE).items() if n.startswith(("prefill", "decode"))}
    assert len(agents) == 6
    for name, service in agents.items():
        environment = service["environment"]
        assert environment["STEELYARD_AGENT_INSTANCE_ID"] == name
        assert environment["STEELYARD_AGENT_ADVERTISED_ADDRESS"] == f"{name}:7450"
        assert environment["STEELYARD_AGENT_SIDE_CHANNEL_HOST"] == name
        assert environment["STEELYARD_AGENT_ROLE"] == name.rpartition("-")[0]


def test_gpus_and_side_channels_are_not_shared() -> None:
    """On GPUs, 2 prefill and 4 decode engines have a GPU and a NIXL port each, and fitting KV roles."""
    engines = services(OVERLAYS[0])
    gpus, ports = [], []
    for name, service in engines.items():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
        assert device["capabilities"] == ["gpu"]
        ports.append(service["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        assert service["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == name
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[name.rpartition("-")[0]]
        flags = shlex.split(service["environment"]["STEELYARD_AGENT_VLLM_FLAGS"])
        assert flags[flags.index("--kv-transfer-config.kv_role") + 1] == role
        assert service["ipc"] == "host"
    assert sorted(engines) == [*(f"decode-{i}" for i in range(4)), "prefill-0", "prefill-1"]
    assert {gpu.partition(":-")[2] for gpu in gpus} == {f"{index}}}" for index in range(6)}
    assert len(set(ports)) == 6


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.name)
def test_overlays_spawn_an_engine_that_only_its_agent_reaches(path: Path) -> None:
    """The agent accepts the command, and vLLM's HTTP server stays on the container's loopback."""
    for name, service in services(path).items():
        environment = service["environment"]
        settings = AgentSettings(
            **{
                key.removeprefix("STEELYARD_AGENT_").lower(): re.sub(
                    r"\$\{\w+:-([^}]*)\}", r"\1", value
                )
                for key, value in environment.items()
                if key.startswith("STEELYARD_AGENT_") and not key.endswith("COMMAND")
            },
            vllm_command=json.loads(environment["STEELYARD_AGENT_VLLM_COMMAND"]),
        )
        assert (settings.engine, settings.spawn_vllm) == ("vllm", True)
        command = spawn_command(settings)
        bound = "--bind" if "--bind" in command else "--host"
        assert command[command.index(bound) + 1] == "127.0.0.1"
        assert command[command.index("--port") + 1] == "8000"
        if "--role" in command:
            assert command[command.index("--role") + 1] == name.rpartition("-")[0]
            assert command[command.index("--host") + 1] == name


def test_routers_know_how_their_peers_reach_them() -> None:
    """A router advertises its own name: late binding needs routers that find each other."""
    for name in ("router-0", "router-1"):
        environment = services(BASE)[name]["environment"]
        assert environment["STEELYARD_ROUTER_ADVERTISED_ADDRESS"] == f"{name}:7400"
        assert environment["STEELYARD_ROUTER_ROUTER_ID"] == name


def test_on_cpu_one_pair_is_the_default() -> None:
    """The CPU overlay runs one prefill and one decode engine; the profile `full` brings the rest."""
    profiles = {name: s.get("profiles") for name, s in services(OVERLAYS[1]).items()}
    assert {name for name, value in profiles.items() if value is None} == {"prefill-0", "decode-0"}
    assert {name for name, value in profiles.items() if value == ["full"]} == {
        "prefill-1", "decode-1", "decode-2", "decode-3",
    }  # fmt: skip


def test_observability_waits_to_be_asked_for() -> None:
    """Prometheus and Grafana belong to a profile, and keep no password anywhere."""
    for name in ("prometheus", "grafana"):
        assert services(BASE)[name]["profiles"] == ["observability"]
    assert "PASSWORD" not in json.dumps(services(BASE)["grafana"])
