"""vLLM plugin: NIXL's progress thread waits for traffic instead of spinning.

NIXL's Python API creates every agent with a progress delay of zero, and zero means a busy loop: 70-98 %
of a core for each idle engine, tail latencies of seconds when engines outnumber cores. With a positive
delay the thread blocks in `poll` on UCX's event descriptors for at most that long; traffic wakes it at
once, so latency does not suffer.

vLLM calls `register` in every process through the entry point group `vllm.general_plugins`, before any
NIXL agent exists. `NIXL_PROGRESS_DELAY_US` sets the delay (default 100,000 microseconds), 0 keeps the spin.

Seen with nixl 1.5.1. The patch point is private: when it is gone, `register` raises, because a cluster
that silently spins is worse than one that does not start.
"""

import importlib
import importlib.util
import os
import types
from typing import Any

DEFAULT_DELAY_MICROSECONDS = 100_000
_MARK = "__steelyard_idle__"


def register() -> None:
    """Patch the NIXL Python API of this process; a second call does nothing.

    Raises:
        RuntimeError: when this NIXL no longer has the place that is patched.
    """
    delay_microseconds = int(os.environ.get("NIXL_PROGRESS_DELAY_US", DEFAULT_DELAY_MICROSECONDS))
    if delay_microseconds <= 0 or importlib.util.find_spec("nixl") is None:
        return
    # vLLM sets this against a leak in UCX, but not any more once NIXL is imported, as it is below.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    api: Any = importlib.import_module("nixl._api")
    bindings = getattr(api, "nixlBind", None)
    if bindings is None or not hasattr(bindings, "nixlAgent"):
        raise RuntimeError("nixl._api.nixlBind.nixlAgent is gone; set NIXL_PROGRESS_DELAY_US=0")
    if getattr(bindings, _MARK, False):
        return
    api.nixlBind = _with_delay(bindings, delay_microseconds)


def _with_delay(bindings: types.ModuleType, delay_microseconds: int) -> types.ModuleType:
    """A copy of the bindings module whose agents get the delay just before they are made."""
    create_agent = bindings.nixlAgent

    def create_patient_agent(name: str, config: Any) -> Any:
        if config.pthrDelay == 0:
            config.pthrDelay = delay_microseconds
        return create_agent(name, config)

    copy = types.ModuleType(bindings.__name__, bindings.__doc__)
    copy.__dict__.update(vars(bindings))
    copy.nixlAgent = create_patient_agent  # type: ignore[attr-defined]
    setattr(copy, _MARK, True)
    return copy
