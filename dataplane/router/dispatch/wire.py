"""DispatchService's messages to and from the core's events."""

from steelyard.v1 import dispatch_pb2, types_pb2

from dataplane.core.delegation import Forward, Submission
from dataplane.core.errors import RejectReason
from dataplane.core.events import (
    Action,
    Failed,
    Finished,
    Leg,
    PrefillDone,
    Reject,
    StartDecode,
    StartPrefill,
    TokensStreamed,
)
from dataplane.core.predictor import LengthEstimate
from dataplane.core.request import Request, Targets
from dataplane.router.snapshots import targets_from


def to_attach(message: Forward, now: float) -> dispatch_pb2.AttachRequest:
    """Return what a front end sends; times become ages, since clocks differ."""
    match message:
        case Submission():
            return dispatch_pb2.AttachRequest(submit=_submit(message, now))
        case PrefillDone():
            done = dispatch_pb2.PrefillDone(
                request_id=message.request_id, cached_prompt_tokens=message.cached_prompt_tokens
            )
            left = max(0.0, message.handoff_expires_at - now)
            done.handoff_valid_for.FromNanoseconds(round(left * 1e9))
            done.engine_time.FromNanoseconds(round(message.engine_seconds * 1e9))
            return dispatch_pb2.AttachRequest(prefill_done=done)
        case TokensStreamed():
            streamed = dispatch_pb2.TokensStreamed(
                request_id=message.request_id, tokens=message.count
            )
            return dispatch_pb2.AttachRequest(tokens_streamed=streamed)
        case Failed():
            failed = dispatch_pb2.LegFailed(
                request_id=message.request_id,
                decode=message.leg is Leg.DECODE,
                not_at_fault=not message.at_fault,
            )
            return dispatch_pb2.AttachRequest(leg_failed=failed)
        case Finished():
            ended = dispatch_pb2.Ended(request_id=message.request_id)
            return dispatch_pb2.AttachRequest(ended=ended)


def from_attach(message: dispatch_pb2.AttachRequest, now: float) -> Forward | None:
    """Return what a front end said; None for what is no event."""
    match message.WhichOneof("event"):
        case "submit":
            return _submission(message.submit, now)
        case "prefill_done":
            done = message.prefill_done
            left = done.handoff_valid_for.ToNanoseconds() / 1e9
            return PrefillDone(
                done.request_id,
                now + left,
                done.cached_prompt_tokens,
                done.engine_time.ToNanoseconds() / 1e9,
            )
        case "tokens_streamed":
            return TokensStreamed(
                message.tokens_streamed.request_id, message.tokens_streamed.tokens
            )
        case "leg_failed":
            leg = Leg.DECODE if message.leg_failed.decode else Leg.PREFILL
            failed = message.leg_failed
            return Failed(failed.request_id, leg, at_fault=not failed.not_at_fault)
        case "ended":
            return Finished(message.ended.request_id)
        case _:
            return None


def to_answer(action: Action, token: int) -> dispatch_pb2.AttachResponse:
    """Return what the dispatcher sends; an action that is for nobody becomes a mere sign of life."""
    response = dispatch_pb2.AttachResponse(fencing_token=token)
    match action:
        case StartPrefill(request_id, instance_id):
            response.start_prefill.request_id = request_id
            response.start_prefill.instance_id = instance_id
        case StartDecode(request_id, instance_id):
            response.start_decode.request_id = request_id
            response.start_decode.instance_id = instance_id
        case Reject(request_id, reason):
            response.reject.request_id = request_id
            response.reject.reason = reason.value
        case _:
            pass
    return response


def from_answer(message: dispatch_pb2.AttachResponse) -> Action | None:
    """Return what the dispatcher decided; None for a sign of life."""
    match message.WhichOneof("action"):
        case "start_prefill":
            return StartPrefill(message.start_prefill.request_id, message.start_prefill.instance_id)
        case "start_decode":
            return StartDecode(message.start_decode.request_id, message.start_decode.instance_id)
        case "reject":
            return Reject(message.reject.request_id, RejectReason(message.reject.reason))
        case _:
            return None


def _submit(message: Submission, now: float) -> dispatch_pb2.Submit:
    request = message.request
    submit = dispatch_pb2.Submit(
        request_id=request.request_id,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        predicted_tokens=request.predicted_tokens,
        slo_class=request.slo_class,
        slo=_targets(request.targets),
        urgency=request.urgency,
        excluded_instance_ids=sorted(request.excluded),
        prefill_instance_id=message.prefill_id,
        decode_instance_id=message.decode_id,
        generated_tokens=message.generated_tokens,
    )
    submit.age.FromNanoseconds(round(max(0.0, now - request.arrived_at) * 1e9))
    return submit


def _submission(message: dispatch_pb2.Submit, now: float) -> Submission:
    request = Request(
        request_id=message.request_id,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        length=LengthEstimate(message.predicted_tokens, (), message.max_tokens),
        slo_class=message.slo_class,
        urgency=message.urgency or 1.0,
        targets=targets_from(message.slo),
        arrived_at=now - message.age.ToNanoseconds() / 1e9,
        excluded=frozenset(message.excluded_instance_ids),
    )
    return Submission(
        request,
        message.prefill_instance_id,
        message.decode_instance_id,
        message.generated_tokens,
    )


def _targets(targets: Targets) -> types_pb2.SloTargets:
    message = types_pb2.SloTargets()
    if targets.ttft_seconds < float("inf"):
        message.ttft.FromNanoseconds(round(targets.ttft_seconds * 1e9))
    if targets.tpot_seconds < float("inf"):
        message.tpot.FromNanoseconds(round(targets.tpot_seconds * 1e9))
    return message
