"""Output lengths of finished requests, as decayed counts by kind of request.

Routers learn from their own outcomes; this table is what a new router starts from and what routers
learn from each other. Keys go from the particular to the general:
`model|tenant|class|prompt bucket`, `model||class|prompt bucket`, `model|||`; the prompt bucket is
the power of two at or above the prompt's length.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt

from controlplane.core.values import Outcome

BUCKET_EDGES: tuple[int, ...] = tuple(sorted({round(sqrt(2.0) ** i) for i in range(33)}))
"""Upper edges in tokens, powers of the root of 2 up to 65,536; longer falls into the last."""

FORGOTTEN_WEIGHT = 0.01
"""A key with less evidence than that is dropped."""
MAX_KEYS = 4_096
"""Beyond that many keys those with the least evidence are dropped."""


@dataclass(slots=True)
class LengthTable:
    """Decayed counts by key; mutable, owned by whoever folds."""

    half_life_seconds: float
    counted_unix_seconds: float = 0.0
    """The time that all weights are decayed to."""
    weights: dict[str, list[float]] = field(default_factory=dict)
    """One count a bucket of `BUCKET_EDGES`."""

    def fold(self, outcomes: Iterable[Outcome], now_unix_seconds: float) -> int:
        """Decay to `now` and count finished requests; returns how many counted.

        Only requests that ended by themselves count: a cancelled one says nothing of how long it
        would have been.
        """
        counted = [o for o in outcomes if o.status == "ok" and o.completion_tokens > 0]
        if not counted:
            return 0
        self.decay(now_unix_seconds)
        for outcome in counted:
            bucket = bucket_of(outcome.completion_tokens)
            for key in keys(outcome):
                weights = self.weights.get(key)
                if weights is None:
                    weights = self.weights[key] = [0.0] * len(BUCKET_EDGES)
                weights[bucket] += 1.0
        self._prune()
        return len(counted)

    def decay(self, now_unix_seconds: float) -> None:
        """Let evidence age to `now`; a clock that went back changes nothing."""
        passed_seconds = max(0.0, now_unix_seconds - self.counted_unix_seconds)
        factor = 0.5 ** (passed_seconds / self.half_life_seconds)
        for weights in self.weights.values():
            weights[:] = [weight * factor for weight in weights]
        self.counted_unix_seconds = max(self.counted_unix_seconds, now_unix_seconds)

    def by_model(self) -> Mapping[str, dict[str, list[float]]]:
        """Return the weights, grouped by the model that a key starts with."""
        grouped: dict[str, dict[str, list[float]]] = {}
        for key, weights in self.weights.items():
            grouped.setdefault(key.split("|", 1)[0], {})[key] = weights
        return grouped

    def _prune(self) -> None:
        evidence = {key: sum(weights) for key, weights in self.weights.items()}
        kept = sorted(evidence, key=lambda key: (-evidence[key], key))[:MAX_KEYS]
        self.weights = {key: self.weights[key] for key in kept if evidence[key] >= FORGOTTEN_WEIGHT}


def bucket_of(tokens: int) -> int:
    """Return the index of the smallest edge at or above a length."""
    return min(bisect_left(BUCKET_EDGES, tokens), len(BUCKET_EDGES) - 1)


def prompt_bucket(prompt_tokens: int) -> int:
    """Return the power of two at or above a prompt's length."""
    return 1 << max(0, prompt_tokens - 1).bit_length()


def keys(outcome: Outcome) -> tuple[str, str, str]:
    """Return the keys an outcome counts under, most particular first."""
    model, tenant, slo_class = (
        part.replace("|", "_") for part in (outcome.model, outcome.tenant, outcome.slo_class)
    )
    bucket = prompt_bucket(outcome.prompt_tokens)
    return (
        f"{model}|{tenant}|{slo_class}|{bucket}",
        f"{model}||{slo_class}|{bucket}",
        f"{model}|||",
    )
