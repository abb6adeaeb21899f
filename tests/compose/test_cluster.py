"""docker-compose.yml on a real Docker engine: up from nothing, used by strangers, robbed of a part."""

import json
from typing import Any

import pytest

from servicekit.probe import probe
from tests.compose.support import AGENTS, IMAGE, SERVICES, Project, eventually, run

CONTROL_PLANES = ("controlplane-0:7420", "controlplane-1:7420")


def own_container(cluster: Project, network: str, *command: str) -> str:
    """Run a command of the image in a container of its own on one of the cluster's networks."""
    return run("docker", "run", "--rm", "--network", f"{cluster.name}_{network}", IMAGE, *command)


def generate(cluster: Project, router: str, *, max_tokens: int = 12, policy: str = "") -> list[int]:
    """Generate greedily from token ids, from a container of its own."""
    output = own_container(
        cluster, "data", "steelyard", "generate", "--token-ids", "72,101,108,108,111",
        "--max-tokens", str(max_tokens), "--temperature", "0", "--router", f"{router}:7400",
        *(["--policy", policy] if policy else []),
    )  # fmt: skip
    return [int(part) for part in output.split()]


def instances(cluster: Project, control_plane: str) -> dict[str, dict[str, Any]]:
    """What a control plane says of each instance."""
    table = own_container(
        cluster, "data", "steelyard", "ctl", "get", "instances", "-o", "json",
        "--control-plane", control_plane,
    )  # fmt: skip
    return {row["instance"]: row for row in json.loads(table)}


def test_everything_is_healthy(cluster: Project) -> None:
    """From nothing, `up` leads to every service healthy, each by its own healthcheck."""
    assert cluster.health() == dict.fromkeys(SERVICES, "healthy")


@pytest.mark.parametrize("router", ["router-0", "router-1"])
def test_a_container_of_its_own_generates(cluster: Project, router: str) -> None:
    """A client container gets exactly the tokens it asked for, the same ones each time."""
    tokens = generate(cluster, router)
    assert len(tokens) == 12
    assert generate(cluster, router, max_tokens=5) == tokens[:5]


def test_routers_agree_on_tokens(cluster: Project) -> None:
    """Which router is asked does not change what comes out."""
    assert generate(cluster, "router-0") == generate(cluster, "router-1")


def test_late_binding_works_across_routers(cluster: Project) -> None:
    """One router decides for the pool: the other reaches it by its name, and both serve."""
    tokens = generate(cluster, "router-0")
    late = [generate(cluster, f"router-{i}", policy="late_binding") for i in range(2)]
    assert late == [tokens, tokens]


def test_the_openai_api_answers(cluster: Project) -> None:
    """A completion over HTTP has the tokens it was asked for, counted."""
    script = (
        "import json, sys, urllib.request as u\n"
        "body = {'model': 'qwen2.5-3b', 'prompt': 'Weigh first', 'max_tokens': 6, 'temperature': 0}\n"
        "ask = u.Request(sys.argv[1], json.dumps(body).encode(), {'content-type': 'application/json'})\n"
        "print(u.urlopen(ask, timeout=30).read().decode())"
    )
    url = "http://router-1:7402/v1/completions"
    answer = json.loads(own_container(cluster, "data", "python", "-c", script, url))
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("service", "port"), [("router-1", 7400), ("controlplane-1", 7420)])
def test_published_ports_lead_to_the_service(cluster: Project, service: str, port: int) -> None:
    """From the host, the port on the loopback reaches a service that says it is healthy."""
    (bound,) = cluster.inspect(service)["NetworkSettings"]["Ports"][f"{port}/tcp"]
    assert probe(f"127.0.0.1:{bound['HostPort']}") == "SERVING"


def test_two_control_planes_tell_one_truth(cluster: Project) -> None:
    """Both replicas show the same instances with the same epochs, all ready."""
    first, second = (instances(cluster, address) for address in CONTROL_PLANES)
    assert set(first) == AGENTS
    for name in AGENTS:
        assert first[name]["epoch"] == second[name]["epoch"]
        assert first[name]["state"] == second[name]["state"] == "READY"


def test_a_drain_through_one_is_seen_through_the_other(cluster: Project) -> None:
    """An instance drained through one replica is drained for the other, which can take it back."""
    first, second = CONTROL_PLANES
    drain = ("steelyard", "ctl", "drain", "decode-3", "--control-plane")
    own_container(cluster, "data", *drain, first)
    eventually(lambda: instances(cluster, second)["decode-3"]["state"] == "DRAINING")
    own_container(cluster, "data", *drain, second, "--undo")
    eventually(lambda: instances(cluster, first)["decode-3"]["state"] == "READY")


def test_one_control_plane_is_enough(cluster: Project) -> None:
    """With one replica gone, agents report to the other, and serving never stops."""
    epochs = {name: row["epoch"] for name, row in instances(cluster, CONTROL_PLANES[1]).items()}
    cluster("stop", "controlplane-0")
    try:
        assert len(generate(cluster, "router-0")) == 12
        eventually(
            lambda: all(
                row["state"] == "READY" and row["age_ms"] < 1000
                for row in instances(cluster, CONTROL_PLANES[1]).values()
            )
        )
        now = {name: row["epoch"] for name, row in instances(cluster, CONTROL_PLANES[1]).items()}
        assert now == epochs
        assert len(generate(cluster, "router-1")) == 12
    finally:
        cluster("start", "controlplane-0")
        cluster.wait_healthy()


def test_redis_keeps_what_was_set_over_a_restart(cluster: Project) -> None:
    """SLO targets survive a restart of Redis, and serving comes back by itself."""
    own_container(
        cluster, "data", "steelyard", "ctl", "set-slo", "tight:175:39.7", "loose:525:119.1",
        "--control-plane", CONTROL_PLANES[0],
    )  # fmt: skip
    before = cluster.exec("redis", "redis-cli", "hgetall", "steelyard:slo")
    assert "tight" in before
    cluster("restart", "redis")
    cluster.wait_healthy()
    assert cluster.exec("redis", "redis-cli", "hgetall", "steelyard:slo") == before
    eventually(lambda: set(instances(cluster, CONTROL_PLANES[0])) == AGENTS)
    assert len(generate(cluster, "router-0")) == 12


def test_every_service_serves_metrics(cluster: Project) -> None:
    """Each service answers /metrics and /healthz on the port that Prometheus is told."""
    ports = {"controlplane": 7421, "router": 7401, "prefill": 7451, "decode": 7451}
    urls = [
        f"http://{service}:{ports[service.rpartition('-')[0]]}/{page}"
        for service in sorted(SERVICES - {"redis"})
        for page in ("metrics", "healthz")
    ]
    script = (
        "import sys, urllib.request\n"
        "for url in sys.argv[1:]: print(urllib.request.urlopen(url, timeout=10).status)"
    )
    output = own_container(cluster, "data", "python", "-c", script, *urls)
    assert output.split() == ["200"] * len(urls)
