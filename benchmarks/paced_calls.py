"""What a call adds to a paced step: HTTP server, scheduling, the agent. It is real time, so the more
engines are slowed, the less of it a calibration sees."""

import statistics
from collections.abc import Sequence

from calibrator.agents import AgentClient
from calibrator.cluster import ready_targets
from calibrator.control import ControlClient
from enginemodel.model import prefill_step_seconds
from enginemodel.profiles import EngineProfile
from servicekit.channel import open_channel
from servicekit.clock import Clock

PROBES = 12


async def call_seconds(
    control_plane: str, profile: EngineProfile, clock: Clock, lengths: Sequence[int]
) -> dict[int, float]:
    """Return, by length of a prompt that runs alone, how much longer it took than its step.

    Args:
        control_plane: host:port.
        profile: What the engines are paced by.
        clock: What agents count by.
        lengths: In tokens, each within one step.

    Returns:
        Medians, engine seconds.
    """
    async with open_channel(control_plane) as channel:
        ready = ready_targets((await ControlClient(control_plane, channel).roster()).instances)
    target = next(target for target in ready if target.prefills)
    added: dict[int, float] = {}
    client = AgentClient(target, open_channel(target.address), clock)
    try:
        for tokens in lengths:
            step = prefill_step_seconds(profile.constants, tokens)
            took = [(await client.probe_prefill([tokens], i, 30.0))[0] for i in range(PROBES)]
            added[tokens] = statistics.median(took) - step
    finally:
        await client.close()
    return added
