"""What Prometheus and Grafana are given names things that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from controlplane.metrics import ControlMetrics
from dataplane.router.metrics import RouterMetrics
from servicekit.clock import ManualClock
from servicekit.interceptors import CallInterceptor

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/steelyard.json").read_text())
PROMETHEUS = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.fixture
def samples() -> set[str]:
    """Every sample name that a service can expose."""
    registry = CollectorRegistry()
    ControlMetrics(registry)
    RouterMetrics(registry)
    CallInterceptor(registry=registry, clock=ManualClock(), max_message_bytes=1)
    names = set()
    for family in registry.collect():
        names |= {family.name, *(sample.name for sample in family.samples)}
        if family.type == "counter":
            names.add(f"{family.name}_total")
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def expressions() -> list[str]:
    """Return every query of the dashboard."""
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expression", expressions())
def test_dashboards_ask_for_metrics_that_exist(expression: str, samples: set[str]) -> None:
    """Each query of the dashboard reads metrics that a service exposes."""
    asked = set(re.findall(r"\b(?:steelyard|grpc)_\w+", expression)) - {"grpc_service", "grpc_code"}
    assert asked
    assert asked <= samples


def test_panels_do_not_overlap() -> None:
    """Panels have ids of their own and cover no cell of the grid twice."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(ids)) == len(ids)
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_prometheus_scrapes_every_service_where_it_listens() -> None:
    """Targets are exactly the HTTP ports that services of the compose file are told to open."""
    listening = set()
    for name, service in COMPOSE["services"].items():
        environment: dict[str, Any] = service.get("environment", {})
        for variable, value in environment.items():
            if variable.endswith("_HTTP_LISTEN"):
                listening.add(f"{name}:{value.rpartition(':')[2]}")
    targets = {
        target
        for job in PROMETHEUS["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets == listening
