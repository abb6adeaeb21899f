"""The `steelyard` command where something is wrong: one clear line, the right code, nothing left."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import controlplane.app as controlplane_app
import dataplane.agent.app as agent_app
import dataplane.router.app as router_app
from cli.app import main

MODULES = {"agent": agent_app, "controlplane": controlplane_app, "router": router_app}
STEELYARD = [sys.executable, "-m", "cli.app"]
PATIENCE_SECONDS = 60
MARK = "STEELYARD_TEST_MARK"


def run(monkeypatch, capsys, *arguments: str) -> tuple[object, str, str]:
    """Run the command in this process; returns its exit code or last words, and what it wrote."""
    monkeypatch.setattr(sys, "argv", ["steelyard", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    written = capsys.readouterr()
    return left.value.code, written.out, written.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "hi", "--router", "127.0.0.1:1"], "UNAVAILABLE: .*127.0.0.1:1"),
        (["ctl", "get", "instances", "--control-plane", "127.0.0.1:1"], "UNAVAILABLE: .*:1"),
        (["ctl", "drain", "d0", "--control-plane", "127.0.0.1:1"], "UNAVAILABLE: .*:1"),
        (["generate", "--token-ids", "a,b"], "ids with commas"),
        (["ctl", "set-slo", "tight:nan:1"], "CLASS:TTFT_MS:TPOT_MS"),
        (["ctl", "set-slo", "tight:1:2:3"], "CLASS:TTFT_MS:TPOT_MS"),
        (["up", "--pools", "2X"], "2P4D"),
        (["up", "--pools", "2P"], "need each other"),
        (["up", "--port-base", "70000"], "70000"),
        (["up", "--redis-url", "redis://:hidden@127.0.0.1:1"], "Redis at redis://127.0.0.1:1"),
        (["up", "--redis-url", "somewhere"], "redis://"),
        (["up", "--engine", "vllm", "--vllm-python", "/none/python"], "/none/python .*venv-vllm"),
        (["up", "--engine", "paced", "--vllm-python", "/none/python"], "/none/python .*venv-vllm"),
        (["up", "--engine", "paced", "--profile", "gpu9", "--vllm-python", sys.executable], "gpu9"),
        (["up", "--dilation", "3", "--time-scale", "0.5"], "give one of them"),
        (["up", "--dilation", "0"], "--dilation: 0 is not positive"),
        (["up", "--engine", "vllm", "--dilation", "3"], "paced has a pace"),
        (
            ["up", "--engine", "paced", "--time-scale", "inf", "--vllm-python", sys.executable],
            "finite time scale",
        ),
        (["up", "--engine", "paced", "--model", "m"], "a small model of their own"),
        (["agent", "--rol", "decode"], "--rol decode: no option"),
        (["agent", "--", "--port", "1"], "need --spawn-vllm"),
        (["agent", "--set", "role"], "NAME=VALUE"),
    ],
)
def test_what_cannot_be_done_is_one_line(monkeypatch, capsys, tmp_path, arguments, words):
    """The line names what is wrong, without a traceback; the exit code says that it failed."""
    monkeypatch.chdir(tmp_path)
    said, _, _ = run(monkeypatch, capsys, *arguments)

    assert isinstance(said, str)  # what sys.exit writes to stderr, with code 1
    assert len(said.splitlines()) == 1
    assert re.search(words, said)
    assert "hidden" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "hi", "--max-tokens", "0"],
        ["ctl", "constants", "rollback", "p", "--version", "-1"],
        ["ctl", "get", "everything"],
        ["up", "--engine", "steam"],
        ["no-such-command"],
    ],
)
def test_what_is_no_usage_is_refused(monkeypatch, capsys, arguments):
    """The command line itself is checked before anything is done."""
    code, _, err = run(monkeypatch, capsys, *arguments)

    assert code not in (0, None)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (("agent", "control_planes", "a:1"), "CONTROL_PLANES: is not JSON"),
        (("agent", "time_scale", "-1"), "STEELYARD_AGENT_TIME_SCALE: .*greater than 0"),
        (("agent", "profile", "none"), "no profile 'none'; there are: "),
        (("controlplane", "log_level", "LOUD"), "LOG_LEVEL: 'LOUD'"),
        (("controlplane", "http_listen", "here"), "HTTP_LISTEN: 'here' is not host:port"),
        (("controlplane", "listen", "127.0.0.1:70000"), "LISTEN: .* is not host:port"),
        (("controlplane", "redis_url", "here"), "REDIS_URL: does not begin with redis://"),
        (("router", "control_planes", "127.0.0.1:7420"), "CONTROL_PLANES: is not JSON"),
        (("router", "policy", "none"), "'none'.*late_binding"),
        (("router", "policy_settings", '{"late_binding": {"lag": 1}}'), "lag"),
    ],
)
def test_bad_settings_are_told_alike_on_every_way_in(monkeypatch, capsys, bad, words):
    """`steelyard …`, told by variable or by --set, and `python -m …` say one line and end with 2."""
    service, name, value = bad
    module = MODULES[service]
    said = [run(monkeypatch, capsys, service, "--set", f"{name}={value}")]
    monkeypatch.setenv(f"STEELYARD_{service.upper()}_{name.upper()}", value)
    said.append(run(monkeypatch, capsys, service))
    code = module.main([])
    said.append((code, *capsys.readouterr()))

    assert said[0] == said[1] == said[2]
    assert (code, said[0][1]) == (2, "")
    assert re.fullmatch(f"steelyard: .*{words}.*\n", said[0][2])


def test_a_setting_that_is_none_is_named(monkeypatch, capsys):
    """A name after --set that no setting has is told by the variable that it would be."""
    code, _, said = run(monkeypatch, capsys, "agent", "--set", "rol=decode")

    assert code == 2
    assert "STEELYARD_AGENT_ROL: no such setting" in said


@pytest.mark.parametrize("service", ["controlplane", "router"])
def test_an_address_that_is_taken_is_told_alike_on_every_way_in(monkeypatch, capsys, service):
    """What the settings name and is not to be had ends with 1 and one line, however it was started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        variable = f"STEELYARD_{service.upper()}"
        monkeypatch.setenv(f"{variable}_LISTEN", address)
        monkeypatch.setenv(f"{variable}_LOG_LEVEL", "CRITICAL")
        first = run(monkeypatch, capsys, service)
        second = (MODULES[service].main([]), *capsys.readouterr())

    assert first == second
    assert first[0] == 1
    assert re.fullmatch(f"steelyard: .*{address}.*\n", first[2])


