"""The seam between a sweep and what it measures with."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from calibrator.agents import Generated, Prefilled
from calibrator.cluster import Target
from calibrator.design import DecodePoint
from calibrator.observations import StepSeen


class Instrument(Protocol):
    """What measures one instance; `calibrator.agents.AgentClient` over the network."""

    target: Target
    busy: asyncio.Lock

    async def probe_prefill(
        self, prompt_tokens: Sequence[int], seed: int, timeout_seconds: float
    ) -> list[float]:
        """Send prompts at once; return the seconds of each."""
        ...

    async def probe_decode(
        self, point: DecodePoint, seed: int, timeout_seconds: float
    ) -> list[StepSeen]:
        """Run a batch; return its steps."""
        ...

    async def prefill(self, prompt: Sequence[int], timeout_seconds: float = ...) -> Prefilled:
        """Prefill and hold a prompt."""
        ...

    async def decode(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        held: Prefilled | None = None,
        timeout_seconds: float = ...,
    ) -> Generated:
        """Generate, from a hand-off where there is one."""
        ...

    async def release(self, held: Prefilled, prompt: Sequence[int]) -> bool:
        """Free a hand-off; False where this instance cannot."""
        ...
