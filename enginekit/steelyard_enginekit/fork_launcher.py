"""Run a cluster of vLLM servers from one warm image: `python -m steelyard_enginekit.fork_launcher SPEC`.

SPEC is a path to a JSON file, or the JSON itself, see `spec.py`:

    {"model": "/tmp/tiny", "flags": ["--block-size", "32"], "servers": [
      {"name": "p0", "role": "prefill", "port": 8101, "side_channel_port": 5601, "log": "/tmp/p0.log"},
      {"name": "d0", "role": "decode", "port": 8121, "side_channel_port": 5621, "log": "/tmp/d0.log"},
      {"name": "solo", "role": "solo", "port": 8100, "log": "/tmp/solo.log"}]}

Standard output carries JSON lines only. The first is `{"event": "ready", ...}` when every server answers
/health, or `{"event": "failed", "message": ...}` with exit code 2. Then come answers to commands, which are
JSON lines on standard input, and `{"event": "exited", "name": ..., "code": ...}` when a server dies unasked.

| command | answer |
|--|--|
| `{"kill": NAME}` | `{"event": "killed", ...}` after SIGKILL on its whole group, when nothing of it is left |
| `{"restart": NAME}` | the same kill, a new fork on the same ports, `{"event": "restarted", ...}` when healthy |
| `{"freeze": NAME}` / `{"thaw": NAME}` | `{"event": "frozen"}` / `{"event": "thawed"}`: SIGSTOP / SIGCONT on the group |
| `{"status": true}` | `{"event": "status", "servers": {...}}` |
| anything else | `{"event": "error", "message": ...}` |

SIGTERM, SIGINT, and the death of the process that started the launcher take every server down
(`--outlive-parent` keeps the launcher through the last). SIGKILL on the launcher does too, by the kernel's
hand. The end of standard input does nothing: it may be /dev/null.
"""

import argparse
import http.client
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from steelyard_enginekit import process, warm_image
from steelyard_enginekit.environment import server_arguments, server_environment
from steelyard_enginekit.errors import EngineKitError, StartupError, UnknownServerError
from steelyard_enginekit.spec import ClusterSpec, ServerSpec, parse_cluster

_IDLE_POLL_SECONDS = 0.5
_STARTING_POLL_SECONDS = 0.1
_GROUP_GONE_TIMEOUT_SECONDS = 10.0


@dataclass(slots=True)
class _Server:
    """One server's state; `group_id` is its leader's pid and session, None while nothing runs."""

    spec: ServerSpec
    group_id: int | None = None
    started_at: float = 0.0
    healthy: bool = False

    @property
    def starting(self) -> bool:
        return self.group_id is not None and not self.healthy


