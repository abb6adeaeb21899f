"""Settings of late binding, with their units and what they are for."""

from dataclasses import dataclass
from enum import Enum

from dataplane.core.errors import InvalidSettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessTerms:
    """When a request that missed its target may overtake those that can still make theirs.

    It may from `arrival + max(wait_factor * FIFO wait, ttft_factor * TTFT target)` on, where the
    FIFO wait is what it would have waited, at arrival, in one queue served in order; and only with
    `work_share` of the prefill work.
    """

    work_share: float
    ttft_factor: float
    wait_factor: float


class Fairness(Enum):
    """How much goodput is given up so that late requests do not wait for ever.

    Late requests are served in every mode, whenever nobody else could use the engine. Measured in
    a step-level simulation of an A40 cluster at 1 to 2 times saturation, the share of the gain
    over joining the shortest queue that is kept, and the P99 of the TTFT, at saturation, over that
    of joining the shortest queue (mixed, documents, reasoning; homogeneous chat 4.7 to 7 times).
    """

    GOODPUT_FIRST = "goodput_first"
    """Late requests never overtake: all of the gain; P99 1.1 to 2.3 times."""
    DEFAULT = "default"
    """A share of 5 % after ten times the target: 97 % of the gain; P99 1.1 to 1.9 times."""
    GENEROUS = "generous"
    """A share of 20 % after ten times the target: 91 % of the gain; P99 1.1 to 1.8 times."""
    FAIR = "fair"
    """Half of the work after three FIFO waits: 88 % of the gain; P99 1.0 to 1.4 times."""
    STRICT = "strict"
    """All of the work after two FIFO waits: 75 % of the gain; P99 .9 to 1.4 times."""

    @property
    def terms(self) -> FairnessTerms:
        """The numbers behind the name."""
        return _TERMS[self]


_TERMS = {
    Fairness.GOODPUT_FIRST: FairnessTerms(work_share=0.0, ttft_factor=10.0, wait_factor=0.0),
    Fairness.DEFAULT: FairnessTerms(work_share=0.05, ttft_factor=10.0, wait_factor=0.0),
    Fairness.GENEROUS: FairnessTerms(work_share=0.2, ttft_factor=10.0, wait_factor=0.0),
    Fairness.FAIR: FairnessTerms(work_share=0.5, ttft_factor=4.0, wait_factor=3.0),
    Fairness.STRICT: FairnessTerms(work_share=1.0, ttft_factor=4.0, wait_factor=2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LateBindingSettings:
    """How late binding decides; the defaults need no tuning on the engines tried.

    Attributes:
        fairness: See Fairness.
        dispatch_ahead_seconds: A prefill engine gets more work when its remaining work falls
            below this; about one dispatch round trip. Infinity binds prefill on arrival.
        round_trip_seconds: Dispatch to an agent and back, without the engine's work, until it is
            learned.
        learn_round_trip: Learn it, where agents say what their engines took.
        handoff_steps: Decode steps from hand-off to first token, until it is learned: half a step
            that is under way, one that begins the pull, one that sees it done, one that computes.
        learn_handoff: Learn the hand-off time, the 85th percentile of own decode legs.
        learn_constants: Correct the constants online by one multiplier an engine and side.
        order_by_laxity: False serves on-time requests in order of arrival.
        cost_weight: How much a request's own prefill time counts against it in the order.
        cost_weight_overloaded: The same while prefill cannot make all deadlines.
        batch_seconds: Prompts are added to a batch up to this time; 0 sends one prompt at a time.
        batch_seconds_overloaded: The same when overloaded with small prompts.
        urgent_seconds: Overloaded with small prompts, requests with less laxity go last, since
            they would cut the batch short.
        small_prompt_seconds: Prompts are small when their mean prefill time is below this.
        doomed_after_seconds: A request is given up as late when it is behind by this.
        gate: False starts prefill whether or not a decode engine has room.
        tpot_margin: Share of the TPOT target that a decode step may take.
        kv_share: Share of the KV budget that may be committed.
        doomed_share: Share of decode seats and KV that late requests may fill; the rest is kept
            for those that can still make it. 1 keeps nothing.
        growth_tokens: By how much a sequence is taken to grow while others decode beside it.
        gate_tries: Requests tried for decode room before the engine is left alone.
        credit_limit_seconds: Prefill time that late requests may save up.
        queue_limit: Requests waiting at most; more are rejected.
        longest_ttft_seconds: Taken where a request has no TTFT target or a longer one.
        max_attempts: Placements of one request, the first included.
    """

    fairness: Fairness = Fairness.DEFAULT
    dispatch_ahead_seconds: float = 0.003
    round_trip_seconds: float = 0.003
    learn_round_trip: bool = True
    handoff_steps: float = 3.5
    learn_handoff: bool = True
    learn_constants: bool = True
    order_by_laxity: bool = True
    cost_weight: float = 2.0
    cost_weight_overloaded: float = 5.0
    batch_seconds: float = 0.06
    batch_seconds_overloaded: float = 0.12
    urgent_seconds: float = 0.05
    small_prompt_seconds: float = 0.02
    doomed_after_seconds: float = 0.02
    gate: bool = True
    tpot_margin: float = 0.97
    kv_share: float = 0.98
    doomed_share: float = 0.8
    growth_tokens: float = 125.0
    gate_tries: int = 8
    credit_limit_seconds: float = 0.5
    queue_limit: int = 200_000
    longest_ttft_seconds: float = 30.0
    max_attempts: int = 3

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        for name in ("tpot_margin", "kv_share", "doomed_share"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise InvalidSettingError(f"{name} is {value}; it is above 0 and at most 1")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if not value >= 0.0:
                raise InvalidSettingError(f"{name} is {value}; it is at least 0")
        for name in ("gate_tries", "queue_limit", "max_attempts", "longest_ttft_seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise InvalidSettingError(f"{name} is {value}; it is above 0")


_NOT_NEGATIVE = (
    "dispatch_ahead_seconds",
    "round_trip_seconds",
    "handoff_steps",
    "cost_weight",
    "cost_weight_overloaded",
    "batch_seconds",
    "batch_seconds_overloaded",
    "urgent_seconds",
    "small_prompt_seconds",
    "doomed_after_seconds",
    "growth_tokens",
    "credit_limit_seconds",
)
