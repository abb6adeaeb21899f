"""What a simulated router predicts of output lengths."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, log, sqrt
from typing import Protocol

from dataplane.core.predictor import HistogramPredictor, LengthEstimate, LengthQuery
from simulator.values import Arrival


class Prediction(Protocol):
    """Predicts on arrival and learns from ends."""

    def predict(self, arrival: Arrival) -> LengthEstimate:
        """Return what is known of an arrival's output."""
        ...

    def learn(self, arrival: Arrival) -> None:
        """Take in a finished request's length."""
        ...


def error_factor(error: float, z: float) -> float:
    """Return exp(sigma z - sigma^2/2), sigma^2 = ln(1 + error^2): mean 1, its CV is `error`."""
    sigma = sqrt(log(1.0 + error * error))
    return exp(sigma * z - sigma * sigma / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanPrediction:
    """Predicts each tenant's mean, with an injected error; cheap, and knows nothing else.

    Attributes:
        by_tenant: Mean output by tenant.
        otherwise: For tenants not named.
        error: Injected relative error, a coefficient of variation.
    """

    by_tenant: Mapping[str, float] = field(default_factory=dict)
    otherwise: float = 250.0
    error: float = 0.0

    def predict(self, arrival: Arrival) -> LengthEstimate:
        """Return the tenant's mean times the request's error."""
        mean = self.by_tenant.get(arrival.tenant, self.otherwise)
        factor = error_factor(self.error, arrival.error_z) if self.error > 0.0 else 1.0
        capped = min(max(1.0, mean * factor), float(arrival.max_tokens))
        return LengthEstimate(capped, (), arrival.max_tokens, factor)

    def learn(self, arrival: Arrival) -> None:
        """Nothing is learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruePrediction:
    """Knows the length, times an injected error: a bound, never a router."""

    error: float = 0.0

    def predict(self, arrival: Arrival) -> LengthEstimate:
        """Return the truth times the request's error."""
        factor = error_factor(self.error, arrival.error_z) if self.error > 0.0 else 1.0
        capped = min(max(1.0, arrival.output_tokens * factor), float(arrival.max_tokens))
        return LengthEstimate(capped, (), arrival.max_tokens, factor)

    def learn(self, arrival: Arrival) -> None:
        """Nothing is left to learn."""


class LearnedPrediction:
    """The router's own predictor, learning as it goes."""

    def __init__(self, *, error: float = 0.0) -> None:
        self._predictor = HistogramPredictor(error=error)

    def predict(self, arrival: Arrival) -> LengthEstimate:
        """Return what the histograms say."""
        return self._predictor.predict(_query(arrival))

    def learn(self, arrival: Arrival) -> None:
        """Take in one length."""
        self._predictor.learn(_query(arrival), arrival.output_tokens)


def _query(arrival: Arrival) -> LengthQuery:
    return LengthQuery(
        model="simulated",
        tenant=arrival.tenant,
        slo_class=arrival.slo_class,
        prompt_tokens=arrival.prompt_tokens,
        max_tokens=arrival.max_tokens,
        request_id=arrival.request_id,
    )
