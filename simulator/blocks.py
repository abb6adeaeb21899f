"""KV blocks of a decode batch whose sequences all grow by one token a step."""


class BatchBlocks:
    """Counts the blocks of a batch exactly, without looking at its sequences one by one.

    A sequence that would have had c tokens at step 0 has c + s at step s and needs
    ceil((c + s) / block) blocks. Only the remainder of c matters for when it needs a new one, so a
    count for each remainder suffices: everything here is O(block), independent of the batch.
    """

    __slots__ = ("_block", "_remainders", "_whole", "count")

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._remainders = [0] * block_tokens
        self._whole = 0
        self.count = 0

    def add(self, offset_tokens: int) -> None:
        """Let a sequence in that has `offset_tokens` + s tokens at step s."""
        whole, remainder = divmod(offset_tokens + self._block - 1, self._block)
        self._whole += whole
        self._remainders[remainder] += 1
        self.count += 1

    def remove(self, offset_tokens: int) -> None:
        """Let a sequence out."""
        whole, remainder = divmod(offset_tokens + self._block - 1, self._block)
        self._whole -= whole
        self._remainders[remainder] -= 1
        self.count -= 1

    def needed(self, step: int) -> int:
        """Return the blocks that the batch needs for the step after `step` steps."""
        cycles, phase = divmod(step, self._block)
        return self._whole + self.count * cycles + sum(self._remainders[self._block - phase :])

    def safe_steps(self, step: int, free_blocks: int, most: int) -> int:
        """Return how many steps, up to `most` >= 1, run before more than `free_blocks` are added.

        The step that begins now needs none: its blocks are counted in `needed(step)`.
        """
        block = self._block
        if free_blocks >= self.count * (-(-most // block)):
            return most
        for ahead in range(1, most):
            free_blocks -= self._remainders[-(step + ahead) % block]
            if free_blocks < 0:
                return ahead
        return most
