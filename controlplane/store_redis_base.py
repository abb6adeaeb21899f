"""What all parts of the Redis store share: the client, the scripts, the errors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import redis.asyncio
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

from controlplane.core.liveness import Timing
from servicekit.errors import RedisUnavailable
from servicekit.redis_keys import PREFIX

_AWAY = (RedisConnectionError, RedisTimeoutError, ReadOnlyError, OutOfMemoryError, OSError)
_FOR_NOW = re.compile(r"\b(BUSY|CLUSTERDOWN|MASTERDOWN|MISCONF|NOREPLICAS) ")
"""In answers by which Redis refuses whatever is asked, or written, until it is better again."""
_SCRIPTS = (
    "change",
    "hold_calibration",
    "point_constants",
    "publish",
    "publish_constants",
    "register",
    "release",
    "set_slo",
    "tick",
    "write_lengths",
    "write_reports",
)


class RedisBase:
    """Runs scripts on one client.

    Args:
        client: answers in bytes.
        timing: how long the readable hash of an instance lives.
        max_outcomes: rows kept, about.
        max_events: rows kept, about.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        timing: Timing,
        max_outcomes: int = 100_000,
        max_events: int = 10_000,
    ) -> None:
        # Its types speak of str as well; connections made by servicekit answer in bytes.
        self._redis: Any = client
        self._max_outcomes = max_outcomes
        self._max_events = max_events
        self.shown_ms = round(timing.stale_after_seconds * 1000)
        """TTL of `instance:{id}`: three reports."""
        self.gone_ms = round((timing.gone_after_seconds + timing.stale_after_seconds) * 1000)
        """Its TTL once the instance is stale."""
        folder = resources.files("controlplane") / "lua"
        self._scripts = {
            name: client.register_script((folder / f"{name}.lua").read_text()) for name in _SCRIPTS
        }

    async def _run(self, script: str, *arguments: str | bytes | int) -> Any:
        """Run a script with the key prefix before its arguments.

        Raises:
            RedisUnavailable: Redis does not answer.
        """
        with self._translated():
            return await self._scripts[script](args=[PREFIX, *arguments])

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what a client raises while Redis is away into our own error."""
        try:
            yield
        except _AWAY as error:
            raise _unavailable("does not answer", error) from error
        except ResponseError as error:
            if not _FOR_NOW.search(str(error)):
                raise
            raise _unavailable("refuses", error) from error


def _unavailable(how: str, error: Exception) -> RedisUnavailable:
    return RedisUnavailable(
        f"Redis {how}: {str(error) or type(error).__name__}", retry_after_seconds=1.0
    )
