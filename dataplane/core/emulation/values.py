"""What goes into the emulated engine and what comes out of it."""

from dataclasses import dataclass, field

from enginemodel.model import NOTICE_SHARE, EngineConstants


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """An engine's limits and prices.

    Attributes:
        constants: What steps and hand-offs cost.
        kv_total_tokens: KV cache, rounded down to whole blocks.
        kv_bytes_per_token: Size of one token's KV, for the time of a hand-off.
        block_tokens: Tokens of a KV block.
        max_num_seqs: Sequences that a step can hold.
        max_batched_tokens: Tokens that a step can compute.
        lease_seconds: How long a hand-off is held.
        notice_share: When in a step the engine looks for finished pulls, as a share of the step.
            A pull that was done by then runs in the next step, else one later.
        jitter_sigma: Sigma of the lognormal factor on every step's time, mean 1; 0 for none.
        stall_probability: Chance of a host stall in a step.
        stall_seconds: Length of a host stall.
    """

    constants: EngineConstants
    kv_total_tokens: int
    kv_bytes_per_token: int
    block_tokens: int
    max_num_seqs: int
    max_batched_tokens: int
    lease_seconds: float = 30.0
    notice_share: float = NOTICE_SHARE
    jitter_sigma: float = 0.0
    stall_probability: float = 0.0
    stall_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRequest:
    """One generation, as counts; the tokens themselves are nobody's business here.

    Attributes:
        request_id: Unique among the engine's live requests.
        prompt_tokens: >= 1.
        output_tokens: What it generates, >= 1; for a pull it is given when the content arrives.
        pull: The KV comes by hand-off.
        hold: The KV is held for a hand-off when the last token is there.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int = 1
    pull: bool = False
    hold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that has begun.

    Attributes:
        begin_seconds: When.
        duration_seconds: How long it takes, jitter included.
        prefill_tokens: Prompt tokens it computes (recomputed ones included).
        sequences: Sequences that get a token by decoding.
        kv_tokens: Their context, the new token included.
    """

    begin_seconds: float
    duration_seconds: float
    prefill_tokens: int
    sequences: int
    kv_tokens: int

    @property
    def end_seconds(self) -> float:
        """When it ends."""
        return self.begin_seconds + self.duration_seconds


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing can be computed now.

    Attributes:
        until_seconds: When to look again at the latest; None: only after the next submit,
            content_arrived, abort or free_held.
    """

    until_seconds: float | None


@dataclass(slots=True)
class StepOutcome:
    """What a finished step brought.

    Attributes:
        progressed: Requests that got one token each.
        finished: Of these: requests that got their last one.
        held: Of the finished: requests whose KV is held now.
    """

    progressed: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PullNews:
    """What happened to pulls since it was last asked for.

    Attributes:
        started: Requests that got their blocks: fetch the content and call content_arrived.
        done: Requests whose transfer is complete: tell the prefill engine to free it.
    """

    started: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.started or self.done)
