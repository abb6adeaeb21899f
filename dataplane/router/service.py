"""RouterService over gRPC: thin; what it answers is decided elsewhere."""

from contextlib import aclosing
from typing import Any

import grpc
from steelyard.v1 import router_pb2, router_pb2_grpc

from dataplane.router.desk import Desk
from dataplane.router.front import Front, Served
from dataplane.router.intake import Intake
from dataplane.router.journal import Decision, Journal
from servicekit.clock import Clock
from servicekit.deadline import Deadline
from servicekit.errors import InvalidArgument, NotFound
from servicekit.tracing import current_call

POLICY_KEY = "x-steelyard-policy"
_MAX_RESERVE_SECONDS = 60.0
Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Answers clients; one a process."""

    def __init__(
        self, *, front: Front, intake: Intake, desk: Desk, journal: Journal, clock: Clock
    ) -> None:
        self._front = front
        self._intake = intake
        self._desk = desk
        self._journal = journal
        self._clock = clock

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> None:
        """Generate; see the proto. A coroutine that writes: a cancelled call ends it at once."""
        arrived_at = self._clock.monotonic()
        deadline = Deadline.from_context(context, self._clock)
        served = await self._front.open(request, arrived_at, deadline, _policy_of(context))
        call = current_call()
        correlation_id = request.correlation_id or (call.request_id if call else "")
        responses = self._front.responses(served, correlation_id, call.trace_id if call else "")
        first = True
        async with aclosing(responses) as stream:
            async for chunk in stream:
                answer = router_pb2.GenerateResponse(
                    token_ids=chunk.token_ids,
                    text=chunk.text,
                    logprobs=chunk.logprobs,
                    finish_reason=chunk.finish_reason,
                    stop_reason=chunk.stop_reason,
                )
                if first:
                    first = False
                    answer.request_id = served.request_id
                    if request.want_receipt:
                        answer.receipt.CopyFrom(_receipt_of_served(served))
                if chunk.finish_reason:
                    answer.usage.CopyFrom(chunk.usage)
                    answer.usage.cached_prompt_tokens = max(
                        answer.usage.cached_prompt_tokens, served.record.cached_prompt_tokens
                    )
                await context.write(answer)

    async def Route(  # noqa: N802
        self, request: router_pb2.RouteRequest, context: Context
    ) -> router_pb2.RouteResponse:
        """Decide without dispatching; see the proto."""
        reserve_seconds = request.reserve.ToNanoseconds() / 1e9
        if not 0.0 <= reserve_seconds <= _MAX_RESERVE_SECONDS:
            raise InvalidArgument.of(
                "reserve", f"is {reserve_seconds:g} s; it is at least 0 and at most 60 s"
            )
        taken = await self._intake.take(
            request.request, self._clock.monotonic(), _policy_of(context)
        )
        pool = taken.driver.pool
        reserving = reserve_seconds > 0
        answer = self._desk.answer(
            taken.driver.name, taken.request, taken.policy, pool.view, reserving=reserving
        )
        placement = answer.placement
        prefill = pool.instance(placement.prefill_id) if placement.prefill_id else None
        decode = pool.instance(placement.decode_id)
        expected = self._desk.predict(pool, taken.request, prefill, decode)
        receipt = _receipt_of(self._front.decision(taken))
        receipt.policy = answer.policy
        receipt.prefill_instance_id = placement.prefill_id or ""
        receipt.decode_instance_id = placement.decode_id
        receipt.predicted_ttft.FromNanoseconds(round(expected.ttft_seconds * 1e9))
        receipt.predicted_tpot.FromNanoseconds(round(expected.tpot_seconds * 1e9))
        response = router_pb2.RouteResponse(
            receipt=receipt,
            prefill_address=prefill.address if prefill else "",
            decode_address=decode.address if decode else "",
            held_back=answer.held_back,
        )
        if reserving:
            response.reservation_id = self._desk.reserve(
                pool, taken.request, placement, reserve_seconds
            )
        return response

    async def Explain(  # noqa: N802
        self, request: router_pb2.ExplainRequest, context: Context
    ) -> router_pb2.ExplainResponse:
        """Show every candidate's price; see the proto."""
        if request.WhichOneof("subject") == "request_id":
            known = self._journal.recall(request.request_id)
            if known is None:
                raise NotFound(
                    f"request_id: no decision of {request.request_id!r} is kept here; "
                    "the last 2,000 of each router are",
                    reason="UNKNOWN_REQUEST",
                )
            decision, went = known
            receipt = _receipt_of(decision)
            receipt.prefill_instance_id = went.prefill.instance_id if went.prefill else ""
            receipt.decode_instance_id = went.decode.instance_id if went.decode else ""
        elif request.WhichOneof("subject") == "request":
            taken = await self._intake.take(
                request.request, self._clock.monotonic(), _policy_of(context)
            )
            decision = self._front.decision(taken)
            receipt = _receipt_of(decision)
        else:
            raise InvalidArgument.of("subject", "is empty; give request_id or request")
        explained = self._desk.explain(
            decision.pool,
            decision.request,
            decision.policy,
            decision.view,
            now=request.WhichOneof("subject") == "request",
        )
        if explained.placement is not None:
            receipt.prefill_instance_id = explained.placement.prefill_id or ""
            receipt.decode_instance_id = explained.placement.decode_id
        return router_pb2.ExplainResponse(
            receipt=receipt,
            prefill=explained.prefill,
            decode=explained.decode,
            priced_by=explained.priced_by,
            held_back=explained.held_back,
        )

    async def Cancel(  # noqa: N802
        self,
        request: router_pb2.CancelRequest,
        context: Context,  # noqa: ARG002
    ) -> router_pb2.CancelResponse:
        """End a request or a reservation; see the proto."""
        found = self._front.cancel(request.request_id) or self._desk.cancel(request.request_id)
        return router_pb2.CancelResponse(found=found)


def _policy_of(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == POLICY_KEY and isinstance(value, str):
            return value
    return ""


def _receipt_of(decision: Decision) -> router_pb2.Receipt:
    request, view = decision.request, decision.view
    versions = [priced.version for priced in view.roster.constants.values()]
    receipt = router_pb2.Receipt(
        request_id=request.request_id,
        policy=decision.policy,
        prompt_tokens=request.prompt_tokens,
        predicted_tokens=request.predicted_tokens,
        constants_version=max(versions, default=0),
        snapshot_sequence=decision.sequence,
        blind=decision.blind,
    )
    age = min(decision.snapshot_age_seconds, 1e6)
    receipt.snapshot_age.FromNanoseconds(round(age * 1e9))
    return receipt


def _receipt_of_served(served: Served) -> router_pb2.Receipt:
    receipt, record = _receipt_of(served.decision), served.record
    receipt.prefill_instance_id = record.prefill.instance_id if record.prefill else ""
    receipt.decode_instance_id = record.decode.instance_id if record.decode else ""
    receipt.constants_version = served.constants_version
    if record.predicted is not None:
        receipt.predicted_ttft.FromNanoseconds(round(record.predicted.ttft_seconds * 1e9))
        receipt.predicted_tpot.FromNanoseconds(round(record.predicted.tpot_seconds * 1e9))
    return receipt
