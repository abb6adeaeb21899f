"""Steps of a whole batch, put together from the tokens of its streams."""

import pytest

from dataplane.agent.probe import Arrival, steps_seen


def arrivals(*rows):
    """Rows of (time, stream, tokens)."""
    return [Arrival(*row) for row in rows]


def test_tokens_of_all_streams_make_one_step():
    """Two streams in step: each round of tokens is one step, with both sequences' KV."""
    rows = [(step * 0.1 + stream * 0.001, stream, 1) for step in range(4) for stream in range(2)]

    steps = steps_seen(arrivals(*rows), 100)

    assert [step.sequences for step in steps] == [2, 2, 2]
    assert [step.kv_tokens for step in steps] == [204, 206, 208]
    assert [step.duration_seconds for step in steps] == pytest.approx([0.1] * 3)
    assert not any(step.unsteady for step in steps)


def test_a_step_that_somebody_joins_or_leaves_is_unsteady():
    """Steps with another membership than the one before are marked."""
    rows = [(0.0, 0, 1), (0.1, 0, 1), (0.2, 0, 1), (0.201, 1, 1), (0.3, 0, 1), (0.301, 1, 1), (0.4, 1, 1), (0.5, 1, 1)]  # fmt: skip

    steps = steps_seen(arrivals(*rows), 10)

    assert [step.unsteady for step in steps] == [False, True, False, True, False]


def test_tokens_that_came_together_count_as_several_equal_steps():
    """A reader slower than the engine still sees the mean step."""
    steps = steps_seen(arrivals((0.0, 0, 1), (0.0, 1, 1), (0.4, 0, 4), (0.4, 1, 4)), 100)

    assert len(steps) == 1
    assert steps[0].duration_seconds == pytest.approx(0.1)
    assert not steps[0].unsteady


def test_nothing_seen_is_no_step():
    """A single round has no gap."""
    assert steps_seen(arrivals((0.0, 0, 1)), 10) == []
