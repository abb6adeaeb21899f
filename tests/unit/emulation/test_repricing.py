"""An emulated engine takes a new price while it runs."""

import pytest

from enginemodel.model import decode_step_seconds, prefill_step_seconds
from tests.unit.emulation.test_batching import CONSTANTS, engine, request


def test_an_engine_that_slows_pays_its_new_price_from_the_next_step_on():
    """Steps and pulls begun after a new price are priced by it; the one under way is not."""
    core = engine()
    core.submit(request(output_tokens=3))
    first = core.begin_step(0.0)
    core.reprice(CONSTANTS.slowed(2.0))
    core.complete_step()
    second = core.begin_step(first.end_seconds)

    assert first.duration_seconds == pytest.approx(prefill_step_seconds(CONSTANTS, 100))
    assert second.duration_seconds == pytest.approx(
        2.0 * decode_step_seconds(CONSTANTS, 1, second.kv_tokens)
    )
