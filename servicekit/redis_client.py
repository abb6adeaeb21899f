"""Connections to Redis, all opened alike."""

from urllib.parse import urlsplit, urlunsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from servicekit.errors import RedisUnavailable

REDIS_ERRORS: tuple[type[Exception], ...] = (RedisError, OSError)
"""What a command raises when Redis is away, wrong or refuses."""


def connect(
    url: str,
    *,
    password: str | None = None,
    timeout_seconds: float = 1.0,
    max_connections: int = 16,
) -> redis.asyncio.Redis:
    """Make a client; it connects at its first command, and again after Redis was away.

    Answers are bytes. Commands are not retried: what asks again is the caller's own loop.

    Args:
        url: redis://, rediss:// or unix://; a password in it is used unless `password` is given.
        password: of Redis.
        timeout_seconds: for connecting, and for each answer.
        max_connections: of this client; a further command waits for one.
    """
    arguments = {} if password is None else {"password": password}
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        _without_credentials(url) if password is not None else url,
        socket_connect_timeout=timeout_seconds,
        socket_timeout=timeout_seconds,
        max_connections=max_connections,
        timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
        **arguments,
    )
    return redis.asyncio.Redis.from_pool(pool)


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


async def ping(client: redis.asyncio.Redis, url: str) -> None:
    """Make sure that Redis answers and lets us in.

    Raises:
        RedisUnavailable: it does not; the message says where and why, without the password.
    """
    shown = _without_credentials(url)
    try:
        await client.ping()
    except REDIS_ERRORS as error:
        raise RedisUnavailable(
            f"Redis at {shown} does not answer: {str(error) or type(error).__name__}",
            retry_after_seconds=1.0,
        ) from error
