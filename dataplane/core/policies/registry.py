"""Placement policies by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from dataplane.core.errors import InvalidSettingError, UnknownPolicyError
from dataplane.core.policies.base import Explains, PlacementPolicy
from dataplane.core.policies.block_overlap import block_overlap
from dataplane.core.policies.drain_time import drain_time
from dataplane.core.policies.least_loaded import least_loaded
from dataplane.core.policies.length_threshold import length_threshold
from dataplane.core.policies.marginal_cost import marginal_cost
from dataplane.core.policies.power_of_two import power_of_two
from dataplane.core.policies.round_robin import round_robin
from dataplane.core.policies.slo_headroom import slo_headroom
from dataplane.core.policies.token_product import token_product


class Policy(PlacementPolicy, Explains, Protocol):
    """What is registered: places, and explains."""


POLICIES: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {
        "round_robin": round_robin,
        "least_loaded": least_loaded,
        "length_threshold": length_threshold,
        "power_of_two": power_of_two,
        "marginal_cost": marginal_cost,
        "drain_time": drain_time,
        "block_overlap": block_overlap,
        "token_product": token_product,
        "slo_headroom": slo_headroom,
    }
)


def make_policy(name: str, settings: Mapping[str, Any] | None = None) -> Policy:
    """Construct a policy by its registered name.

    Raises:
        UnknownPolicyError: The name is not registered.
        InvalidSettingError: A setting is unknown or outside its range.
    """
    factory = POLICIES.get(name)
    if factory is None:
        raise UnknownPolicyError(f"no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    try:
        return factory(**(settings or {}))
    except TypeError as error:
        raise InvalidSettingError(f"{name}: {error}") from error
