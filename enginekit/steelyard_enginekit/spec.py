"""The JSON spec of a cluster of vLLM servers, validated once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from steelyard_enginekit.environment import ROLES, SOLO
from steelyard_enginekit.errors import InvalidSpecError

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One vLLM server: an API process and the engine core that it forks.

    `flags` are vLLM's own and win over the defaults and over the cluster's `flags`; `environment`
    is set in this server alone, after the fork, so it is too late for what torch or UCX read at
    import. `kv_transfer` overrides fields of the connector's configuration.
    """

    name: str
    role: str
    port: int
    side_channel_port: int | None
    log: Path
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    kv_transfer: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """All servers of one launcher, and what they share."""

    model: str
    servers: tuple[ServerSpec, ...]
    served_model_name: str = "tiny"
    host: str = "127.0.0.1"
    flags: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    ready_timeout_seconds: float = 180.0


def parse_cluster(text: str) -> ClusterSpec:
    """Read a spec.

    Raises:
        InvalidSpecError: naming the field.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InvalidSpecError(f"the spec is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidSpecError("the spec must be a JSON object")
    known = set(ClusterSpec.__slots__)
    _refuse_unknown(raw, known, "spec")
    entries = raw.get("servers")
    if not isinstance(entries, list) or not entries:
        raise InvalidSpecError("spec.servers must be a list with at least one server")
    servers = tuple(_server(entry, f"servers[{index}]") for index, entry in enumerate(entries))
    _refuse_clashes(servers)
    timeout = raw.get("ready_timeout_seconds", 180.0)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
        raise InvalidSpecError("spec.ready_timeout_seconds must be a positive number")
    return ClusterSpec(
        model=_text(raw, "model", "spec"),
        servers=servers,
        served_model_name=_text(raw, "served_model_name", "spec", "tiny"),
        host=_text(raw, "host", "spec", "127.0.0.1"),
        flags=_texts(raw, "flags", "spec"),
        preload=_texts(raw, "preload", "spec"),
        ready_timeout_seconds=float(timeout),
    )


def _server(raw: object, where: str) -> ServerSpec:
    if not isinstance(raw, dict):
        raise InvalidSpecError(f"{where} must be an object")
    _refuse_unknown(raw, set(ServerSpec.__slots__), where)
    role = _text(raw, "role", where)
    if role not in ROLES:
        raise InvalidSpecError(f"{where}.role must be one of {', '.join(ROLES)}, not {role!r}")
    side = _port(raw, "side_channel_port", where) if "side_channel_port" in raw else None
    if side is None and role != SOLO:
        raise InvalidSpecError(f"{where}.side_channel_port is required for role {role}")
    environment = _object(raw, "environment", where)
    if not all(isinstance(value, str) for value in environment.values()):
        raise InvalidSpecError(f"{where}.environment must map names to strings")
    return ServerSpec(
        name=_text(raw, "name", where),
        role=role,
        port=_port(raw, "port", where),
        side_channel_port=side,
        log=Path(_text(raw, "log", where)),
        flags=_texts(raw, "flags", where),
        environment={key: str(value) for key, value in environment.items()},
        kv_transfer=_object(raw, "kv_transfer", where),
    )


def _refuse_unknown(raw: Mapping[str, object], known: set[str], where: str) -> None:
    unknown = sorted(set(raw) - known)
    if unknown:
        raise InvalidSpecError(f"{where} has unknown fields: {', '.join(unknown)}")


def _refuse_clashes(servers: tuple[ServerSpec, ...]) -> None:
    names = [server.name for server in servers]
    ports = [str(server.port) for server in servers]
    ports += [str(s.side_channel_port) for s in servers if s.side_channel_port is not None]
    for what, values in (("name", names), ("port", ports)):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise InvalidSpecError(f"spec.servers use a {what} twice: {', '.join(twice)}")


def _text(raw: Mapping[str, object], key: str, where: str, default: str | None = None) -> str:
    value = raw.get(key, default)
    if not isinstance(value, str) or not value:
        raise InvalidSpecError(f"{where}.{key} must be a non-empty string")
    return value


def _texts(raw: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    value = raw.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidSpecError(f"{where}.{key} must be a list of strings")
    return tuple(value)


def _object(raw: Mapping[str, object], key: str, where: str) -> dict[str, object]:
    value = raw.get(key, {})
    if not isinstance(value, dict):
        raise InvalidSpecError(f"{where}.{key} must be an object")
    return value


def _port(raw: Mapping[str, object], key: str, where: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_PORT:
        raise InvalidSpecError(f"{where}.{key} must be a port number from 1 to {_MAX_PORT}")
    return value
