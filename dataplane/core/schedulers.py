"""Schedulers by name: late binding, or any placement policy, bound on arrival."""

from collections.abc import Mapping
from typing import Any

from dataplane.core.errors import InvalidSettingError, UnknownPolicyError
from dataplane.core.late_binding import Fairness, LateBinding, LateBindingSettings
from dataplane.core.policies.registry import POLICIES, make_policy
from dataplane.core.pool import Pool
from dataplane.core.scheduler import Immediate, Scheduler

LATE_BINDING = "late_binding"
SCHEDULERS: tuple[str, ...] = (*POLICIES, LATE_BINDING)


def make_scheduler(name: str, settings: Mapping[str, Any] | None, pool: Pool) -> Scheduler:
    """Construct a scheduler over a pool.

    Args:
        name: `late_binding`, or a registered policy.
        settings: Of the policy, or fields of LateBindingSettings; `fairness` also by its name.
        pool: What it decides for.

    Raises:
        UnknownPolicyError: The name is not registered.
        InvalidSettingError: A setting is unknown or outside its range.
    """
    if name == LATE_BINDING:
        return make_late_binding(settings, pool)
    if name not in POLICIES:
        raise UnknownPolicyError(f"no policy {name!r}; there are {', '.join(sorted(SCHEDULERS))}")
    return Immediate(make_policy(name, settings), pool)


def make_late_binding(settings: Mapping[str, Any] | None, pool: Pool) -> LateBinding:
    """Construct late binding over a pool.

    Raises:
        InvalidSettingError: A setting is unknown or outside its range.
    """
    values = dict(settings or {})
    try:
        if "fairness" in values:
            values["fairness"] = Fairness(values["fairness"])
        return LateBinding(pool, LateBindingSettings(**values))
    except (TypeError, ValueError) as error:
        raise InvalidSettingError(f"{LATE_BINDING}: {error}") from error
