"""AgentService: messages in, messages out; what they mean is in `agent.py`."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from steelyard.v1 import agent_pb2, agent_pb2_grpc

from dataplane.agent import wire
from dataplane.agent.accounting import ChargePhase
from dataplane.agent.agent import Agent, Generation
from dataplane.agent.errors import EngineUnavailable, NoTokenizer
from dataplane.agent.exchange import Exchange, Handler
from dataplane.agent.probe import Prober, StepSeen
from servicekit.clock import Clock
from servicekit.deadline import Deadline
from servicekit.errors import InvalidArgument, SteelyardError
from servicekit.times import duration, seconds_of, timestamp
from servicekit.tracing import add_log_fields

_TOKENIZER_CHUNK_BYTES = 256 * 1024
_MAX_COALESCE_SECONDS = 0.1
_MAX_PROBE_SEQUENCES = 4096


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """Serves one agent.

    Args:
        agent: The agent.
        clock: Its time.
        stopping: Set when the server stops.
        observed: Makes a handler of legs, by its method's name, count and log as that of a call.
    """

    def __init__(
        self,
        agent: Agent,
        clock: Clock,
        *,
        stopping: asyncio.Event,
        observed: Callable[[str, Handler], Handler],
    ) -> None:
        self._agent = agent
        self._clock = clock
        self._stopping = stopping
        self._observed = observed
        self._prober = Prober(agent.engine, clock)

    async def Prefill(  # noqa: N802
        self, request: agent_pb2.PrefillRequest, context: Any
    ) -> agent_pb2.PrefillResponse:
        """Compute a prompt's KV cache and hold it for a decode engine."""
        Deadline.from_context(context, self._clock).check()
        job = wire.prefill_job(request)
        prefilled = await self._agent.prefill(
            job, router_id=request.router_id, expected_epoch=request.expected_epoch
        )
        add_log_fields(
            job=job.request_id,
            router_id=request.router_id,
            prompt_tokens=prefilled.result.prompt_tokens,
            handoff_id=prefilled.ticket.handoff_id,
        )
        return wire.prefill_response(prefilled)

    async def Decode(  # type: ignore[override]  # noqa: N802
        self, request: agent_pb2.DecodeRequest, context: Any
    ) -> None:
        """Generate; a coroutine that writes, so that a cancelled call ends it at once."""
        Deadline.from_context(context, self._clock).check()
        begin = self._clock.monotonic()
        job = wire.decode_job(request)
        with_handoff = request.HasField("handoff")
        valid_for = request.HasField("handoff_valid_for")
        generation = await self._agent.decode(
            job,
            router_id=request.router_id,
            ticket=wire.ticket(request.handoff) if with_handoff else None,
            valid_for_seconds=seconds_of(request.handoff_valid_for) if valid_for else None,
            expected_epoch=request.expected_epoch,
        )
        add_log_fields(
            job=job.request_id,
            router_id=request.router_id,
            prompt_tokens=len(job.prompt),
            with_handoff=with_handoff,
        )
        coalesce_seconds = seconds_of(request.coalesce) if request.HasField("coalesce") else 0
        try:
            await self._relay(
                generation, context, begin, min(coalesce_seconds, _MAX_COALESCE_SECONDS)
            )
        finally:
            await generation.close()

    async def _relay(
        self, generation: Generation, context: Any, begin: float, coalesce_seconds: float
    ) -> None:
        """Write chunks until the end.

        The first token goes out at once. After each message the stream rests for the coalescing
        window; what arrives in it, or while a write is pending, travels together.
        """
        tokens = messages = 0
        while True:
            chunk = await generation.read()
            response = wire.decode_response(chunk)
            if chunk.token_ids and not tokens:
                elapsed_seconds = self._clock.monotonic() - begin
                response.first_token_time.CopyFrom(duration(elapsed_seconds))
            tokens += len(chunk.token_ids)
            messages += 1
            if chunk.finish is not None:
                add_log_fields(tokens=tokens, messages=messages, finish=chunk.finish.value)
            await context.write(response)
            if chunk.finish is not None:
                return
            if coalesce_seconds > 0:
                await self._clock.sleep(coalesce_seconds)

    async def Exchange(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[agent_pb2.ExchangeRequest], context: Any
    ) -> None:
        """Serve many prefills and decodes on one stream."""
        prefill = self._observed("Prefill", self.Prefill)
        decode = self._observed("Decode", self.Decode)
        await Exchange(prefill, decode, self._stopping).run(requests, context)

    async def Abort(  # noqa: N802
        self, request: agent_pb2.AbortRequest, context: Any
    ) -> agent_pb2.AbortResponse:
        """End a request in whatever phase it is."""
        del context
        add_log_fields(job=request.request_id)
        return agent_pb2.AbortResponse(found=await self._agent.abort(request.request_id))

    async def Release(  # noqa: N802
        self, request: agent_pb2.ReleaseRequest, context: Any
    ) -> agent_pb2.ReleaseResponse:
        """Free the KV of a hand-off that nobody will pull."""
        del context
        if not request.HasField("handoff"):
            raise InvalidArgument.of("handoff", "is missing")
        ticket = wire.ticket(request.handoff)
        add_log_fields(handoff_id=ticket.handoff_id)
        released = await self._agent.release(
            ticket, request.handoff.engine_params, list(request.prompt_token_ids)
        )
        return agent_pb2.ReleaseResponse(released=released)

    async def GetEngine(  # noqa: N802
        self, request: agent_pb2.GetEngineRequest, context: Any
    ) -> agent_pb2.GetEngineResponse:
        """Say what the engine is and how it is doing."""
        del request, context
        load = await self._agent.load()
        return agent_pb2.GetEngineResponse(
            engine=wire.engine_info(self._agent.identity, self._agent.description),
            load=wire.instance_load(load),
        )

    async def GetTokenizer(  # noqa: N802
        self, request: agent_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[agent_pb2.GetTokenizerResponse]:
        """Send a file of the model's tokenizer in pieces."""
        del context
        engine, name = self._agent.engine, "tokenizer.json"
        if request.file == agent_pb2.TOKENIZER_FILE_CONFIG:
            name = "tokenizer_config.json"
            data = await engine.tokenizer_config()
        else:
            data = await engine.tokenizer()
        if data is None:
            raise NoTokenizer(f"{self._agent.identity.instance_id} has no {name}")
        sha256 = hashlib.sha256(data).hexdigest()
        for start in range(0, len(data), _TOKENIZER_CHUNK_BYTES):
            yield agent_pb2.GetTokenizerResponse(
                data=data[start : start + _TOKENIZER_CHUNK_BYTES], sha256=sha256
            )

    async def ResetPrefixCache(  # noqa: N802
        self, request: agent_pb2.ResetPrefixCacheRequest, context: Any
    ) -> agent_pb2.ResetPrefixCacheResponse:
        """Empty the prefix cache."""
        del request, context
        await self._agent.engine.reset_prefix_cache()
        return agent_pb2.ResetPrefixCacheResponse()

    async def Probe(  # noqa: N802
        self, request: agent_pb2.ProbeRequest, context: Any
    ) -> agent_pb2.ProbeResponse:
        """Run one calibration probe; its load counts for no router."""
        Deadline.from_context(context, self._clock).check()
        start = timestamp(self._clock.unix())
        kind = request.WhichOneof("probe")
        try:
            if kind == "prefill":
                response = await self._probe_prefill(request.prefill)
            elif kind == "decode":
                response = await self._probe_decode(request.decode)
            else:
                raise InvalidArgument.of("probe", "is neither prefill nor decode")
        except ExceptionGroup as group:
            raise _first_of(group) from group
        response.start_time.CopyFrom(start)
        return response

    async def _probe_prefill(self, probe: agent_pb2.PrefillProbe) -> agent_pb2.ProbeResponse:
        prompts = list(probe.prompt_tokens)
        if not prompts or not all(prompts):
            raise InvalidArgument.of("prefill.prompt_tokens", "needs lengths of at least 1")
        charge = self._agent.accounting.charge("", ChargePhase.PREFILL, sum(prompts))
        try:
            times = await self._prober.prefill_seconds(prompts, probe.seed, self._agent.description)
        finally:
            charge.free()
        return agent_pb2.ProbeResponse(prefill_times=[duration(t) for t in times])

    async def _probe_decode(self, probe: agent_pb2.DecodeProbe) -> agent_pb2.ProbeResponse:
        for field in ("sequences", "context_tokens", "output_tokens"):
            if getattr(probe, field) < 1:
                raise InvalidArgument.of(f"decode.{field}", "is less than 1")
        if probe.sequences > _MAX_PROBE_SEQUENCES:
            raise InvalidArgument.of(
                "decode.sequences", f"{probe.sequences} exceeds {_MAX_PROBE_SEQUENCES}"
            )
        tokens = probe.sequences * (probe.context_tokens + probe.output_tokens)
        charge = self._agent.accounting.charge("", ChargePhase.DECODE, tokens)
        try:
            steps = await self._prober.decode_steps(
                sequences=probe.sequences,
                context_tokens=probe.context_tokens,
                output_tokens=probe.output_tokens,
                seed=probe.seed,
                description=self._agent.description,
            )
        finally:
            charge.free()
        return agent_pb2.ProbeResponse(steps=[_observation(step) for step in steps])


def _observation(step: StepSeen) -> agent_pb2.StepObservation:
    return agent_pb2.StepObservation(
        duration=duration(step.duration_seconds),
        sequences=step.sequences,
        kv_tokens=step.kv_tokens,
        unsteady=step.unsteady,
    )


def _first_of(group: ExceptionGroup[Exception]) -> Exception:
    """Pick the error that says most to the caller out of many streams' errors."""
    for error in group.exceptions:
        if isinstance(error, SteelyardError):
            return error
    return EngineUnavailable(f"the probe failed: {group.exceptions[0]!r}")
