"""Small parts that the simulator's tests share."""

from dataclasses import dataclass, field, replace

from enginemodel.model import EngineConstants
from enginemodel.profiles import REFERENCE, EngineProfile
from simulator.values import Arrival, Outcome, Timing

NO_DELAYS = Timing(
    overhead_seconds=0.0,
    wire_seconds=0.0,
    hop_seconds=0.0,
    staleness_seconds=0.0,
    telemetry_seconds=1000.0,
)


@dataclass
class Kept:
    """Keeps every outcome."""

    outcomes: list[Outcome] = field(default_factory=list)

    def record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def arrival(number: int, at: float, prompt: int, output: int, **fields: object) -> Arrival:
    """Return a request; fields beyond the first have plain values."""
    base = Arrival(number, at, prompt, output, 4096, "loose", "app")
    return base._replace(**fields)


def profile_with(**fields: float) -> EngineProfile:
    """Return the reference profile with other limits or constants."""
    constants: EngineConstants = REFERENCE.constants
    profile = REFERENCE
    for name, value in fields.items():
        if hasattr(constants, name):
            constants = replace(constants, **{name: value})
        else:
            profile = replace(profile, **{name: value})
    return replace(profile, constants=constants)
