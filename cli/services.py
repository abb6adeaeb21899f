"""`steelyard controlplane|router|agent`: one service, set by its environment."""

import shlex
import sys
from typing import Annotated, Any

from cyclopts import Parameter

from servicekit.command import Service, service_main

PrintConfig = Annotated[
    bool, Parameter(negative="", help="Show every setting with its value and leave.")
]
Set = Annotated[
    list[str] | None,
    Parameter(
        name="--set",
        consume_multiple=False,
        help="NAME=VALUE; may be given again; wins over the environment.",
    ),
]


def controlplane(*, settings: Set = None, print_config: PrintConfig = False) -> None:
    """Run a control plane replica, set by STEELYARD_CONTROLPLANE_* (see --print-config)."""
    from controlplane.app import SERVICE  # noqa: PLC0415  each service imports its own

    _run(SERVICE, _pairs(settings), print_config=print_config)


def router(*, settings: Set = None, print_config: PrintConfig = False) -> None:
    """Run a router, set by STEELYARD_ROUTER_* (see --print-config)."""
    from dataplane.router.app import SERVICE  # noqa: PLC0415  each service imports its own

    _run(SERVICE, _pairs(settings), print_config=print_config)


def agent(
    *vllm_flags: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    role: str | None = None,
    spawn_vllm: Annotated[bool, Parameter(negative="")] = False,
    settings: Set = None,
    print_config: PrintConfig = False,
) -> None:
    """Run an agent beside one engine, set by STEELYARD_AGENT_* (see --print-config).

    Args:
        vllm_flags: With --spawn-vllm, flags of the vLLM server, after "--".
        role: prefill, decode or mixed.
        spawn_vllm: Start the vLLM server and take it down with the agent.
        settings: NAME=VALUE settings.
        print_config: Show every setting and leave.
    """
    from dataplane.agent.app import SERVICE  # noqa: PLC0415  each service imports its own

    if vllm_flags and not spawn_vllm:
        words = shlex.join(vllm_flags)
        raise SystemExit(f"steelyard: {words}: no option of an agent; vLLM's need --spawn-vllm")
    values = _pairs(settings)
    if role is not None:
        values["role"] = role
    if spawn_vllm:
        values |= {"engine": "vllm", "spawn_vllm": True, "vllm_flags": shlex.join(vllm_flags)}
    _run(SERVICE, values, print_config=print_config)


def _run(service: Service[Any], values: dict[str, Any], *, print_config: bool) -> None:
    code = service_main(service, values=values, print_config=print_config)
    if code:
        sys.exit(code)


def _pairs(settings: list[str] | None) -> dict[str, Any]:
    pairs = {}
    for entry in settings or []:
        name, equals, value = entry.partition("=")
        if not equals:
            raise SystemExit(f"steelyard: --set {entry!r} is not NAME=VALUE")
        pairs[name.lower()] = value
    return pairs
