"""Output lengths: learned online, as decayed histograms by kind of request.

Lengths are heavy-tailed, so a histogram over geometric buckets is kept rather than a mean: it
gives the expected length and, while a request streams, the expected rest E[L - g | L > g], which
never reaches 0. Keys go from the particular to the general (tenant and class and prompt size,
class and prompt size, model); the most particular with enough evidence answers, shrunk towards
the next general one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import Protocol
from zlib import crc32

from dataplane.core.errors import InvalidSettingError

BUCKET_EDGES: tuple[int, ...] = tuple(sorted({round(sqrt(2.0) ** i) for i in range(33)}))
_PRIOR_WEIGHT = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthQuery:
    """What a prediction may go by."""

    model: str
    tenant: str
    slo_class: str
    prompt_tokens: int
    max_tokens: int
    request_id: str


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """What is known of a request's output length.

    Attributes:
        mean_tokens: Expected output, between 1 and the request's max_tokens.
        weights: Share of outcomes in each bucket of BUCKET_EDGES, or empty where nothing is known.
        max_tokens: The request's own cap.
        factor: Injected error; multiplies every prediction.
    """

    mean_tokens: float
    weights: tuple[float, ...]
    max_tokens: int
    factor: float = 1.0

    def remaining_tokens(self, generated_tokens: int) -> float:
        """Return E[L - g | L > g], at least 1 while the stream lives, at most what max_tokens leaves."""
        left = max(1.0, float(self.max_tokens - generated_tokens))
        if not self.weights:
            return min(left, max(1.0, self.mean_tokens - generated_tokens))
        mass = 0.0
        rest = 0.0
        lower = 0
        for edge, weight in zip(BUCKET_EDGES, self.weights, strict=True):
            length = min((lower + edge + 1) / 2.0 * self.factor, float(self.max_tokens))
            if length > generated_tokens:
                mass += weight
                rest += weight * (length - generated_tokens)
            lower = edge
        if mass <= 0.0:
            # Longer than anything seen: half as long again, as a power law would have it.
            return min(left, max(1.0, 0.5 * generated_tokens))
        return min(left, max(1.0, rest / mass))


class LengthPredictor(Protocol):
    """Predicts the output length of a request on arrival."""

    def predict(self, query: LengthQuery) -> LengthEstimate:
        """Return what is known."""
        ...


def prompt_bucket(prompt_tokens: int) -> int:
    """Return the power of two at or above a prompt's length."""
    return 1 << max(0, prompt_tokens - 1).bit_length()


def keys(query: LengthQuery) -> tuple[str, str, str]:
    """Return the keys of a request, most particular first: `model|tenant|class|prompt bucket`."""
    bucket = prompt_bucket(query.prompt_tokens)
    return (
        f"{query.model}|{query.tenant}|{query.slo_class}|{bucket}",
        f"{query.model}||{query.slo_class}|{bucket}",
        f"{query.model}|||",
    )


class HistogramPredictor:
    """Learns from outcomes; starts from what the control plane shares, or from a guess.

    Args:
        default_tokens: Predicted where nothing was ever seen.
        decay: Factor on old evidence per new outcome of a key, in (0, 1]; .998 forgets half of
            it after 350 outcomes.
        error: Injected relative error (coefficient of variation) for experiments: predictions
            are multiplied by exp(sigma z - sigma^2/2), sigma^2 = ln(1 + error^2), with z fixed by
            the request's id so that all policies see the same error.

    Raises:
        InvalidSettingError: A setting is outside its range.
    """

    def __init__(
        self, *, default_tokens: float = 128.0, decay: float = 0.998, error: float = 0.0
    ) -> None:
        if not 0.0 < decay <= 1.0:
            raise InvalidSettingError(f"decay is {decay}; it is above 0 and at most 1")
        if not error >= 0.0:
            raise InvalidSettingError(f"error is {error}; it is at least 0")
        self._default_tokens = default_tokens
        self._decay = decay
        self._sigma = sqrt(log(1.0 + error * error))
        self._shared: dict[str, list[float]] = {}
        self._own: dict[str, list[float]] = {}

    def predict(self, query: LengthQuery) -> LengthEstimate:
        """Return the estimate of the most particular key, shrunk towards the general ones."""
        blended: list[float] | None = None
        for key in reversed(keys(query)):
            weights = self._weights(key)
            if weights is not None:
                blended = weights if blended is None else _shrink(weights, blended)
        factor = self._factor(query.request_id)
        if blended is None:
            guess = min(self._default_tokens * factor, float(query.max_tokens))
            return LengthEstimate(max(1.0, guess), (), query.max_tokens, factor)
        estimate = LengthEstimate(0.0, tuple(blended), query.max_tokens, factor)
        return LengthEstimate(
            estimate.remaining_tokens(0), estimate.weights, query.max_tokens, factor
        )

    def learn(self, query: LengthQuery, completion_tokens: int) -> None:
        """Take in one finished request."""
        bucket = _bucket(completion_tokens)
        for key in keys(query):
            weights = self._own.setdefault(key, [0.0] * len(BUCKET_EDGES))
            for i, weight in enumerate(weights):
                weights[i] = weight * self._decay
            weights[bucket] += 1.0

    def share(self, table: Mapping[str, Sequence[float]]) -> None:
        """Take in what all routers learned; this router's own outcomes are in there as well.

        Its own recent evidence is halved, since the shared table counts it too, only later.
        """
        self._shared = {
            key: list(weights)
            for key, weights in table.items()
            if len(weights) == len(BUCKET_EDGES)
        }
        for weights in self._own.values():
            weights[:] = [weight * 0.5 for weight in weights]

    def _weights(self, key: str) -> list[float] | None:
        shared, own = self._shared.get(key), self._own.get(key)
        if shared is None or own is None:
            return shared or own
        return [a + b for a, b in zip(shared, own, strict=True)]

    def _factor(self, request_id: str) -> float:
        if self._sigma == 0.0:
            return 1.0
        z = _normal(request_id)
        return exp(self._sigma * z - self._sigma * self._sigma / 2.0)


def _bucket(tokens: int) -> int:
    for i, edge in enumerate(BUCKET_EDGES):
        if tokens <= edge:
            return i
    return len(BUCKET_EDGES) - 1


def _shrink(weights: list[float], general: list[float]) -> list[float]:
    mass = sum(general)
    scale = _PRIOR_WEIGHT / mass if mass > 0.0 else 0.0
    return [a + scale * b for a, b in zip(weights, general, strict=True)]


def _normal(key: str) -> float:
    """Return a standard normal number fixed by `key`: twelve uniforms, centred."""
    total = sum(crc32(f"{i}:{key}".encode()) / 2**32 for i in range(12))
    return total - 6.0
