"""What experiments are made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from evaluation.cells import Cell, Conditions, Pool
from evaluation.errors import EvaluationError

BASELINES = ("round_robin", "least_loaded", "length_threshold", "power_of_two")
FAIRNESS_ORDER = ("goodput_first", "default", "generous", "fair", "strict")
WORKLOADS = ("chat", "documents", "mixed", "reasoning")


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with settings, under the name that tables show.

    Attributes:
        label: Shown; equals the policy's name where settings are the defaults.
        policy: Registered name.
        settings: Of the policy.
    """

    label: str
    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def parse_variant(text: str) -> Variant:
    """Read `name` or `name:setting=value:setting=value`.

    Raises:
        EvaluationError: A setting has no value.
    """
    policy, *parts = text.split(":")
    settings: dict[str, Any] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            raise EvaluationError(f"{text}: setting {name!r} has no value")
        settings[name] = _value(value)
    return Variant(text, policy, settings)


def _value(text: str) -> bool | float | int | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class SaturationRate(Protocol):
    """Finds saturation rates."""

    def rate(self, workload: str, pool: Pool, conditions: Conditions | None = None) -> float:
        """Return requests a second."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What an experiment may go by.

    Attributes:
        variants: Policies to compare; experiments about one policy use its variants among them.
        saturation: Finds rates.
        seconds: Of arrivals a cell.
        workloads: Of the experiments that go over several.
        quick: A part of the cells, enough to see that it runs and points the right way.
    """

    variants: Sequence[Variant]
    saturation: SaturationRate
    seconds: float = 90.0
    workloads: Sequence[str] = WORKLOADS
    quick: bool = False

    def cell(
        self,
        experiment: str,
        variant: Variant,
        workload: str,
        pool: Pool,
        rate: float,
        *,
        label: str = "",
        load: float = 0.0,
        conditions: Conditions | None = None,
        keep_series: bool = False,
    ) -> Cell:
        """Return a cell with this context's length."""
        return Cell(
            experiment=experiment,
            label=label or variant.label,
            policy=variant.policy,
            settings=dict(variant.settings),
            workload=workload,
            pool=pool,
            rate=round(rate, 4),
            load=load,
            seconds=self.seconds,
            warmup_seconds=min(5.0, self.seconds / 6.0),
            conditions=conditions or Conditions(),
            keep_series=keep_series,
        )

    def only(self, *policies: str) -> list[Variant]:
        """Return the variants of these policies; of each the default where none was asked for."""
        chosen = [variant for variant in self.variants if variant.policy in policies]
        return chosen or [Variant(policy, policy) for policy in policies]


Experiment = Callable[[Context], list[Cell]]
