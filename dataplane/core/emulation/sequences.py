"""The state of one generation inside the emulated engine, and the blocks its KV takes."""

from dataclasses import dataclass
from enum import Enum, auto

from dataplane.core.emulation.values import SequenceRequest


class Phase(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    """Wants blocks: for its prompt, or for its pull."""
    PULLING = auto()
    """Has the blocks of its prompt, its KV is under way."""
    READY = auto()
    """Its KV has arrived; runs in the next step that has a seat."""
    RUNNING = auto()
    """Part of the batch."""
    GONE = auto()
    """Finished or aborted."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation; the engine changes it in place.

    Attributes:
        request_id: Its id.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens it generates in all.
        pull: Its KV is still to be pulled.
        hold: Its KV is held at the end.
        phase: Where it stands.
        computed_tokens: Tokens whose KV is there.
        generated_tokens: Tokens generated so far.
        blocks: KV blocks it has.
        ready_seconds: When its transfer is complete.
        content_known: The content that it pulls has been told.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    pull: bool
    hold: bool
    phase: Phase = Phase.WAITING
    computed_tokens: int = 0
    generated_tokens: int = 0
    blocks: int = 0
    ready_seconds: float = 0.0
    content_known: bool = False

    @classmethod
    def of(cls, request: SequenceRequest) -> "Sequence":
        """Start a sequence for a request."""
        return cls(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            pull=request.pull,
            hold=request.hold,
        )

    @property
    def missing_tokens(self) -> int:
        """Tokens to compute before it gets its next one."""
        return self.prompt_tokens + self.generated_tokens - self.computed_tokens


@dataclass(frozen=True, slots=True)
class Held:
    """KV that waits for its decode engine."""

    blocks: int
    expire_seconds: float


class BlockBudget:
    """Counts KV blocks; never hands out more than there are."""

    __slots__ = ("_block_tokens", "_free_blocks", "_total_blocks")

    def __init__(self, kv_total_tokens: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._total_blocks = kv_total_tokens // block_tokens
        self._free_blocks = self._total_blocks

    def __repr__(self) -> str:
        """Show how full it is."""
        return f"BlockBudget(used={self._total_blocks - self._free_blocks}/{self._total_blocks})"

    @property
    def total_tokens(self) -> int:
        """Tokens that fit in all blocks together."""
        return self._total_blocks * self._block_tokens

    @property
    def used_tokens(self) -> int:
        """Tokens of the blocks in use; the last block of a sequence counts whole."""
        return (self._total_blocks - self._free_blocks) * self._block_tokens

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence blocks for `tokens` in all; False, and nothing changed, if too few."""
        wanted = -(-tokens // self._block_tokens) - sequence.blocks
        if wanted <= 0:
            return True
        if wanted > self._free_blocks:
            return False
        self._free_blocks -= wanted
        sequence.blocks += wanted
        return True

    def take_back(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back."""
        self.free(sequence.blocks)
        sequence.blocks = 0

    def free(self, blocks: int) -> None:
        """Take `blocks` blocks back."""
        self._free_blocks += blocks
        if self._free_blocks > self._total_blocks:
            raise AssertionError(f"{blocks} blocks were freed twice")
