"""Between the protocol's messages and the agent's values; the one place that knows both."""

from typing import TypeVar

from steelyard.v1 import agent_pb2, types_pb2

from dataplane.agent.accounting import RouterCounts
from dataplane.agent.agent import AgentLoad, Identity, Prefilled
from dataplane.agent.engine import (
    Chunk,
    DecodeJob,
    EngineDescription,
    Finish,
    PrefillJob,
    Sampling,
)
from dataplane.core.handoff import HandoffTicket
from servicekit.enums import number_of
from servicekit.errors import InvalidArgument
from servicekit.times import duration, seconds_of, timestamp

T = TypeVar("T")

_FINISHES = {finish: number_of(types_pb2.FinishReason, finish.name) for finish in Finish}


def prefill_job(request: agent_pb2.PrefillRequest) -> PrefillJob:
    """Read a prefill request.

    Raises:
        InvalidArgument: it has no id.
    """
    return PrefillJob(
        request_id=_request_id(request.request_id),
        prompt=request.prompt_token_ids[:],
        sampling=sampling(request.sampling),
    )


def decode_job(request: agent_pb2.DecodeRequest) -> DecodeJob:
    """Read a decode request.

    Raises:
        InvalidArgument: it has no id.
    """
    return DecodeJob(
        request_id=_request_id(request.request_id),
        prompt=request.prompt_token_ids[:],
        max_tokens=request.max_tokens,
        sampling=sampling(request.sampling),
        engine_params=request.handoff.engine_params if request.HasField("handoff") else None,
        want_text=request.want_text,
    )


def sampling(message: types_pb2.SamplingParams) -> Sampling:
    """Read sampling parameters; absent ones stay None."""

    def given(name: str, value: T) -> T | None:
        return value if message.HasField(name) else None  # type: ignore[arg-type]

    return Sampling(
        temperature=given("temperature", message.temperature),
        top_p=given("top_p", message.top_p),
        top_k=given("top_k", message.top_k),
        min_p=given("min_p", message.min_p),
        presence_penalty=given("presence_penalty", message.presence_penalty),
        frequency_penalty=given("frequency_penalty", message.frequency_penalty),
        repetition_penalty=given("repetition_penalty", message.repetition_penalty),
        seed=given("seed", message.seed),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        min_tokens=given("min_tokens", message.min_tokens),
        logprobs=given("logprobs", message.logprobs),
        extra_json=message.extra_json,
    )


def ticket(handoff: types_pb2.Handoff) -> HandoffTicket:
    """Read a hand-off.

    Raises:
        InvalidArgument: it names no hand-off.
    """
    if not handoff.handoff_id:
        raise InvalidArgument.of("handoff.handoff_id", "is empty")
    return HandoffTicket(
        handoff_id=handoff.handoff_id,
        prefill_instance_id=handoff.prefill_instance_id,
        prefill_epoch=handoff.prefill_epoch,
        pairing_key=handoff.pairing_key,
        prompt_tokens=handoff.prompt_tokens,
        expire_unix_seconds=seconds_of(handoff.expire_time),
        prompt_digest=handoff.prompt_digest,
    )


def prefill_response(prefilled: Prefilled) -> agent_pb2.PrefillResponse:
    """Write the answer to a prefill."""
    held, result = prefilled.ticket, prefilled.result
    return agent_pb2.PrefillResponse(
        handoff=types_pb2.Handoff(
            handoff_id=held.handoff_id,
            prefill_instance_id=held.prefill_instance_id,
            prefill_epoch=held.prefill_epoch,
            pairing_key=held.pairing_key,
            prompt_tokens=held.prompt_tokens,
            expire_time=timestamp(held.expire_unix_seconds),
            engine_params=result.engine_params,
            prompt_digest=held.prompt_digest,
        ),
        prompt_tokens=result.prompt_tokens,
        cached_prompt_tokens=result.cached_prompt_tokens,
        engine_time=duration(prefilled.engine_seconds),
        first_token_id=result.first_token_id,
        tokens_ahead=prefilled.tokens_ahead,
    )


def decode_response(chunk: Chunk) -> agent_pb2.DecodeResponse:
    """Write one chunk; called for every message, so it sets only what there is."""
    response = agent_pb2.DecodeResponse(token_ids=chunk.token_ids)
    if chunk.text:
        response.text = chunk.text
    if chunk.step_seconds > 0:
        response.step_time.nanos = min(int(chunk.step_seconds * 1e9), 999_999_999)
    for logprob in chunk.logprobs:
        entry = response.logprobs.add(
            token_id=logprob.token_id, logprob=logprob.logprob, token=logprob.token
        )
        for alternative in logprob.top:
            entry.top.add(token=alternative.token, logprob=alternative.logprob)
    if chunk.finish is not None:
        response.finish_reason = _FINISHES[chunk.finish]
        response.stop_reason = chunk.stop_reason
        if chunk.usage is not None:
            response.usage.prompt_tokens = chunk.usage.prompt_tokens
            response.usage.completion_tokens = chunk.usage.completion_tokens
            response.usage.cached_prompt_tokens = chunk.usage.cached_prompt_tokens
    return response


def engine_info(identity: Identity, engine: EngineDescription) -> types_pb2.EngineInfo:
    """Write what an engine is."""
    return types_pb2.EngineInfo(
        instance_id=identity.instance_id,
        epoch=engine.epoch,
        role=number_of(types_pb2.Role, identity.role.name),
        model=engine.model,
        model_revision=engine.model_revision,
        address=identity.address,
        dtype=engine.dtype,
        max_model_tokens=engine.max_model_tokens,
        vocab_size=engine.vocab_size,
        block_tokens=engine.block_tokens,
        kv_total_tokens=engine.kv_total_tokens,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        max_num_seqs=engine.max_num_seqs,
        max_batched_tokens=engine.max_batched_tokens,
        pairing_key=engine.pairing_key,
        handoff_lease=duration(engine.lease_seconds),
        profile=engine.profile,
        engine_kind=engine.engine_kind,
        engine_version=engine.engine_version,
        tokenizer_sha256=engine.tokenizer_sha256,
    )


def instance_load(load: AgentLoad) -> types_pb2.InstanceLoad:
    """Write one measurement."""
    return types_pb2.InstanceLoad(
        running=load.measure.running,
        waiting=load.measure.waiting,
        kv_used_tokens=load.measure.kv_used_tokens,
        queued_prefill_tokens=load.queued_prefill_tokens,
        step_seconds=load.step_seconds,
        by_router=[_router_load(counts) for counts in load.by_router],
        preemptions=load.measure.preemptions,
        engine_healthy=load.measure.healthy,
        time=timestamp(load.time_unix_seconds),
    )


def _router_load(counts: RouterCounts) -> types_pb2.RouterLoad:
    return types_pb2.RouterLoad(
        router_id=counts.router_id,
        prefill_requests=counts.prefill_requests,
        prefill_tokens=counts.prefill_tokens,
        decode_requests=counts.decode_requests,
        decode_kv_tokens=counts.decode_kv_tokens,
        held_requests=counts.held_requests,
        held_kv_tokens=counts.held_kv_tokens,
    )


def _request_id(request_id: str) -> str:
    if not request_id:
        raise InvalidArgument.of("request_id", "is empty")
    return request_id
