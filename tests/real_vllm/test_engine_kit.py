"""The engine kit on real vLLM and NIXL: clusters come and go whole, and hand-offs can be freed."""

import http.client
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.engine_cluster import (
    PYTHON,
    EngineCluster,
    engine_cluster,
    free_ports,
    make_tiny_model,
    servers_spec,
    wait_until,
)

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(240)]

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, seed 0."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), "--seed", "0")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCluster]:
    """One prefill, one decode and one solo engine, shared by the tests of this module."""
    servers = servers_spec(tmp_path_factory.mktemp("logs"), prefills=1, decodes=1)
    with engine_cluster(model, servers) as running:
        yield running


def call(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    """One HTTP exchange with a server: status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def complete(port: int, prompt: list[int], **fields: object) -> dict[str, Any]:
    """A greedy completion, which must succeed."""
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "return_token_ids": True}
    status, answer = call(port, "POST", "/v1/completions", body | fields)
    assert status == 200, answer
    parsed: dict[str, Any] = json.loads(answer)
    return parsed


def prefill(port: int, prompt: list[int]) -> dict[str, Any]:
    """Prefill a prompt and return the hand-off."""
    answer = complete(port, prompt, max_tokens=1, kv_transfer_params=REMOTE_DECODE)
    handoff: dict[str, Any] = answer["kv_transfer_params"]
    return handoff


def metric(port: int, name: str, label: str = "") -> float:
    """The sum of one metric over its series that carry `label`."""
    lines = call(port, "GET", "/metrics")[1].decode().splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(name + "{") and label in x)


def prompt_of(length: int, seed: int) -> list[int]:
    """Reproducible token ids, none of them special."""
    source = random.Random(seed)
    return [source.randrange(6, 262) for _ in range(length)]


def group_members(group_id: int) -> list[int]:
    """The living processes of a process group."""
    listing = subprocess.run(
        ["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listing.stdout.splitlines()]
    return [int(pid) for pid, group, state in rows if int(group) == group_id and state[0] != "Z"]


@pytest.mark.parametrize("length", [2, 127, 128, 129, 700])
def test_pair_equals_solo(cluster: EngineCluster, length: int) -> None:
    """A prompt prefilled on one engine and decoded on another gives the solo engine's tokens."""
    prompt = prompt_of(length, seed=length)
    pulled = "vllm:prompt_tokens_by_source_total", 'source="external_kv_transfer"'
    before = metric(cluster.ports["d0"], *pulled)

    handoff = prefill(cluster.ports["p0"], prompt)
    options = {"max_tokens": 24, "ignore_eos": True}
    pair = complete(cluster.ports["d0"], prompt, kv_transfer_params=handoff, **options)
    solo = complete(cluster.ports["solo"], prompt, **options)

    assert solo["choices"][0]["token_ids"] == pair["choices"][0]["token_ids"]
    assert length == metric(cluster.ports["d0"], *pulled) - before


def test_refused_request_frees_the_handoff(cluster: EngineCluster) -> None:
    """A decode engine that refuses a request makes the prefill engine free its KV, unpulled."""
    used = "vllm:kv_cache_usage_perc"
    warm = prompt_of(200, seed=1000)
    complete(
        cluster.ports["d0"],
        warm,
        max_tokens=1,
        kv_transfer_params=prefill(cluster.ports["p0"], warm),
    )
    pulled = metric(cluster.ports["d0"], "vllm:nixl_bytes_transferred_sum")
    handoff = prefill(cluster.ports["p0"], prompt_of(900, seed=1001))
    assert metric(cluster.ports["p0"], used) > 0

    body = {"model": "tiny", "prompt": [6], "max_tokens": 1 << 30, "kv_transfer_params": handoff}
    status, _ = call(cluster.ports["d0"], "POST", "/v1/completions", body)

    assert status == 400
    wait_until(lambda: metric(cluster.ports["p0"], used) == 0, 5, "the prefill engine's KV is free")
    assert pulled == metric(cluster.ports["d0"], "vllm:nixl_bytes_transferred_sum")


def test_idle_engine_does_not_spin(cluster: EngineCluster) -> None:
    """With the plugin, an idle engine core that owns a NIXL agent uses under a tenth of a core."""
    (core,) = (p for p in group_members(cluster.pids["p0"]) if p != cluster.pids["p0"])

    def cpu_ticks() -> int:
        fields = Path(f"/proc/{core}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = cpu_ticks()
    time.sleep(2)  # the interval that is measured, not a synchronisation

    spent_seconds = (cpu_ticks() - before) / os.sysconf("SC_CLK_TCK")
    assert spent_seconds < 0.2


def test_kill_and_restart_one(cluster: EngineCluster) -> None:
    """Killing a server takes its engine core; a restart serves again as another engine."""
    prompt = prompt_of(300, seed=2000)
    old_group = cluster.pids["p0"]
    old = prefill(cluster.ports["p0"], prompt)["remote_engine_id"]

    assert cluster.command(kill="p0") == {"event": "killed", "name": "p0"}
    assert group_members(old_group) == []
    answer = cluster.command(restart="p0")
    cluster.pids["p0"] = answer["pid"]

    assert answer["event"] == "restarted"
    handoff = prefill(cluster.ports["p0"], prompt)
    assert old != handoff["remote_engine_id"]
    pair = complete(cluster.ports["d0"], prompt, max_tokens=8, kv_transfer_params=handoff)
    solo = complete(cluster.ports["solo"], prompt, max_tokens=8)
    assert solo["choices"][0]["token_ids"] == pair["choices"][0]["token_ids"]


def test_unasked_death_is_reported(cluster: EngineCluster) -> None:
    """When a server dies unasked, the launcher says so and clears its engine core away."""
    group = cluster.pids["solo"]

    os.kill(group, signal.SIGKILL)

    assert cluster.read(20) == {"event": "exited", "name": "solo", "code": -signal.SIGKILL}
    assert group_members(group) == []
    answer = cluster.command(restart="solo")
    cluster.pids["solo"] = answer["pid"]
    assert answer["event"] == "restarted"


def test_bad_commands_are_answered(cluster: EngineCluster) -> None:
    """An unknown name, an unknown verb and a line that is not JSON get an error each."""
    assert "nobody" in cluster.command(kill="nobody")["message"]
    assert "dance" in cluster.command(dance="p0")["message"]
    assert cluster.process.stdin is not None
    cluster.process.stdin.write("{\n")
    cluster.process.stdin.flush()
    assert cluster.read(10)["event"] == "error"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "terminate"])
