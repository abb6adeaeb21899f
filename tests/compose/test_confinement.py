"""What the containers may not do, asked of the engine that runs them."""

import subprocess

import pytest

from tests.compose.support import IMAGE, SERVICES, Project, run

OURS = sorted(SERVICES - {"redis"})


def test_nothing_is_published_beyond_the_loopback(cluster: Project) -> None:
    """Every published port is bound to 127.0.0.1, and Redis and the agents publish none."""
    published = {}
    for service in SERVICES:
        ports = cluster.inspect(service)["NetworkSettings"]["Ports"]
        published[service] = {b["HostIp"] for bound in ports.values() for b in bound or []}
    assert all(addresses <= {"127.0.0.1"} for addresses in published.values())
    assert {name for name, addresses in published.items() if addresses} == {
        "controlplane-0", "controlplane-1", "router-0", "router-1",
    }  # fmt: skip


@pytest.mark.parametrize("service", OURS)
def test_services_run_without_privileges(cluster: Project, service: str) -> None:
    """A service is not root, has no capabilities, gains none, and cannot write its file system."""
    host = cluster.inspect(service)["HostConfig"]
    status = cluster.exec(service, "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert host["ReadonlyRootfs"]
    assert host["Memory"] > 0
    assert host["NanoCpus"] > 0


def test_redis_itself_is_not_root(cluster: Project) -> None:
    """The server runs as the image's redis user, and no process shows the password."""
    keeper = cluster.exec("redis", "stat", "-c", "%U", "/data/appendonlydir")
    assert keeper.strip() == "redis"
    container = cluster.containers()["redis"]
    processes = run("docker", "top", container, "-o", "pid,user,args")
    rows = [line.split(None, 2) for line in processes.splitlines()[1:]]
    (owner,) = [user for _, user, command in rows if command.startswith("redis-server")]
    assert owner not in {"0", "root"}
    assert "weigh1st" not in processes


def test_redis_wants_its_password(cluster: Project) -> None:
    """Without the password Redis answers nothing."""
    answer = cluster.exec("redis", "env", "-u", "REDISCLI_AUTH", "redis-cli", "ping")
    assert answer.startswith("NOAUTH")


def test_agents_cannot_reach_redis(cluster: Project) -> None:
    """On the agents' network there is no Redis to be found."""
    script = "import socket; socket.create_connection(('redis', 6379), timeout=5)"
    done = subprocess.run(
        ["docker", "run", "--rm", "--network", f"{cluster.name}_data", IMAGE, "python", "-c", script],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "gaierror" in done.stderr


def test_the_image_holds_no_engine_and_no_tools(image: str) -> None:
    """The image has the services and what they need: no torch, no vLLM, no pip, no plotting."""
    script = (
        "import importlib.util as u, sys\n"
        "print([n for n in sys.argv[1:] if u.find_spec(n)])"
    )  # fmt: skip
    names = ("torch", "vllm", "pip", "matplotlib", "pytest", "hatchling")
    output = run("docker", "run", "--rm", image, "python", "-c", script, *names)
    assert output.strip() == "[]"
