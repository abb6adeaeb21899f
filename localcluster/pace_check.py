"""Whether paced engines kept their pace: the verdict on a run, from its steps and its machine.

A run on paced engines is *valid* when all of these hold:

- steps were recorded;
- at most 5 % of all its steps, over all engines, ended late by more than 5 % of what they were
  modelled to take;
- the mean pace is right: where steps followed one another, the sum of real times is within 2 % of
  the sum of modelled ones;
- the machine was not busy with something else: processes outside the run used at most 10 % of its
  cores' time. Where nobody watched the machine this is not judged, and the verdict says so.

Lateness of single steps is noise of this machine that a mean hides; a wrong mean is a wrong result.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

MOST_LATE_SHARE = 0.05
LATE = 0.05
VERY_LATE = 0.20
MOST_PACE_ERROR = 0.02
MOST_OTHER_SHARE = 0.10


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an engine's record; all times are real seconds.

    Attributes:
        end_unix: When the step ended.
        modelled_seconds: What it was to take.
        real_seconds: What it took.
        late_seconds: How much later than due it ended.
        carried: It followed the step before without a pause.
    """

    end_unix: float
    modelled_seconds: float
    real_seconds: float
    late_seconds: float
    carried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLoad:
    """Who used the machine between two times.

    Attributes:
        seconds: How long it was watched.
        cores: How many it has.
        own_share: Of its cores' time, what the run's processes used, 0-1.
        other_share: The same of everybody else, what a hypervisor took included.
    """

    seconds: float
    cores: int
    own_share: float
    other_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How some steps kept their pace.

    Attributes:
        steps: How many.
        late_share: Of them, ended late by more than 5 % of their modelled time.
        very_late_share: The same with 20 %.
        real_to_modelled: Of steps that followed one another, summed; 1 where there is none.
        late_seconds: Lateness at the 50th, 95th and 99th percentile, real seconds.
    """

    steps: int
    late_share: float
    very_late_share: float
    real_to_modelled: float
    late_seconds: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """The verdict on a run.

    Attributes:
        valid: Whether its results may be used.
        reasons: Why not; empty where it is valid.
        pace: Of all engines together.
        engines: Of each, by instance id.
        machine: Who used the machine; None where nobody watched.
    """

    valid: bool
    reasons: tuple[str, ...]
    pace: Pace
    engines: Mapping[str, Pace]
    machine: MachineLoad | None

    def text(self) -> str:
        """Return the verdict in a few lines."""
        p50, p95, p99 = (1e3 * value for value in self.pace.late_seconds)
        lines = [
            "valid" if self.valid else f"NOT valid: {'; '.join(self.reasons)}",
            (
                f"{self.pace.steps} steps, {self.pace.late_share:.1%} over 5 % late, "
                f"{self.pace.very_late_share:.1%} over 20 %, real to modelled "
                f"{self.pace.real_to_modelled:.4f}, "
                f"late P50 {p50:.1f} P95 {p95:.1f} P99 {p99:.1f} ms"
            ),
        ]
        if self.machine is None:
            lines.append("nobody watched what else the machine did")
        else:
            lines.append(
                f"{self.machine.cores} cores: {self.machine.own_share:.0%} this run, "
                f"{self.machine.other_share:.0%} something else"
            )
        return "\n".join(lines)


def judge(steps: Mapping[str, Sequence[StepRow]], machine: MachineLoad | None) -> Validity:
    """Return the verdict; the module says by what rule.

    Args:
        steps: Of the run, by instance id.
        machine: Who used the machine meanwhile, where somebody watched.
    """
    pace = pace_of([step for rows in steps.values() for step in rows])
    reasons: list[str] = []
    if pace.steps == 0:
        reasons.append("no step was recorded")
    if pace.late_share > MOST_LATE_SHARE:
        reasons.append(
            f"{pace.late_share:.1%} of steps are over 5 % late, more than {MOST_LATE_SHARE:.0%}"
        )
    if abs(pace.real_to_modelled - 1.0) > MOST_PACE_ERROR:
        reasons.append(
            f"steps took {pace.real_to_modelled:.3f} times their modelled time on average"
        )
    if machine is not None and machine.other_share > MOST_OTHER_SHARE:
        reasons.append(f"{machine.other_share:.0%} of the machine went to something else")
    return Validity(
        valid=not reasons,
        reasons=tuple(reasons),
        pace=pace,
        engines={name: pace_of(rows) for name, rows in steps.items()},
        machine=machine,
    )


def pace_of(rows: Iterable[StepRow]) -> Pace:
    """Sum steps up."""
    steps = list(rows)
    late = [step.late_seconds / step.modelled_seconds for step in steps]
    following = [step for step in steps if step.carried]
    modelled = sum(step.modelled_seconds for step in following)
    ordered = sorted(step.late_seconds for step in steps)
    return Pace(
        steps=len(steps),
        late_share=_share(late, LATE),
        very_late_share=_share(late, VERY_LATE),
        real_to_modelled=(
            sum(step.real_seconds for step in following) / modelled if following else 1.0
        ),
        late_seconds=(_at(ordered, 0.5), _at(ordered, 0.95), _at(ordered, 0.99)),
    )


def _share(values: Sequence[float], above: float) -> float:
    return sum(value > above for value in values) / len(values) if values else 0.0


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))] if ordered else 0.0
