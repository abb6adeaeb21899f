"""Frees KV that nobody will pull, by whichever engine can do it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from calibrator.agents import Prefilled
from calibrator.cluster import Target
from calibrator.errors import ProbeFailed


class Releaser(Protocol):
    """An instance that may be able to free a hand-off."""

    target: Target

    async def release(self, held: Prefilled, prompt: Sequence[int]) -> bool:
        """Free a hand-off; False where only the end of its lease will."""
        ...


async def free(
    held: Prefilled, prompt: Sequence[int], prefill: Releaser, others: Mapping[str, Releaser]
) -> bool:
    """Free a hand-off; vLLM does it through any decode engine that could have pulled it.

    Args:
        held: The hand-off.
        prompt: Its prompt.
        prefill: Where it lies.
        others: All instances, by id.

    Returns:
        False where nobody could: it is freed when its lease ends.
    """
    mine = prefill.target
    peers: Iterable[Releaser] = (
        other
        for other in others.values()
        if other.target.decodes
        and other.target.pool == mine.pool
        and other.target.pairing_key == mine.pairing_key
        and other.target.instance_id != mine.instance_id
    )
    for candidate in (*peers, prefill):
        try:
            if await candidate.release(held, prompt):
                return True
        except ProbeFailed:
            continue
    return False
