"""Schedulers by policy name."""

from collections.abc import Mapping
from typing import Any

from dataplane.core.policies.registry import make_policy
from dataplane.core.pool import Pool
from dataplane.core.scheduler import Immediate, Scheduler


def make_scheduler(name: str, settings: Mapping[str, Any], pool: Pool) -> Scheduler:
    """Construct the scheduler of a policy for one pool.

    Raises:
        UnknownPolicyError: The name is not registered.
        InvalidSettingError: A setting is unknown or outside its range.
    """
    return Immediate(make_policy(name, settings), pool)
