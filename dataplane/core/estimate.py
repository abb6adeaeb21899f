"""What a placement will cost a request, before it is made: time to first token, time per token."""

from dataclasses import dataclass

from dataplane.core.cluster import Instance
from dataplane.core.pool import Pool
from dataplane.core.request import Request
from enginemodel.model import (
    decode_step_seconds,
    handoff_seconds,
    prefill_seconds,
    prefill_work_seconds,
)

# From hand-over to the first token a decode engine takes this many of its steps: the pull is
# started at one boundary and seen finished at a later one, and the token comes a step after.
HANDOFF_STEPS = 2.2
_TYPICAL_PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted latencies of one request at one placement, seconds."""

    ttft_seconds: float
    tpot_seconds: float


def estimate(
    pool: Pool, request: Request, prefill: Instance | None, decode: Instance | None
) -> Estimate:
    """Predict the latencies of a request that is already charged to its placement.

    Waiting is the work of the prompts ahead, without floors; the first token comes after the
    prefill, the hand-off and HANDOFF_STEPS of the decode engine. A side that is not known yet
    counts nothing.
    """
    view = pool.view
    ttft_seconds = 0.0
    if prefill is not None:
        constants = view.constants_of(prefill)
        slot = pool.slot(prefill.instance_id)
        ahead = 0.0
        if slot is not None:
            own = view.own.prefill_tokens[slot] - request.prompt_tokens
            ahead = max(0.0, own) + view.measured.other_prefill_tokens[slot]
        # Prompts ahead are priced as prompts of a typical size: their sum alone is known.
        typical_seconds = prefill_work_seconds(constants, _TYPICAL_PROMPT_TOKENS)
        ttft_seconds += typical_seconds * ahead / _TYPICAL_PROMPT_TOKENS
        ttft_seconds += prefill_seconds(
            constants, request.prompt_tokens, max(1, prefill.max_batched_tokens)
        )
    if decode is None:
        return Estimate(ttft_seconds, 0.0)
    constants = view.constants_of(decode)
    slot = pool.slot(decode.instance_id)
    sequences, kv_tokens = 1.0, float(request.prompt_tokens)
    if slot is not None:
        sequences = view.own.decode_requests[slot] + view.measured.other_decode_requests[slot]
        kv_tokens = view.own.decode_kv_tokens[slot] + view.measured.other_decode_kv_tokens[slot]
    step_seconds = decode_step_seconds(constants, max(1.0, sequences), kv_tokens)
    if prefill is None:
        ttft_seconds += prefill_seconds(
            constants, request.prompt_tokens, max(1, decode.max_batched_tokens)
        )
    else:
        moved = handoff_seconds(constants, request.prompt_tokens, decode.kv_bytes_per_token)
        ttft_seconds += moved + HANDOFF_STEPS * step_seconds
    return Estimate(ttft_seconds, step_seconds)
