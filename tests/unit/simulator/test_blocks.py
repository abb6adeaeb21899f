from hypothesis import given
from hypothesis import strategies as st

from simulator.blocks import BatchBlocks

OFFSETS = st.lists(st.integers(-500, 500), min_size=1, max_size=20)


@given(OFFSETS, st.integers(500, 2000), st.sampled_from([1, 16, 32]))
def test_needed_counts_blocks_of_each_sequence(offsets, step, block):
    """The blocks needed are those of every sequence rounded up on its own."""
    batch = BatchBlocks(block)
    for offset in offsets:
        batch.add(offset)

    expected = sum(-(-(offset + step) // block) for offset in offsets)

    assert expected == batch.needed(step)


@given(OFFSETS, st.integers(500, 2000), st.integers(0, 60), st.integers(1, 80))
def test_safe_steps_is_the_most_that_fits(offsets, step, free, most):
    """Steps that are called safe need no more than the free blocks, and one more would."""
    batch = BatchBlocks(16)
    for offset in offsets:
        batch.add(offset)
    now = batch.needed(step)

    safe = batch.safe_steps(step, free, most)

    assert 1 <= safe <= most
    assert batch.needed(step + safe - 1) - now <= free
    if safe < most:
        assert batch.needed(step + safe) - now > free


@given(OFFSETS, OFFSETS, st.integers(500, 900))
def test_remove_undoes_add(staying, leaving, step):
    """A sequence that left needs nothing."""
    batch, expected = BatchBlocks(16), BatchBlocks(16)
    for offset in (*staying, *leaving):
        batch.add(offset)
    for offset in leaving:
        batch.remove(offset)
    for offset in staying:
        expected.add(offset)

    assert (expected.needed(step), expected.count) == (batch.needed(step), batch.count)
