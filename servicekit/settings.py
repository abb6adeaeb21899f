"""Settings from the environment: one frozen class a process, printable with `--print-config`."""

import json
import logging
import re
from typing import Any, Self, get_origin
from urllib.parse import urlsplit, urlunsplit

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from servicekit.errors import SettingsInvalid
from servicekit.logging import LogFormat
from servicekit.options import DEFAULT_MAX_MESSAGE_BYTES, ServerOptions

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]/]*):(\d{1,5})")
_MOST_PORTS = 65_535
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
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

    @field_validator("listen", "http_listen")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        match = _ADDRESS.fullmatch(value) if value else None
        if value and (match is None or int(match[2]) > _MOST_PORTS):
            raise ValueError(f"{value!r} is not host:port")
        return value

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis_url(cls, value: str) -> str:
        if not value.startswith(_REDIS_SCHEMES):  # it may hold a password: not shown
            raise ValueError(f"does not begin with {', '.join(_REDIS_SCHEMES)}")
        return value

    @field_validator("log_level")
    @classmethod
    def _is_a_level(cls, value: str) -> str:
        if value.upper() not in logging.getLevelNamesMapping():
            raise ValueError(f"{value!r} is no level, as DEBUG, INFO, WARNING and ERROR are")
        return value

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """Read the environment; `overrides` (from a command line) win, None counts as not given.

        Lists and mappings may be given as JSON, as in the environment.

        Raises:
            SettingsInvalid: a value does not fit, or there is no such setting; the message names
                each variable.
        """
        given = {key: value for key, value in overrides.items() if value is not None}
        unknown = sorted(given.keys() - cls.model_fields.keys())
        if unknown:
            names = ", ".join(cls.variable(name) for name in unknown)
            raise SettingsInvalid(f"{names}: no such setting; --print-config shows all")
        try:
            return cls(**{key: cls._decoded(key, value) for key, value in given.items()})
        except ValidationError as error:
            raise SettingsInvalid(_explain(cls, error)) from error
        except SettingsError as error:  # names the field, in quotes, and hides why
            field = str(error).partition('"')[2].partition('"')[0]
            raise SettingsInvalid(f"{cls.variable(field)}: is not JSON") from error

    @classmethod
    def _decoded(cls, name: str, value: Any) -> Any:
        """Read the JSON of a list or mapping that was given as text."""
        structured = get_origin(cls.model_fields[name].annotation) in (list, dict)
        if not structured or not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise SettingsInvalid(f"{cls.variable(name)}: is not JSON") from error

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
    if isinstance(value, list | dict):
        return json.dumps(value)
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
        lines.append(f"{cls.variable(field)}: {problem['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)
