"""The paper's rule: the instance on which a request costs the least additional time.

"Calibrate, Then Route" (arXiv 2609.16206), section III-A. Decode candidate d, request r:

    cost = w_b backlog(d) sigma(r) + w_s L tau_dec (1 + rho press(d)) sigma(r) + w_q queue(d)

backlog: committed remaining output tokens times tau_dec, seconds. L: predicted output tokens.
press: KV use after admission above its knee, a share of the budget, 0 below. queue: requests.
sigma: the class's urgency. Prefill candidates the same with prompt tokens and tau_pre, without
pressure. Each side takes its cheapest. The paper does not publish its weights; ours are the
defaults below: seconds count as seconds and a queued request as one light-load decode step.

tau_pre is a token's share of a 1,024-token prefill step; tau_dec is a step of a batch of one over
the request's own prompt: the seconds per token that the paper's calibration fits under light load.
"""

from dataclasses import dataclass

from dataplane.core.errors import InvalidSettingError
from dataplane.core.policies.base import Terms, TwoSided
from dataplane.core.request import Request
from dataplane.core.view import Side
from enginemodel.model import EngineConstants, decode_step_seconds, prefill_step_seconds

_TAU_PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """Weights of the terms; 0 takes a term out.

    Attributes:
        backlog: w_b, seconds per second of committed work.
        own_work: w_s, seconds per second of the request's own work.
        queue_seconds: w_q, seconds per request on the instance.
        pressure: rho, how much full KV memory makes own work dearer.
        pressure_knee: Share of the KV budget above which pressure counts.
        use_slo: False sets sigma to 1 for every class.
        use_prediction: False prices every output as `flat_output_tokens`.
        flat_output_tokens: Output assumed without prediction.
        decode_cost_factor: Multiplies tau_dec; 1/7.4 is the paper's miscalibration.
        prefill_cost_factor: Multiplies tau_pre.
    """

    backlog: float = 1.0
    own_work: float = 1.0
    queue_seconds: float = 0.012
    pressure: float = 4.0
    pressure_knee: float = 0.8
    use_slo: bool = True
    use_prediction: bool = True
    flat_output_tokens: float = 256.0
    decode_cost_factor: float = 1.0
    prefill_cost_factor: float = 1.0

    def __post_init__(self) -> None:
        """Refuse weights that price a busier instance cheaper."""
        for name in ("backlog", "own_work", "queue_seconds", "pressure"):
            if not getattr(self, name) >= 0.0:
                raise InvalidSettingError(f"{name} is {getattr(self, name)}; it is at least 0")
        if not 0.0 <= self.pressure_knee < 1.0:
            raise InvalidSettingError(
                f"pressure_knee is {self.pressure_knee}; it is at least 0 and below 1"
            )
        if not (self.decode_cost_factor > 0.0 and self.prefill_cost_factor > 0.0):
            raise InvalidSettingError("cost factors are above 0")


def prefill_seconds_per_token(constants: EngineConstants) -> float:
    """Return tau_pre."""
    return prefill_step_seconds(constants, _TAU_PROMPT_TOKENS) / _TAU_PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Prices prefill candidates."""

    weights: CostWeights

    def price(self, request: Request, side: Side) -> Terms:
        """Return backlog, own work and queue, seconds."""
        weights = self.weights
        sigma = request.urgency if weights.use_slo else 1.0
        factor = weights.prefill_cost_factor
        tau = side.fixed("tau_pre", lambda _, constants: prefill_seconds_per_token(constants))
        prompt, own = request.prompt_tokens, weights.own_work * sigma * factor
        backlog = weights.backlog * sigma * factor
        return {
            "backlog": side.map(
                lambda tokens, tau: backlog * tokens * tau, side.prefill_tokens(), tau
            ),
            "own_work": side.map(
                lambda tau, cached: own * (prompt - cached) * tau, tau, side.cached_tokens(request)
            ),
            "queue": side.map(
                lambda requests: weights.queue_seconds * requests, side.prefill_requests()
            ),
        }


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Prices decode candidates."""

    weights: CostWeights

    def price(self, request: Request, side: Side) -> Terms:
        """Return backlog, own work, pressure and queue, seconds."""
        weights = self.weights
        sigma = request.urgency if weights.use_slo else 1.0
        predicted = (
            request.predicted_tokens if weights.use_prediction else weights.flat_output_tokens
        )
        output_tokens = min(predicted, request.max_tokens)
        factor = weights.decode_cost_factor
        tau = side.map(
            lambda base, per_token: base + per_token * request.prompt_tokens,
            side.fixed("tau_dec_base", lambda _, constants: decode_step_seconds(constants, 1, 0)),
            side.fixed("d2", lambda _, constants: constants.d2_seconds_per_kv_token),
        )
        own = weights.own_work * output_tokens * sigma * factor
        backlog = weights.backlog * sigma * factor
        admitted = request.prompt_tokens + output_tokens
        over = side.positive(
            side.map(
                lambda kv, budget: (kv + admitted) / budget - weights.pressure_knee,
                side.decode_kv_tokens(),
                side.fixed("kv_total", lambda instance, _: float(max(instance.kv_total_tokens, 1))),
            )
        )
        return {
            "backlog": side.map(
                lambda tokens, tau: backlog * tokens * tau, side.decode_remaining_tokens(), tau
            ),
            "own_work": side.map(lambda tau: own * tau, tau),
            "pressure": side.map(
                lambda tau, press: own * tau * weights.pressure * press, tau, over
            ),
            "queue": side.map(
                lambda requests: weights.queue_seconds * requests, side.decode_requests()
            ),
        }


def marginal_cost(**weights: float) -> TwoSided:
    """Return the policy; settings are those of CostWeights.

    Raises:
        InvalidSettingError: A weight is outside its range.
    """
    values = CostWeights(**weights)  # type: ignore[arg-type]
    return TwoSided(PrefillCost(values), DecodeCost(values))
