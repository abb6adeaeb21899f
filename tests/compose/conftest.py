"""A real Docker engine, the image, and one cluster that all tests look at."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.compose.support import (
    BUILD_TIMEOUT_SECONDS,
    HEALTHY_TIMEOUT_SECONDS,
    IMAGE,
    ROOT,
    Project,
    succeeds,
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what stands here, give it time, and let it run last: its cluster stays up until the end."""

    def here(item: pytest.Item) -> bool:
        return Path(__file__).parent in item.path.parents

    for item in filter(here, items):
        item.add_marker(pytest.mark.compose)
        item.add_marker(pytest.mark.timeout(900))
    items.sort(key=here)


@pytest.fixture(scope="session")
def compose() -> tuple[str, ...]:
    """Compose's command line: v2 where it is, else docker-compose; a failure where neither is."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if succeeds(*command, "version"):
            return command
    pytest.fail("tests/compose needs Compose: neither `docker compose` nor `docker-compose` runs")


@pytest.fixture(scope="session")
def env_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """.env.example, as a newcomer copies it, with free ports and a password of its own."""
    text = (ROOT / ".env.example").read_text()
    text = re.sub(r"(?m)^(\w+_PORT)=.*$", r"\1=0", text)
    text = re.sub(r"(?m)^STEELYARD_REDIS_PASSWORD=.*$", "STEELYARD_REDIS_PASSWORD=weigh1st", text)
    text = re.sub(r"(?m)^STEELYARD_IMAGE=.*$", f"STEELYARD_IMAGE={IMAGE}", text)
    # Where the engine's own network has no way out, builds go by the host's.
    text = re.sub(r"(?m)^(STEELYARD_BUILD_NETWORK)=.*$", r"\1=host", text)
    path = tmp_path_factory.mktemp("compose") / "env"
    path.write_text(text)
    return path


@pytest.fixture(scope="session")
def engine() -> None:
    """A Docker engine that answers; a failure, never a skip, where none does."""
    if not succeeds("docker", "info"):
        pytest.fail("tests/compose needs a Docker engine: `docker info` fails")


@pytest.fixture(scope="session")
def new_project(
    engine: None, compose: tuple[str, ...], env_file: Path
) -> Iterator[Callable[[str], Project]]:
    """Make projects; whatever a test leaves of them is taken down at the end."""
    made: list[Project] = []

    def make(suffix: str) -> Project:
        project = Project(f"steelyard-test-{os.getpid()}-{suffix}", compose, env_file)
        made.append(project)
        return project

    yield make
    for project in made:
        project("down", "--volumes", "--remove-orphans")


@pytest.fixture(scope="session")
def image(new_project: Callable[[str], Project]) -> str:
    """The image, built by compose from the tree as it is."""
    new_project("build")("build", "router-0", timeout=BUILD_TIMEOUT_SECONDS)
    return IMAGE


@pytest.fixture(scope="session")
def cluster(new_project: Callable[[str], Project], image: str) -> Project:
    """The whole cluster, brought up from nothing and healthy."""
    project = new_project("cluster")
    project("up", "-d", timeout=HEALTHY_TIMEOUT_SECONDS)
    project.wait_healthy()
    return project
