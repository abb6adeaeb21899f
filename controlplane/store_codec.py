"""Values as the flat hashes that Redis holds: field names with units, plain decimal strings."""

from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from controlplane.core.lengths import BUCKET_EDGES
from controlplane.core.values import Constants, Engine, Outcome, Slo, Targets
from enginemodel.model import EngineConstants

T = TypeVar("T")

_STANDARD_ERROR, _SCALE = "_stderr", "scale."


def text(value: object) -> str:
    """Write a value as redis-cli should show it: no exponents, booleans as 0 and 1."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")
    return str(value)


def decoded(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """Read what HGETALL answers."""
    return {key.decode(): value.decode() for key, value in raw.items()}


class Flat(Generic[T]):
    """Turns one flat dataclass into fields and back; what is missing takes its default."""

    def __init__(self, kind: Callable[..., T]) -> None:
        self._kind = kind
        hints: dict[str, Any] = get_type_hints(kind)
        self._readers = {name: _reader(hint) for name, hint in hints.items()}

    def to_fields(self, value: T) -> dict[str, str]:
        """Return the fields; None is left out."""
        found = {name: getattr(value, name) for name in self._readers}
        return {name: text(part) for name, part in found.items() if part is not None}

    def from_fields(self, stored: Mapping[str, str]) -> T:
        """Read the fields; further ones are ignored."""
        known = {name: self._readers[name](raw) for name, raw in stored.items() if name in self}
        return self._kind(**known)

    def __contains__(self, name: str) -> bool:
        """Whether there is such a field."""
        return name in self._readers


def _reader(hint: Any) -> Callable[[str], Any]:
    if hint is bool:
        return lambda raw: raw == "1"
    if isinstance(hint, type) and issubclass(hint, (int, float, StrEnum)):
        return hint
    if hint is str:
        return str
    return int if int in get_args(hint) else float


ENGINE: Flat[Engine] = Flat(Engine)
OUTCOME: Flat[Outcome] = Flat(Outcome)
_VALUES: Flat[EngineConstants] = Flat(EngineConstants)
_FLAT_CONSTANTS = {
    "heldout_median_error": float,
    "sample_count": int,
    "fingerprint": str,
    "reason": str,
}


def constants_fields(constants: Constants) -> dict[str, str]:
    """Return the fields of one version, but for its version and time, which the store gives."""
    found = _VALUES.to_fields(constants.constants)
    if constants.standard_error is not None:
        for name, value in _VALUES.to_fields(constants.standard_error).items():
            found[f"{name}{_STANDARD_ERROR}"] = value
    for instance_id, scale in constants.instance_scale.items():
        found[f"{_SCALE}{instance_id}"] = text(scale)
    found |= {name: text(getattr(constants, name)) for name in _FLAT_CONSTANTS}
    return found


def constants_from(profile: str, stored: Mapping[str, str]) -> Constants:
    """Read one version."""
    errors = {
        name.removesuffix(_STANDARD_ERROR): value
        for name, value in stored.items()
        if name.endswith(_STANDARD_ERROR)
    }
    return Constants(
        profile=profile,
        version=int(stored["version"]),
        constants=_VALUES.from_fields(stored),
        standard_error=_VALUES.from_fields(errors) if errors else None,
        instance_scale={
            name.removeprefix(_SCALE): float(value)
            for name, value in stored.items()
            if name.startswith(_SCALE)
        },
        published_unix_seconds=float(stored["published_unix"]),
        **{name: kind(stored[name]) for name, kind in _FLAT_CONSTANTS.items()},
    )


def slo_fields(slo: Slo) -> dict[str, str]:
    """Return the targets as `class.ttft_seconds`, an empty value for what is not aimed for."""
    found = {"default_class": slo.default_class}
    for name, targets in slo.classes.items():
        for part in ("ttft_seconds", "tpot_seconds", "ttft_seconds_per_prompt_token"):
            value = getattr(targets, part)
            found[f"{name}.{part}"] = "" if value is None else text(value)
    return found


def slo_from(stored: Mapping[str, str]) -> Slo:
    """Read the targets."""
    classes: dict[str, dict[str, Any]] = {}
    for name, value in stored.items():
        slo_class, dot, part = name.rpartition(".")
        if dot:
            classes.setdefault(slo_class, {})[part] = float(value) if value else None
    return Slo(
        {name: Targets(**parts) for name, parts in sorted(classes.items())},
        stored["default_class"],
    )


def weights_text(weights: list[float]) -> str:
    """Write a histogram as `upper edge in tokens:weight`, where there is any."""
    pairs = zip(BUCKET_EDGES, weights, strict=True)
    return " ".join(f"{edge}:{weight:.6f}" for edge, weight in pairs if weight >= 5e-7)


def weights_from(stored: str) -> list[float]:
    """Read a histogram; edges that are none of ours are ignored."""
    found = dict(pair.split(":") for pair in stored.split())
    return [float(found.get(str(edge), 0.0)) for edge in BUCKET_EDGES]