def test_nothing_outlives_the_launcher(model: Path, tmp_path: Path, number: int) -> None:
    """However the launcher ends, none of its processes is left."""
    servers = servers_spec(tmp_path, prefills=1, decodes=0, solo=False)
    with engine_cluster(model, servers) as running:
        group = running.pids["p0"]
        assert len(group_members(group)) == 2

        running.process.send_signal(number)
        running.process.wait(30)

        wait_until(lambda: group_members(group) == [], 10, "the server's processes are gone")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "both"}, "servers[0].role must be one of"),
        ({"port": 0}, "servers[0].port must be a port number"),
        ({"prot": 1}, "servers[0] has unknown fields: prot"),
    ],
)
def test_invalid_spec_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A spec that makes no sense is refused at once, naming the field."""
    servers = servers_spec(tmp_path, prefills=1, decodes=0, solo=False)
    spec = {"model": "/nowhere", "servers": [servers[0] | change]}

    done = subprocess.run(
        [PYTHON, "-m", "steelyard_enginekit.fork_launcher", json.dumps(spec)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert message in json.loads(done.stdout)["message"]


def test_serve_is_one_engine(model: Path, tmp_path: Path) -> None:
    """The serve command answers requests, and SIGKILL on it takes its engine core along."""
    port, side = free_ports(2)
    command = [
        str(PYTHON),
        "-m",
        "steelyard_enginekit.serve",
        "--role",
        "decode",
        "--port",
        str(port),
    ]
    command += ["--side-channel-port", str(side), "--", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--max-model-len", "512"]

    def is_up() -> bool:
        assert process.poll() is None, (tmp_path / "serve.log").read_text()[-2000:]
        try:
            return call(port, "GET", "/health")[0] == 200
        except OSError:
            return False

    with (tmp_path / "serve.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        wait_until(is_up, 120, "the server is healthy")
        listing = json.loads(call(port, "GET", "/v1/models")[1])
        assert listing["data"][0]["max_model_len"] == 512
        assert len(complete(port, [7, 8, 9], max_tokens=3)["choices"][0]["token_ids"]) <= 3
        assert len(group_members(process.pid)) == 2
    finally:
        process.kill()
        process.wait()

    wait_until(lambda: group_members(process.pid) == [], 10, "the engine core is gone")
