"""Whether a fit may price requests: the reasons to refuse, each with what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from calibrator.profile import CONSTANT_NAMES, ProfileFit
from controlplane.core.constants import jumps, problems
from controlplane.core.values import Constants
from enginemodel.model import EngineConstants

MAX_HELDOUT_ERROR = 0.15
MAX_INFLUENCE = 0.10
"""A constant whose standard error moves a prediction in the measured range by more is unknown."""
FEWEST_HELDOUT = 5

Code = Literal["HELDOUT_ERROR", "NOT_IDENTIFIED", "OUT_OF_BOUNDS", "JUMP", "NOTHING_MEASURED"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason not to publish."""

    code: Code
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What may be published.

    Attributes:
        max_heldout_error: Largest median relative error on held-out points, a share.
        accept_jump: Whether a constant may be three times away from the version before.
    """

    max_heldout_error: float = MAX_HELDOUT_ERROR
    accept_jump: bool = False


def draft(
    profile: str, found: ProfileFit, *, fingerprint: str, sample_count: int, reason: str
) -> Constants:
    """Return what is published of a fit; version and time are the control plane's."""
    errors = {name: found.standard_error(name) for name in CONSTANT_NAMES}
    return Constants(
        profile=profile,
        version=0,
        constants=found.constants,
        standard_error=EngineConstants(**errors),
        heldout_median_error=worst_heldout(found),
        sample_count=sample_count,
        fingerprint=fingerprint,
        instance_scale=found.instance_scale,
        reason=reason,
    )


def worst_heldout(found: ProfileFit) -> float:
    """Return the held-out median error of the part that predicts worst; -1 where none was tested."""
    return max((part.median for part in found.heldout.values()), default=-1.0)


def refusals(
    found: ProfileFit, constants: Constants, current: Constants | None, rules: Rules
) -> list[Refusal]:
    """Return every reason to refuse; none where the fit may be published.

    Args:
        found: The fit.
        constants: What would be published of it.
        current: The version that holds; None or uncalibrated where nobody measured before.
        rules: Limits.
    """
    if not found.parts:
        return [Refusal("NOTHING_MEASURED", "no probe was answered in time; give more budget")]
    reasons = [*_unidentified(found), *_imprecise(found, rules.max_heldout_error)]
    reasons += [
        Refusal("OUT_OF_BOUNDS", f"{problem.field.rpartition('.')[2]} {problem.description}")
        for problem in problems(constants)
    ]
    if current is not None and not current.uncalibrated and not rules.accept_jump:
        reasons += _jumps(found, current.constants, constants.constants)
    return reasons


def _unidentified(found: ProfileFit) -> list[Refusal]:
    """Name the constants that the points do not tell."""
    return [
        Refusal(
            "NOT_IDENTIFIED",
            f"{name} is not identified: its standard error of {constant.standard_error:.3g} moves "
            f"predictions by {constant.influence:.0%} (limit {MAX_INFLUENCE:.0%}); give more budget",
        )
        for name, constant in found.measured.items()
        if not constant.influence <= MAX_INFLUENCE
    ]


def _imprecise(found: ProfileFit, limit: float) -> list[Refusal]:
    """Name the parts that predict badly, or that were not tested."""
    reasons = []
    for name in found.parts:
        tested = found.heldout.get(name)
        if tested is None or tested.count < FEWEST_HELDOUT:
            count = tested.count if tested else 0
            message = f"{name} was tested on {count} held-out points, {FEWEST_HELDOUT} are needed"
            reasons.append(Refusal("HELDOUT_ERROR", f"{message}; give more budget"))
        elif tested.median > limit:
            reasons.append(
                Refusal(
                    "HELDOUT_ERROR",
                    f"{name} is off by {tested.median:.1%} in the median on {tested.count} "
                    f"held-out points (limit {limit:.0%}): the machine is noisy or the engine "
                    "does not follow the model",
                )
            )
    return reasons


def _jumps(found: ProfileFit, old: EngineConstants, new: EngineConstants) -> list[Refusal]:
    """Name the measured constants that are far from the version before."""
    measured: Mapping[str, object] = found.measured
    named = [(problem.field.rpartition(".")[2], problem) for problem in jumps(old, new)]
    return [
        Refusal("JUMP", f"{name} {problem.description}")
        for name, problem in named
        if name in measured
    ]
