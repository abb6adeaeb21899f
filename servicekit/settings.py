"""Settings from the environment: one frozen class a process, printable with `--print-config`."""

from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from servicekit.errors import SettingsInvalid
from servicekit.logging import LogFormat
from servicekit.options import DEFAULT_MAX_MESSAGE_BYTES, ServerOptions

MASK = "********"


class ServiceSettings(BaseSettings):
    """What every service can be told; a service's own class adds to it and sets `env_prefix`.

    Prefixes: STEELYARD_CONTROLPLANE_, STEELYARD_ROUTER_, STEELYARD_AGENT_.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", env_nested_delimiter="__", env_prefix="STEELYARD_"
    )

    listen: str = Field("127.0.0.1:0", description="host:port of gRPC; port 0 takes a free one")
    http_listen: str | None = Field(
        None, description="host:port of /metrics, /healthz and pages; empty for none"
    )
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="where Redis is")
    redis_password: SecretStr | None = Field(None, description="taken over one in the URL")
    log_level: str = Field("INFO", description="lowest level written")
    log_format: LogFormat = Field("auto", description="auto, console or json")
    max_message_bytes: int = Field(
        DEFAULT_MAX_MESSAGE_BYTES, gt=0, description="longest gRPC message accepted"
    )
    drain_grace_seconds: float = Field(
        10.0, ge=0, description="how long calls may go on once the service stops"
    )

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Read the environment; `overrides` (from a command line) win, None counts as not given.

        Raises:
            SettingsInvalid: a value does not fit; the message names each variable.
        """
        try:
            return cls(**{key: value for key, value in overrides.items() if value is not None})
        except ValidationError as error:
            raise SettingsInvalid(_explain(cls, error)) from error

    @classmethod
    def variable(cls, field: str) -> str:
        """Name the environment variable of a field."""
        return f"{cls.model_config.get('env_prefix', '')}{field}".upper()

    def server_options(self) -> ServerOptions:
        """Pick what the server needs."""
        return ServerOptions(
            listen=self.listen,
            http_listen=self.http_listen or None,
            max_message_bytes=self.max_message_bytes,
            drain_grace_seconds=self.drain_grace_seconds,
        )

    def print_config(self) -> str:
        """Every setting as a line `VARIABLE=value  # what it is`, secrets masked."""
        lines = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            lines.append(f"{self.variable(name)}={_shown(value)}  # {field.description or name}")
        return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, SecretStr):
        return MASK if value.get_secret_value() else ""
    return without_password(str(value)) if "://" in str(value) else str(value)


def without_password(url: str) -> str:
    """Mask the password in a URL, so that it can be shown."""
    parts = urlsplit(url)
    if not parts.password:
        return url
    netloc = f"{parts.username or ''}:{MASK}@{parts.netloc.rpartition('@')[2]}"
    return urlunsplit(parts._replace(netloc=netloc))


def _explain(cls: type[ServiceSettings], error: ValidationError) -> str:
    """Say which variable holds what that does not fit; never shows a value that is secret."""
    lines = []
    for problem in error.errors(include_url=False):
        field = str(problem["loc"][0]) if problem["loc"] else "?"
        lines.append(f"{cls.variable(field)}: {problem['msg']}")
    return "\n".join(lines)
