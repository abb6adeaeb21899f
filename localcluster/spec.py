"""What a local cluster is made of."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from enginemodel.profiles import REFERENCE
from localcluster.errors import PoolsError

_POOLS = re.compile(r"(?:(\d+)P)?(?:(\d+)D)?(?:(\d+)M)?", re.IGNORECASE)
_MOST_OF_A_ROLE = 20
DEFAULT_PORT_BASE = 7400
"""What the documentation speaks of; the services' own default ports are in its row."""


@dataclass(frozen=True, slots=True)
class Pools:
    """How many instances of each role."""

    prefill: int
    decode: int
    mixed: int = 0

    @classmethod
    def parse(cls, text: str) -> "Pools":
        """Read "2P4D", "1P2D1M" or "2M".

        Raises:
            PoolsError: It is something else, or has a role without its counterpart.
        """
        match = _POOLS.fullmatch(text.strip())
        counts = [int(group or 0) for group in match.groups()] if match else [0]
        if not any(counts):
            raise PoolsError(f"pools is {text!r}; write how many of each role, as in 2P4D or 2M")
        pools = cls(*counts)
        if pools.mixed == 0 and (pools.prefill == 0 or pools.decode == 0):
            raise PoolsError(f"pools is {text!r}; prefill (P) and decode (D) need each other")
        if max(counts) > _MOST_OF_A_ROLE:
            raise PoolsError(f"pools is {text!r}; at most {_MOST_OF_A_ROLE} of a role fit here")
        return pools

    def __str__(self) -> str:
        parts = ((self.prefill, "P"), (self.decode, "D"), (self.mixed, "M"))
        return "".join(f"{count}{letter}" for count, letter in parts if count)

    def names(self) -> list[tuple[str, str]]:
        """Return (instance id, role) of every instance."""
        roles = (("prefill", self.prefill), ("decode", self.decode), ("mixed", self.mixed))
        return [(f"{role}-{i}", role) for role, count in roles for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """One cluster.

    Attributes:
        port_base: First of a few hundred ports in a row; 0 takes free ones.
        routers: Router processes.
        control_planes: Control plane replicas.
        redis_url: An existing Redis; empty starts one of its own.
        time_scale: Engine seconds a real second; below 1 everything is dilated, inf is full speed
            (emulated engines only). Agents and routers live in engine time.
        profile: Whose steps paced engines keep time by; engine "paced" only.
        profile_overrides: Fields taken over the profile's, `constants` by name; likewise.
        agent_settings: Settings of every agent, by field name.
        instance_settings: Settings of single agents, by instance id; taken over the others.
        router_settings: Settings of every router, by field name.
        control_settings: Settings of every control plane, by field name.
        vllm_python: Python of the vLLM environment; engines "vllm" and "paced" only.
        vllm_model: Model folder or name; empty makes a tiny one. Likewise.
        vllm_flags: Flags of every server. Likewise.
        solo: Also start one engine that no router knows, never paced, for comparison. Likewise.
    """

    engine: Literal["emulated", "vllm", "paced"] = "emulated"
    pools: Pools = Pools(2, 4)
    port_base: int = 0
    routers: int = 1
    control_planes: int = 1
    redis_url: str = ""
    time_scale: float = 1.0
    profile: str = REFERENCE.name
    profile_overrides: Mapping[str, Any] = field(default_factory=dict)
    agent_settings: Mapping[str, Any] = field(default_factory=dict)
    instance_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    router_settings: Mapping[str, Any] = field(default_factory=dict)
    control_settings: Mapping[str, Any] = field(default_factory=dict)
    log_level: str = "INFO"
    directory: Path = Path(".run")
    vllm_python: Path = Path(".venv-vllm/bin/python")
    vllm_model: str = ""
    vllm_flags: tuple[str, ...] = ()
    solo: bool = False