class Launcher:
    """Owns the servers. Single-threaded by necessity: it is the image that gets forked."""

    def __init__(self, spec: ClusterSpec, output_fd: int, stop_grace_seconds: float) -> None:
        self._spec = spec
        self._servers = {server.name: _Server(server) for server in spec.servers}
        self._output_fd = output_fd
        self._stop_grace_seconds = stop_grace_seconds
        self._announced = False
        self._started_at = time.monotonic()
        self._input = b""
        self._input_open = True
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        self._stopping = False

    def run(self, parent_pid: int | None) -> None:
        """Start every server, then serve commands until told to stop; leaves nothing behind.

        Raises:
            StartupError: when the cluster does not come up; every server is down by then.
        """
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            for server in self._servers.values():
                self._fork(server)
            while not self._stopping:
                self._turn()
                if parent_pid is not None and os.getppid() != parent_pid:
                    break
        finally:
            self._stop_all()

    def _turn(self) -> None:
        starting = any(server.starting for server in self._servers.values())
        readable = [self._wakeup_read, *([0] if self._input_open else [])]
        pause = _STARTING_POLL_SECONDS if starting else _IDLE_POLL_SECONDS
        ready, _, _ = select.select(readable, [], [], pause)
        if self._wakeup_read in ready:
            os.read(self._wakeup_read, 4096)
        if 0 in ready:
            self._read_commands()
        self._notice_deaths()
        for server in self._servers.values():
            if server.starting:
                self._check_health(server)
        if not self._announced and all(server.healthy for server in self._servers.values()):
            self._announced = True
            seconds = round(time.monotonic() - self._started_at, 2)
            self._say({"event": "ready", "seconds": seconds, "servers": self._status()})

    # ---- commands

    def _read_commands(self) -> None:
        chunk = os.read(0, 65536)
        self._input_open = bool(chunk)
        *lines, self._input = (self._input + chunk).split(b"\n")
        for line in lines:
            if not line.strip():
                continue
            try:
                self._command(json.loads(line))
            except (ValueError, EngineKitError) as error:
                self._say({"event": "error", "message": str(error)})

    def _command(self, command: object) -> None:
        if not isinstance(command, dict) or len(command) != 1:
            raise UnknownServerError("a command is an object with one field")
        ((verb, name),) = command.items()
        if verb == "status":
            self._say({"event": "status", "servers": self._status()})
            return
        if not isinstance(name, str) or name not in self._servers:
            raise UnknownServerError(f"no server is named {name!r}")
        server = self._servers[name]
        if verb == "kill":
            self._kill(server)
            self._say({"event": "killed", "name": name})
        elif verb == "restart":
            self._kill(server)
            self._fork(server)
        elif verb in ("freeze", "thaw"):
            if server.group_id is not None:
                number = signal.SIGSTOP if verb == "freeze" else signal.SIGCONT
                process.signal_group(server.group_id, number)
            self._say({"event": "frozen" if verb == "freeze" else "thawed", "name": name})
        else:
            raise UnknownServerError(f"no command is named {verb!r}")

    # ---- life and death of one server

    def _fork(self, server: _Server) -> None:
        server.spec.log.parent.mkdir(parents=True, exist_ok=True)
        launcher_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(server.spec, launcher_pid)
        server.group_id, server.healthy, server.started_at = pid, False, time.monotonic()

    def _become(self, spec: ServerSpec, launcher_pid: int) -> None:
        """Runs in the child and never returns."""
        code = 1
        try:
            process.die_with_parent(launcher_pid)
            process.tie_forks_to_their_parent()
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            for descriptor in (self._wakeup_read, self._wakeup_write, self._output_fd):
                os.close(descriptor)
            _redirect(spec.log)
            side = spec.side_channel_port
            os.environ.update(server_environment(host=self._spec.host, side_channel_port=side))
            os.environ.update(spec.environment)
            model = [
                "--model",
                self._spec.model,
                "--served-model-name",
                self._spec.served_model_name,
            ]
            warm_image.run_server(
                server_arguments(
                    host=self._spec.host,
                    port=spec.port,
                    role=spec.role,
                    flags=[*model, *self._spec.flags, *spec.flags],
                    kv_overrides=spec.kv_transfer,
                )
            )
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - the log is the only place left to tell
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)  # not exit: the launcher's own clean-up is not this process's business

    def _check_health(self, server: _Server) -> None:
        age_seconds = time.monotonic() - server.started_at
        if _is_healthy(self._spec.host, server.spec.port):
            server.healthy = True
            if self._announced:
                self._say({"event": "restarted", "name": server.spec.name, "pid": server.group_id,
                           "seconds": round(age_seconds, 2)})  # fmt: skip
        elif age_seconds > self._spec.ready_timeout_seconds:
            self._kill(server)
            self._startup_failed(server, f"was not healthy within {age_seconds:.0f} s")

    def _notice_deaths(self) -> None:
        dead = process.reap()
        for server in self._servers.values():
            if server.group_id not in dead:
                continue
            was_starting, code = server.starting, dead[server.group_id]
            self._kill(server)  # its engine core, if that lives on
            if was_starting:
                self._startup_failed(server, f"exited with {code} before it was healthy")
            else:
                self._say({"event": "exited", "name": server.spec.name, "code": code})

    def _startup_failed(self, server: _Server, what: str) -> None:
        message = f"{server.spec.name} {what}; see {server.spec.log}"
        if not self._announced:
            raise StartupError(message)
        self._say({"event": "error", "name": server.spec.name, "message": message})

    def _kill(self, server: _Server) -> None:
        group_id, server.group_id, server.healthy = server.group_id, None, False
        if group_id is None:
            return
        process.signal_group(group_id, signal.SIGKILL)
        self._await_gone([group_id], _GROUP_GONE_TIMEOUT_SECONDS)

    def _await_gone(self, group_ids: list[int], timeout_seconds: float) -> list[int]:
        """Wait until the groups are gone; returns those that are not."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._notice_deaths()
            left = [group_id for group_id in group_ids if process.group_exists(group_id)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)

    def _stop_all(self) -> None:
        """SIGTERM to the leaders, who stop their engine cores in order; SIGKILL to what is left."""
        groups = [s.group_id for s in self._servers.values() if s.group_id is not None]
        for server in self._servers.values():
            server.group_id = None
        for group_id in groups:
            process.signal_group(group_id, signal.SIGCONT)
            try:
                os.kill(group_id, signal.SIGTERM)
            except ProcessLookupError:
                continue
        for group_id in self._await_gone(groups, self._stop_grace_seconds):
            process.signal_group(group_id, signal.SIGKILL)
        self._await_gone(groups, _GROUP_GONE_TIMEOUT_SECONDS)

    # ---- talk

    def _status(self) -> dict[str, object]:
        return {
            name: {
                "pid": s.group_id,
                "port": s.spec.port,
                "role": s.spec.role,
                "healthy": s.healthy,
            }
            for name, s in self._servers.items()
        }

    def _say(self, message: dict[str, object]) -> None:
        _write_line(self._output_fd, message)

    def _on_stop_signal(self, _number: int, _frame: object) -> None:
        self._stopping = True


def _redirect(log: Path) -> None:
    """Standard input from nowhere, output and errors to the log, which a restart continues."""
    null = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(file)


def _is_healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _write_line(descriptor: int, message: dict[str, object]) -> None:
    data = (json.dumps(message) + "\n").encode()
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BrokenPipeError:
        return  # nobody listens; the death of the parent is noticed elsewhere


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="steelyard_enginekit.fork_launcher")
    parser.add_argument("spec", help="path to the JSON spec, or the JSON itself")
    parser.add_argument("--outlive-parent", action="store_true", help="go on when the starter dies")
    parser.add_argument("--stop-grace-seconds", type=float, default=8.0, metavar="S",
                        help="how long servers may take to stop before SIGKILL (default 8)")  # fmt: skip
    options = parser.parse_args(arguments)
    parent_pid = None if options.outlive_parent else os.getppid()
    output_fd = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to standard output; ours belongs to the JSON lines
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        inline = options.spec.lstrip().startswith("{")
        spec = parse_cluster(options.spec if inline else Path(options.spec).read_text("utf-8"))
        process.adopt_orphans()
        with process.scratch_directory():
            warm_image.preload(spec.preload)
            Launcher(spec, output_fd, options.stop_grace_seconds).run(parent_pid)
    except (EngineKitError, OSError) as error:
        _write_line(output_fd, {"event": "failed", "message": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
