"""The gates alone: whether a cluster answers rightly, without measuring it. Warms every pair."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from calibrator.agents import AgentClient, open_clients
from calibrator.cluster import Target, ready_targets
from calibrator.control import ControlClient
from calibrator.gate_result import GateResult
from calibrator.gates import Gates
from servicekit.channel import open_channel
from servicekit.clock import Clock

_AT_ONCE = 4


async def check_cluster(control_plane: str, clock: Clock) -> list[GateResult]:
    """Run the gates on all READY instances, up to the first that fails.

    Args:
        control_plane: host:port.
        clock: What the instances' agents count by.

    Raises:
        CalibrationError: The control plane does not answer, or nothing is READY.
    """
    async with ready_clients(control_plane, clock) as (ready, clients):
        return await Gates(clients, asyncio.Semaphore(_AT_ONCE), clock).run(ready)


@asynccontextmanager
async def ready_clients(
    control_plane: str, clock: Clock
) -> AsyncIterator[tuple[list[Target], dict[str, AgentClient]]]:
    """Give the READY instances and a client of each, by id, within the block.

    Raises:
        CalibrationError: The control plane does not answer, or nothing is READY.
    """
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(control_plane))
        ready = ready_targets((await ControlClient(control_plane, channel).roster()).instances)
        yield ready, open_clients(ready, clock, stack)
