"""Targets of the SLO classes: defaults, and what may be set.

The defaults are the paper's: tight 175 ms and 39.7 ms, loose three times that. Requests that name
no class get `loose`: a scarce promise is made to those who ask for it.
"""

from collections.abc import Iterator
from math import isfinite

from controlplane.core.constants import Problem
from controlplane.core.values import Slo, Targets

TIGHT = Targets(ttft_seconds=0.175, tpot_seconds=0.0397)
LOOSE = Targets(ttft_seconds=3 * 0.175, tpot_seconds=3 * 0.0397)
DEFAULT = Slo(classes={"tight": TIGHT, "loose": LOOSE}, default_class="loose")
MAX_TARGET_SECONDS = 86_400.0


def problems(slo: Slo) -> list[Problem]:
    """Return everything that forbids these targets; empty where nothing does."""
    return list(_problems(slo))


def _problems(slo: Slo) -> Iterator[Problem]:
    if not slo.classes:
        yield Problem("slo.classes", "is empty; at least one class is needed")
    for name, targets in slo.classes.items():
        if not name or not all(c.isalnum() or c in "_-" for c in name):
            yield Problem(f"slo.classes[{name}]", "names are letters, digits, '_' and '-'")
        growth = targets.ttft_seconds_per_prompt_token
        if not (isfinite(growth) and 0 <= growth <= 1):
            yield Problem(
                f"slo.classes[{name}].ttft_per_prompt_token",
                f"is {growth} s; 0 to 1 s is possible",
            )
        for part, value in (("ttft", targets.ttft_seconds), ("tpot", targets.tpot_seconds)):
            if value is not None and not (isfinite(value) and 0 < value <= MAX_TARGET_SECONDS):
                yield Problem(
                    f"slo.classes[{name}].{part}",
                    f"is {value} s; above 0 and at most {MAX_TARGET_SECONDS:g} s is possible",
                )
    if slo.default_class not in slo.classes:
        yield Problem("slo.default_class", f"{slo.default_class!r} is none of the classes")
