"""A request as the scheduler sees it: sizes, targets and deadlines, never its content."""

from dataclasses import dataclass

from dataplane.core.predictor import LengthEstimate


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets in seconds; infinity where nothing is aimed for.

    Attributes:
        ttft_seconds: To the first token.
        tpot_seconds: Per token after it.
        ttft_seconds_per_prompt_token: Added to the first for each prompt token, >= 0.
    """

    ttft_seconds: float
    tpot_seconds: float
    ttft_seconds_per_prompt_token: float = 0.0

    def for_prompt(self, prompt_tokens: int) -> "Targets":
        """Return the targets that hold for a prompt of that length."""
        growth = self.ttft_seconds_per_prompt_token * prompt_tokens
        return Targets(self.ttft_seconds + growth, self.tpot_seconds)

    def tightened(self, other: "Targets") -> "Targets":
        """Return the lower of both, target by target; of targets that hold for one prompt."""
        return Targets(
            min(self.ttft_seconds, other.ttft_seconds), min(self.tpot_seconds, other.tpot_seconds)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a policy may know of a request on arrival.

    Attributes:
        request_id: Unique over the cluster.
        prompt_tokens: Counted exactly; > 0.
        max_tokens: Tokens to generate at most; > 0.
        length: What is predicted of its output length.
        slo_class: Name of its class.
        urgency: The class's weight in costs (the paper's sigma): 1 for loose, above for tight.
        targets: Targets that hold for it.
        arrived_at: On the scheduler's clock, seconds.
        excluded: Instances it must not be placed on again.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    length: LengthEstimate
    slo_class: str
    urgency: float
    targets: Targets
    arrived_at: float
    excluded: frozenset[str] = frozenset()

    @property
    def predicted_tokens(self) -> float:
        """Expected output, between 1 and `max_tokens`."""
        return self.length.mean_tokens
