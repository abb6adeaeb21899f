"""What holds for every file: sizes, annotations, docstrings of tests; metrics and settings shown."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from controlplane.metrics import ControlMetrics
from controlplane.settings import ControlPlaneSettings
from dataplane.agent.app import AgentApp
from dataplane.agent.metrics import AgentCollector
from dataplane.agent.settings import AgentSettings
from dataplane.gateway.metrics import GatewayMetrics
from dataplane.router.metrics import RouterMetrics
from dataplane.router.settings import RouterSettings
from servicekit.clock import SystemClock
from servicekit.interceptors import CallInterceptor
from servicekit.settings import ServiceSettings

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "calibrator", "cli", "controlplane", "dataplane", "enginekit", "enginemodel", "evaluation",
    "localcluster", "servicekit", "simulator", "tools",
)  # fmt: skip
MOST_LINES = 400
MOST_FUNCTION_LINES = 60
FORBIDDEN = ("TODO", "FIXME", "NotImplementedError", "pytest.mark.skip", "pytest.skip(")
SETTINGS = (AgentSettings, ControlPlaneSettings, RouterSettings)


def files(*folders: str) -> list[Path]:
    """Return our Python files under these folders."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "_pb2" not in path.name and ".venv" not in path.parts]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def place(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Say where a function is."""
    return f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def test_modules_are_short():
    """No module, test or tool is longer than 400 lines."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in files(*PACKAGES, "tests", "benchmarks")
    }

    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_functions_are_short():
    """No function has more than 60 lines, docstring included."""
    long = {
        place(path, node): node.end_lineno - node.lineno + 1
        for path in files(*PACKAGES, "tests", "benchmarks")
        for node in functions(path)
        if node.end_lineno - node.lineno + 1 > MOST_FUNCTION_LINES
    }

    assert long == {}


def test_every_function_says_what_it_returns():
    """Every function of the product has a return annotation."""
    bare = [
        place(path, node)
        for path in files(*PACKAGES)
        for node in functions(path)
        if node.returns is None
    ]

    assert bare == []


def test_every_test_says_what_it_shows():
    """Every test has a docstring that begins with one sentence."""
    silent = [
        place(path, node)
        for path in files("tests")
        if path.name.startswith("test_")
        for node in functions(path)
        if node.name.startswith("test_") and not (ast.get_docstring(node) or "").strip()
    ]

    assert silent == []


def test_nothing_is_left_for_later():
    """No file holds a note to do something later, an empty body in its place, or a skipped test."""
    me = Path(__file__).resolve()
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in files(*PACKAGES, "tests", "benchmarks")
        if path != me
        for word in FORBIDDEN
        if word in path.read_text()
    ]

    assert found == []


async def families() -> set[str]:
    """Return the names of all metrics, as Prometheus sees them, of every service."""
    registry = CollectorRegistry()
    clock = SystemClock()
    ControlMetrics(registry)
    RouterMetrics(registry)
    GatewayMetrics(registry)
    CallInterceptor(registry=registry, clock=clock, max_message_bytes=1)
    async with AgentApp(AgentSettings.load(instance_id="a", drain_grace_seconds=0.0)) as running:
        await running.agent.load()
        registry.register(AgentCollector(running.agent, running.telemetry))
        metrics = list(registry.collect())
    return {f"{m.name}_total" if m.type == "counter" else m.name for m in metrics}


@pytest.mark.asyncio
async def test_metrics_and_their_page_agree():
    """docs/metrics.md has a heading for every metric there is, and for none that there is not."""
    page = (ROOT / "docs/metrics.md").read_text()
    documented = re.findall(r"^### `(\w+)`$", page, re.MULTILINE)

    assert sorted(documented) == sorted(await families())


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s.__name__)
def test_every_setting_is_described_and_shown(settings: type[ServiceSettings]):
    """Each setting has a description, and --print-config shows variable, value and description."""
    shown = settings.load().print_config().splitlines()

    assert len(shown) == len(settings.model_fields)
    for line, (name, field) in zip(shown, settings.model_fields.items(), strict=True):
        assert field.description, name
        assert line.startswith(f"{settings.variable(name)}=")
        assert line.endswith(f"  # {field.description}")


def test_the_example_of_env_and_the_compose_files_agree():
    """.env.example names every variable that the compose files read, and none that they do not."""
    texts = [ROOT / "docker-compose.yml", *sorted((ROOT / "deploy").glob("compose*.yml"))]
    read = {name for path in texts for name in re.findall(r"\$\{(\w+)[:?}-]", path.read_text())}
    example = (ROOT / ".env.example").read_text()
    named = set(re.findall(r"^#?\s?([A-Z][A-Z0-9_]+)=", example, re.MULTILINE))

    assert named - read == set()
    assert read - named == set()
