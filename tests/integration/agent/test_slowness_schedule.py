"""An emulated engine slows and recovers at the times that its settings name."""

import pytest
from structlog.testing import capture_logs

from dataplane.agent.byte_tokenizer import byte_tokenizer
from dataplane.agent.emulated_factory import emulated_options
from dataplane.agent.engine_emulated import EngineEmulated
from dataplane.agent.settings import AgentSettings
from servicekit.clock import ManualClock
from servicekit.errors import SettingsInvalid
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio


async def test_factors_hold_from_their_time_on():
    """Each factor is taken once its time has come, in order, whatever the order they are set in."""
    settings = AgentSettings(slowness_schedule=[(60.0, 1.0), (20.0, 1.5)])
    clock = ManualClock()
    engine = EngineEmulated(emulated_options(settings), clock, byte_tokenizer())
    await engine.start()
    await eventually(lambda: clock.sleepers == 2, what="leases and schedule kept")
    factors = []
    try:
        for _ in range(8):
            with capture_logs() as logs:
                await clock.advance(10.0)
            factors.append(
                [log["factor"] for log in logs if log["event"] == "emulated_engine_repriced"]
            )
        healthy = (await engine.measure()).healthy
    finally:
        await engine.close()

    assert factors == [[], [1.5], [], [], [], [1.0], [], []]
    assert healthy


async def test_a_factor_that_is_none_is_refused(monkeypatch):
    """A factor of 0 would stop time."""
    monkeypatch.setenv("STEELYARD_AGENT_SLOWNESS_SCHEDULE", "[[10, 0]]")

    with pytest.raises(SettingsInvalid, match="STEELYARD_AGENT_SLOWNESS_SCHEDULE"):
        AgentSettings.load()