@pytest.mark.parametrize("service", ["controlplane", "router", "agent"])
def test_the_printed_settings_are_settings(monkeypatch, capsys, service):
    """What --print-config shows can be put into the environment as it stands."""
    variables = []
    for _ in range(2):
        code, out, _ = run(monkeypatch, capsys, service, "--print-config")
        assert code in (0, None)
        pairs = [line.partition("  # ")[0].partition("=") for line in out.splitlines()]
        variables.append({name: value for name, _, value in pairs})
        for name, value in variables[-1].items():
            if value:
                monkeypatch.setenv(name, value)

    assert variables[0] == variables[1]
    assert all(name.startswith(f"STEELYARD_{service.upper()}_") for name in variables[0])


def test_lists_are_set_on_the_command_line_as_in_the_environment(monkeypatch, capsys):
    """--set takes JSON where the environment does."""
    _, out, _ = run(
        monkeypatch, capsys, "agent", "--set", 'control_planes=["a:1", "b:2"]', "--print-config"
    )

    assert 'STEELYARD_AGENT_CONTROL_PLANES=["a:1", "b:2"]' in out


@pytest.fixture
def marked(tmp_path) -> Iterator[dict[str, str]]:
    """An environment by which all processes of a test are found; whoever is left is killed."""
    environment = {**os.environ, MARK: str(tmp_path), "TMPDIR": str(tmp_path)}
    yield environment
    for pid in left(environment):
        os.kill(pid, signal.SIGKILL)


def left(environment: dict[str, str]) -> list[int]:
    """Processes that run with a marked environment."""
    mark = f"{MARK}={environment[MARK]}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_taken_port_is_named(marked):
    """A service that cannot listen says where, and ends."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*STEELYARD, "controlplane", "--set", "listen=127.0.0.1:0",
             "--set", f"http_listen=127.0.0.1:{port}"],
            env=marked, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip

    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
    assert left(marked) == []


@pytest.mark.parametrize(("line", "signals"), [("server_started", 1), ("up in", 1)])
def test_ctrl_c_leaves_no_process(marked, tmp_path, line, signals):
    """While parts come up, and once all are up: everything ends, and a second Ctrl-C hurries it."""
    command = [*STEELYARD, "up", "--pools", "1M", "--port-base", "0", "--time-scale", "inf"]
    with subprocess.Popen(
        command, env=marked, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert any(line in text for text in process.stdout)
        for _ in range(signals):
            process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        code = process.wait(PATIENCE_SECONDS)

    assert code in ((0,) if signals == 1 else (0, 130, -signal.SIGINT))
    assert "Traceback" not in rest
    assert left(marked) == []


def test_an_agent_that_waits_for_its_engine_stops_when_told(marked):
    """SIGTERM ends the wait at once, and the engine that it has started."""
    engine = f'["{sys.executable}", "-c", "import time; time.sleep(600)"]'
    command = [
        *STEELYARD, "agent", "--spawn-vllm", "--set", f"vllm_command={engine}",
        "--set", "vllm_url=http://127.0.0.1:9",
    ]  # fmt: skip
    with subprocess.Popen(
        command, env=marked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        assert any("waiting_for_engine" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        code = process.wait(PATIENCE_SECONDS)

    assert code == 0
    assert "Traceback" not in rest
    assert left(marked) == []
