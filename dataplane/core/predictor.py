"""Output lengths: learned online, as decayed histograms by kind of request.

Lengths are heavy-tailed, so a histogram over geometric buckets is kept rather than a mean: it
gives the expected length and, while a request streams, the expected rest E[L - g | L > g], which
never reaches 0. Keys go from the particular to the general (tenant and class and prompt size,
class and prompt size, model); the most particular answers, shrunk towards the next general one by
a weight of eight outcomes.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Protocol

from dataplane.core.errors import InvalidSettingError
from dataplane.core.lengths import BUCKET_EDGES, DecayingCounts, LengthHistogram, bucket_of

__all__ = [
    "BUCKET_EDGES",
    "HistogramPredictor",
    "LengthEstimate",
    "LengthPredictor",
    "LengthQuery",
    "keys",
    "prompt_bucket",
]
_STANDARD_NORMAL = NormalDist()
_PRIOR_WEIGHT = 8.0
_MOST_KEYS = 4096
_RENEW_SHARE = 0.05
_RENEW_LEAST = 8
_RENEW_MOST = 512


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
        histogram: Of outcomes of its kind; empty where nothing is known.
        max_tokens: The request's own cap.
        factor: Injected error; multiplies every prediction.
    """

    mean_tokens: float
    histogram: LengthHistogram | tuple[()]
    max_tokens: int
    factor: float = 1.0

    def remaining_tokens(self, generated_tokens: int) -> float:
        """Return E[L - g | L > g], at least 1 while the stream lives, at most what max_tokens leaves."""
        left = max(1.0, float(self.max_tokens - generated_tokens))
        if isinstance(self.histogram, tuple):
            return min(left, max(1.0, self.mean_tokens - generated_tokens))
        rest = self.histogram.rest(generated_tokens, self.max_tokens, self.factor)
        if rest is None:
            # Longer than anything seen: half as long again, as a power law would have it.
            rest = 0.5 * generated_tokens
        return min(left, max(1.0, rest))


class LengthPredictor(Protocol):
    """Predicts the output length of a request on arrival."""

    def predict(self, query: LengthQuery) -> LengthEstimate:
        """Return what is known."""
        ...


def prompt_bucket(prompt_tokens: int) -> int:
    """Return the power of two at or above a prompt's length."""
    return 1 << max(0, prompt_tokens - 1).bit_length()


def keys(query: LengthQuery) -> tuple[str, str, str]:
    """Return the keys of a request, most particular first: `model|tenant|class|prompt bucket`.

    A `|` within a name is written `_`, as the control plane does.
    """
    bucket = prompt_bucket(query.prompt_tokens)
    model, tenant, slo_class = query.model, query.tenant, query.slo_class
    if "|" in model or "|" in tenant or "|" in slo_class:
        model, tenant, slo_class = (n.replace("|", "_") for n in (model, tenant, slo_class))
    return (
        f"{model}|{tenant}|{slo_class}|{bucket}",
        f"{model}||{slo_class}|{bucket}",
        f"{model}|||",
    )


@dataclass(slots=True)
class Blend:
    """A key's histogram as it was computed last.

    Attributes:
        evidence: It rests on; with a twentieth more of its own it is computed anew.
        renew_at: Outcomes of any kind after which it is computed anew.
        shares: Shared tables seen by then.
        count: Own outcomes since.
    """

    histogram: LengthHistogram
    evidence: float
    renew_at: int
    shares: int
    count: int = 0


class HistogramPredictor:
    """Learns from outcomes; starts from what the control plane shares, or from a guess.

    Own outcomes count until the second shared table after them, which holds them by then: for one
    period they may count twice, and without a control plane they count for good.

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
        self._shared: Mapping[str, Sequence[float]] = {}
        self._own: OrderedDict[str, DecayingCounts] = OrderedDict()
        self._previous: OrderedDict[str, DecayingCounts] = OrderedDict()
        self._blends: OrderedDict[str, Blend] = OrderedDict()
        self._learned = 0
        self._shares = 0

    def __repr__(self) -> str:
        return f"<HistogramPredictor {len(self._shared)} keys shared, {len(self._own)} own>"

    def predict(self, query: LengthQuery) -> LengthEstimate:
        """Return the estimate of the most particular key, shrunk towards the general ones."""
        histogram = self._blended(keys(query))
        factor = self._factor(query.request_id)
        most = query.max_tokens
        if histogram is None:
            guess = min(self._default_tokens * factor, float(most))
            return LengthEstimate(max(1.0, guess), (), most, factor)
        mean = histogram.rest(0, most, factor) or 1.0
        return LengthEstimate(min(max(1.0, mean), float(most)), histogram, most, factor)

    def learn(self, query: LengthQuery, completion_tokens: int) -> None:
        """Take in one finished request."""
        self._learned += 1
        bucket = bucket_of(completion_tokens)
        own = self._own
        for key in keys(query):
            counts = own.get(key)
            if counts is None:
                counts = own[key] = DecayingCounts(self._decay)
                if len(own) > _MOST_KEYS:
                    own.popitem(last=False)
            own.move_to_end(key)
            counts.add(bucket)
            blend = self._blends.get(key)
            if blend is not None:
                blend.count += 1

    def share(self, table: Mapping[str, Sequence[float]]) -> None:
        """Take in what all routers learned; an empty table, or the same again, changes nothing."""
        held = {key: row for key, row in table.items() if len(row) == len(BUCKET_EDGES)}
        if not held or held == self._shared:
            return
        self._shared = held
        self._shares += 1
        self._previous, self._own = self._own, OrderedDict()

    def _blended(self, names: tuple[str, str, str]) -> LengthHistogram | None:
        """Return the histogram for the keys, computed anew when enough has come in since."""
        name = names[0]
        blend = self._blends.get(name)
        if (
            blend is not None
            and blend.shares == self._shares
            and self._learned < blend.renew_at
            and blend.count <= _RENEW_SHARE * blend.evidence
        ):
            return blend.histogram
        weights: list[float] | None = None
        for key in reversed(names):
            own = self._weights(key)
            if own is not None:
                weights = own if weights is None else _shrink(own, weights)
        if weights is None or sum(weights) <= 0.0:
            return None
        histogram = LengthHistogram(weights)
        renew_at = self._learned + min(_RENEW_MOST, _RENEW_LEAST + self._learned // 16)
        self._blends[name] = Blend(histogram, sum(weights), renew_at, self._shares)
        if len(self._blends) > _MOST_KEYS:
            self._blends.popitem(last=False)
        return histogram

    def _weights(self, key: str) -> list[float] | None:
        """Return all evidence for one key."""
        rows: list[Sequence[float]] = [
            counts.weights()
            for counts in (self._own.get(key), self._previous.get(key))
            if counts is not None
        ]
        shared = self._shared.get(key)
        if shared is not None:
            rows.append(shared)
        if not rows:
            return None
        return list(rows[0]) if len(rows) == 1 else [sum(row) for row in zip(*rows, strict=True)]

    def _factor(self, request_id: str) -> float:
        if self._sigma == 0.0:
            return 1.0
        z = _normal(request_id)
        return exp(self._sigma * z - self._sigma * self._sigma / 2.0)


def _shrink(weights: list[float], general: list[float]) -> list[float]:
    mass = sum(general)
    scale = _PRIOR_WEIGHT / mass if mass > 0.0 else 0.0
    return [a + scale * b for a, b in zip(weights, general, strict=True)]


def _normal(key: str) -> float:
    """Return a standard normal number fixed by `key`: a hash as a quantile."""
    digest = int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
    return _STANDARD_NORMAL.inv_cdf((digest + 0.5) / 2.0**64)
