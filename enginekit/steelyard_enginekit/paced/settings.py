"""What a paced server is told, in one environment variable."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from enginemodel.model import EngineConstants
from steelyard_enginekit.errors import InvalidPaceError

VARIABLE = "STEELYARD_PACE"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSettings:
    """How fast, and where it is written down.

    Attributes:
        constants: Of the engine that is paced after, undilated.
        kv_bytes_per_token: Of the model that is paced after; sizes hand-offs.
        dilation: Real seconds an engine second; > 0.
        record: JSONL file of steps, appended to; None keeps no record.
        carry_seconds: Real. A step that begins at most this long after the last one ended counts
            from there: the time between belongs to the engine, and the model prices whole cycles.
        debt_seconds: Real. Lateness up to this is made up for by shorter waits.
        niceness: Asked for the engine's thread; refusals are accepted.
        autogroup: Asked for the session's weight where the kernel groups by session; likewise.
        switch_seconds: How long other threads of the engine may hold the interpreter.
    """

    constants: EngineConstants
    kv_bytes_per_token: int
    dilation: float = 1.0
    record: Path | None = None
    carry_seconds: float = 3e-3
    debt_seconds: float = 8e-3
    niceness: int = -10
    autogroup: int = -15
    switch_seconds: float = 5e-4


def parse_settings(text: str) -> PaceSettings:
    """Read the variable.

    Raises:
        InvalidPaceError: it is no JSON object, or a field is missing, unknown or out of range.
    """
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InvalidPaceError(f"{VARIABLE} is not JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("constants"), dict):
        raise InvalidPaceError(f"{VARIABLE} must be a JSON object with an object `constants`")
    record = raw.pop("record", None)
    try:
        settings = PaceSettings(
            **raw | {"constants": _constants(raw["constants"])},
            record=None if record is None else Path(record),
        )
    except TypeError as error:
        raise InvalidPaceError(f"{VARIABLE}: {error}") from error
    _refuse_out_of_range(settings)
    return settings


def _constants(raw: Mapping[str, object]) -> EngineConstants:
    values = {name: value for name, value in raw.items() if isinstance(value, int | float)}
    if len(values) != len(raw) or not all(0 <= v < math.inf for v in values.values()):
        raise InvalidPaceError(f"{VARIABLE}.constants must be finite numbers, none negative")
    return EngineConstants(**{name: float(value) for name, value in values.items()})


def _refuse_out_of_range(settings: PaceSettings) -> None:
    numbers = {f.name: getattr(settings, f.name) for f in fields(PaceSettings)[1:]}
    del numbers["record"]
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidPaceError(f"{VARIABLE}.{name} must be a number, not {value!r}")
    positive = ("kv_bytes_per_token", "dilation", "switch_seconds")
    for name in positive:
        if not 0 < numbers[name] < math.inf:
            raise InvalidPaceError(f"{VARIABLE}.{name} must be positive, not {numbers[name]!r}")
    for name in ("carry_seconds", "debt_seconds"):
        if not 0 <= numbers[name] < math.inf:
            raise InvalidPaceError(f"{VARIABLE}.{name} must not be negative: {numbers[name]!r}")
    if settings.constants.handoff_bytes_per_second == 0:
        raise InvalidPaceError(f"{VARIABLE}.constants.handoff_bytes_per_second must be positive")
