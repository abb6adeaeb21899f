"""Calls to the agents of the instances under measurement; nothing stays on an engine afterwards."""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from steelyard.v1 import agent_pb2, agent_pb2_grpc, types_pb2

from calibrator.cluster import Target
from calibrator.design import DecodePoint
from calibrator.errors import ProbeFailed
from calibrator.observations import StepSeen
from servicekit.channel import open_channel
from servicekit.clock import Clock
from servicekit.status import from_rpc_error

CALLER = "calibrator"
_FIRST_ID = 10
"""Ids below it are special in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that a prefill engine holds."""

    request_id: str
    handoff: types_pb2.Handoff
    prompt_tokens: int
    cached_prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Generated:
    """What a decode engine said."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float


def random_prompt(tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Return a prompt that no prefix cache knows."""
    rng = Random(seed)
    return [rng.randint(_FIRST_ID, max(vocab_size - 1, _FIRST_ID)) for _ in range(tokens)]


class AgentClient:
    """One instance under measurement.

    Every method raises `ProbeFailed` when the agent or its engine does not do what it should.
    """

    def __init__(self, target: Target, channel: grpc.aio.Channel, clock: Clock) -> None:
        self.target = target
        self._stub: Any = agent_pb2_grpc.AgentServiceStub(channel)
        self._channel = channel
        self._clock = clock
        self._requests = 0
        self._session = secrets.token_hex(6)
        self.busy = asyncio.Lock()

    async def load(self) -> types_pb2.InstanceLoad:
        """Return how the engine is doing."""
        response = await self._call(self._stub.GetEngine, agent_pb2.GetEngineRequest(), 5.0)
        load: types_pb2.InstanceLoad = response.load
        return load

    async def round_trip_seconds(self) -> float:
        """Return what an idle call takes."""
        begin = self._clock.monotonic()
        await self.load()
        return self._clock.monotonic() - begin

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False where the engine cannot."""
        request = agent_pb2.ResetPrefixCacheRequest()
        try:
            await self._stub.ResetPrefixCache(request, timeout=10.0)
        except grpc.aio.AioRpcError as error:
            if error.code() in (
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.UNIMPLEMENTED,
            ):
                return False
            raise self._failed(error) from error
        return True

    async def probe_prefill(
        self, prompt_tokens: Sequence[int], seed: int, timeout_seconds: float
    ) -> list[float]:
        """Send prompts at once; return the seconds of each."""
        probe = agent_pb2.PrefillProbe(prompt_tokens=prompt_tokens, seed=seed)
        request = agent_pb2.ProbeRequest(prefill=probe)
        response = await self._call(self._stub.Probe, request, timeout_seconds)
        times = [time.ToNanoseconds() / 1e9 for time in response.prefill_times]
        if len(times) != len(prompt_tokens) or min(times) <= 0:
            raise ProbeFailed(self.target.instance_id, f"answered {times} to a prefill probe")
        return times

    async def probe_decode(
        self, point: DecodePoint, seed: int, timeout_seconds: float
    ) -> list[StepSeen]:
        """Run a batch; return its steps."""
        probe = agent_pb2.DecodeProbe(
            sequences=point.sequences,
            context_tokens=point.context_tokens,
            output_tokens=point.output_tokens,
            seed=seed,
        )
        request = agent_pb2.ProbeRequest(decode=probe)
        response = await self._call(self._stub.Probe, request, timeout_seconds)
        return [
            StepSeen(
                seconds=step.duration.ToNanoseconds() / 1e9,
                sequences=step.sequences,
                kv_tokens=step.kv_tokens,
                unsteady=step.unsteady,
            )
            for step in response.steps
        ]

    async def prefill(self, prompt: Sequence[int], timeout_seconds: float = 60.0) -> Prefilled:
        """Prefill and hold a prompt; its hand-off belongs to exactly one `decode` or `release`."""
        request = agent_pb2.PrefillRequest(
            request_id=self._next_id(),
            router_id=CALLER,
            prompt_token_ids=prompt,
            sampling=_greedy(),
            expected_epoch=self.target.epoch,
        )
        response = await self._call(self._stub.Prefill, request, timeout_seconds)
        return Prefilled(
            request_id=request.request_id,
            handoff=response.handoff,
            prompt_tokens=response.prompt_tokens,
            cached_prompt_tokens=response.cached_prompt_tokens,
            seconds=response.engine_time.ToNanoseconds() / 1e9,
        )

    async def decode(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        held: Prefilled | None = None,
        timeout_seconds: float = 60.0,
    ) -> Generated:
        """Generate greedily; with a hand-off, from the KV that it names."""
        request = agent_pb2.DecodeRequest(
            request_id=held.request_id if held else self._next_id(),
            router_id=CALLER,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            sampling=_greedy(),
            expected_epoch=self.target.epoch,
        )
        if held is not None:
            request.handoff.CopyFrom(held.handoff)
        token_ids: list[int] = []
        first_seconds = 0.0
        usage = types_pb2.Usage()
        begin = self._clock.monotonic()
        try:
            async for chunk in self._stub.Decode(request, timeout=timeout_seconds):
                if chunk.token_ids and not token_ids:
                    first_seconds = chunk.first_token_time.ToNanoseconds() / 1e9
                    first_seconds = first_seconds or self._clock.monotonic() - begin
                token_ids += chunk.token_ids
                if chunk.HasField("usage"):
                    usage.CopyFrom(chunk.usage)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        return Generated(
            tuple(token_ids), usage.prompt_tokens, usage.completion_tokens, first_seconds
        )

    async def release(self, held: Prefilled, prompt: Sequence[int]) -> bool:
        """Free a hand-off that nobody will pull; False where this engine cannot."""
        request = agent_pb2.ReleaseRequest(handoff=held.handoff, prompt_token_ids=prompt)
        response = await self._call(self._stub.Release, request, 10.0)
        return bool(response.released)

    async def close(self) -> None:
        """Close the channel; calls under way end, and the agent frees what they had."""
        await self._channel.close()

    def _next_id(self) -> str:
        self._requests += 1
        return f"{CALLER}-{self._session}-{self._requests}"

    async def _call(self, method: Any, request: Any, timeout_seconds: float) -> Any:
        try:
            return await method(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error

    def _failed(self, error: grpc.aio.AioRpcError) -> ProbeFailed:
        """Say what an agent answered."""
        remote = from_rpc_error(error)
        return ProbeFailed(self.target.instance_id, f"{remote.reason}: {remote.message}")


def _greedy() -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(temperature=0.0, ignore_eos=True)


def open_clients(
    targets: Sequence[Target], clock: Clock, stack: AsyncExitStack
) -> dict[str, AgentClient]:
    """Return a client of each target, by instance; the stack closes them.

    Args:
        targets: Whom to call.
        clock: What their agents count by.
        stack: Ends the clients.
    """
    clients: dict[str, AgentClient] = {}
    for target in targets:
        client = AgentClient(target, open_channel(target.address), clock)
        clients[target.instance_id] = client
        stack.push_async_callback(client.close)
    return clients
