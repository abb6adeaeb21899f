"""The redis-cli lines of the documentation, run against the cluster, show what they claim."""

import re
import shlex
from collections.abc import Callable, Iterator

import pytest

from tests.compose.support import AGENTS, IMAGE, ROOT, Project, eventually, run

PAGES = ("README.md", "docs/deployment.md")


def documented_commands() -> list[str]:
    """What follows `redis-cli` and its connection options on each line of a code block."""
    commands = []
    for page in PAGES:
        for block in re.findall(r"```\w*\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            for line in block.splitlines():
                found = re.search(r"redis-cli((?:\s+-[hpau]\s+\S+)*)\s+([^#]+)", line)
                if found and not line.lstrip().startswith("#"):
                    commands.append(found[2].strip())
    return sorted(set(commands))


def pairs(output: str) -> dict[str, str]:
    """Read a hash as redis-cli prints it when nobody watches: a line a name, a line a value."""
    lines = output.splitlines()
    return dict(zip(lines[::2], lines[1::2], strict=True))


def shows_all_instances(output: str) -> bool:
    """Whether it lists exactly the cluster's agents."""
    return set(output.split()) == AGENTS


def shows_an_instance(output: str) -> bool:
    """Whether it tells an instance's role, state, model, address and measurements."""
    fields = pairs(output)
    wanted = {"role", "state", "model", "address", "epoch", "measured.running", "kv_total_tokens"}
    return wanted <= fields.keys() and fields["state"] == "READY"


def shows_targets(output: str) -> bool:
    """Whether it tells an SLO class."""
    return bool(pairs(output))


def shows_events(output: str) -> bool:
    """Whether rows tell what happened to which of the cluster's agents."""
    lines = output.splitlines()
    rows = [dict(zip(lines[i + 1 : i + 7 : 2], lines[i + 2 : i + 7 : 2], strict=False))
            for i, line in enumerate(lines) if re.fullmatch(r"\d+-\d+", line)]  # fmt: skip
    return any(row.get("kind") and row.get("subject") in AGENTS for row in rows)


def shows_outcomes(output: str) -> bool:
    """Whether it tells of a finished request."""
    return bool(re.search(r"(?m)^\d+-\d+$", output))


def shows_leases(output: str) -> bool:
    """Whether it lists requests in flight, by id."""
    return bool(output.split())


CLAIMS: dict[str, Callable[[str], bool]] = {
    r"smembers steelyard:instances": shows_all_instances,
    r"hgetall steelyard:instance:(prefill-[01]|decode-[0-3])": shows_an_instance,
    r"zrange steelyard:inflight:decode-0:EPOCH 0 -1": shows_leases,
    r"hgetall steelyard:slo": shows_targets,
    r"xrevrange steelyard:events \+ - count \d+": shows_events,
    r"xrevrange steelyard:outcomes \+ - count \d+": shows_outcomes,
}
"""What each documented command claims; a line that is documented must be listed here."""


TRAFFIC = (
    "for round in $(seq 500); do for one in 1 2 3 4; do steelyard generate --token-ids 1,2,3"
    " --max-tokens 1000 --policy round_robin --router router-0:7400 & done; wait; done"
)


@pytest.fixture(scope="module")
def traffic(cluster: Project) -> Iterator[None]:
    """A client container that keeps every decode engine busy, four requests at a time."""
    network = f"{cluster.name}_data"
    name = f"{cluster.name}-traffic"
    run("docker", "run", "-d", "--name", name, "--network", network, IMAGE, "sh", "-c", TRAFFIC)
    yield
    run("docker", "rm", "-f", name)


@pytest.mark.usefixtures("traffic")
@pytest.mark.parametrize("command", documented_commands())
def test_a_documented_line_shows_what_it_claims(cluster: Project, command: str) -> None:
    """With requests under way, each documented redis-cli line shows what the page says of it."""
    claims = [shows for like, shows in CLAIMS.items() if re.fullmatch(like, command, re.IGNORECASE)]
    assert len(claims) == 1, f"CLAIMS says nothing of {command!r}"
    epoch = cluster.exec("redis", "redis-cli", "hget", "steelyard:instance:decode-0", "epoch")
    words = shlex.split(command.replace("EPOCH", epoch.strip()))
    output = ""

    def shown() -> bool:
        nonlocal output
        output = cluster.exec("redis", "redis-cli", *words).rstrip("\n")
        return claims[0](output)

    eventually(shown, lambda: f"redis-cli {command} shows:\n{output}", timeout_seconds=60)


def test_the_pages_have_such_lines() -> None:
    """There is something documented to run."""
    assert documented_commands()
