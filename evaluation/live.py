"""Plays a workload against a real router over gRPC: open loop, timed as its clients see it.

On a cluster at a time scale the player counts engine seconds, as routers do, by its clock. What
the router and the wire cost is real time and reads that much larger or smaller.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from random import Random

import grpc
from steelyard.v1 import router_pb2, router_pb2_grpc

from servicekit.channel import open_channel
from servicekit.clock import Clock
from simulator.values import Arrival, End, Outcome

# Ids that every tokenizer has, away from special tokens; prompts differ from each other.
_LOWEST_ID, _HIGHEST_ID = 10, 250
OnOutcome = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """How a workload is played.

    Attributes:
        router: host:port.
        policy: Placement policy of each request.
        seed: Of the prompts' content.
        fix_length: How a request's true length is kept: "hint" tells the emulated engine and
            nobody else; "max_tokens" asks for exactly that many, which the router sees.
        deadline_seconds: Real seconds a request may take.
        drain_seconds: How long, by the player's clock, requests may go on after the last arrival.
            What still generates then is cut and counts by its token times so far, what still waits
            as rejected.
    """

    router: str
    policy: str = ""
    seed: int = 0
    fix_length: str = "hint"
    deadline_seconds: float = 600.0
    drain_seconds: float = inf


class LivePlayer:
    """Plays arrivals; one channel, one task a request."""

    def __init__(self, options: LiveOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._calls: set[grpc.aio.Call] = set()
        self._cutting = False
        self.cut = 0
        """Requests that were cut while they generated."""

    async def play(self, arrivals: Iterable[Arrival], on_outcome: OnOutcome) -> None:
        """Send every arrival when its time comes and wait for all to end."""
        async with open_channel(self._options.router) as channel, asyncio.TaskGroup() as group:
            await channel.channel_ready()
            stub = router_pb2_grpc.RouterServiceStub(channel)
            start = self._clock.monotonic()
            for arrival in arrivals:
                due = start + arrival.at_seconds
                await self._clock.sleep(due - self._clock.monotonic())
                group.create_task(self._one(stub, arrival, due, on_outcome))
            if self._options.drain_seconds < inf:
                self._clock.call_later(self._options.drain_seconds, self._cut)

    def _cut(self) -> None:
        self._cutting = True
        for call in list(self._calls):
            call.cancel()

    async def _one(
        self,
        stub: router_pb2_grpc.RouterServiceStub,
        arrival: Arrival,
        due: float,
        on_outcome: OnOutcome,
    ) -> None:
        """Run one request; times count from when it was due, not from when it was sent."""
        first_at = last_at = None
        tokens = 0
        end = End.REJECTED
        receipt = router_pb2.Receipt()
        call = stub.Generate(self._message(arrival), timeout=self._options.deadline_seconds)
        self._calls.add(call)
        try:
            async for response in call:
                if response.HasField("receipt"):
                    receipt = response.receipt
                if response.token_ids:
                    last_at = self._clock.monotonic()
                    first_at = first_at or last_at
                    tokens += len(response.token_ids)
            end = End.FINISHED
        except grpc.aio.AioRpcError:
            end = End.REJECTED
        except asyncio.CancelledError:  # grpc.aio's word for a call that was cut, too
            if not self._cutting:
                raise
            if tokens > 1:
                self.cut += 1
                end = End.FINISHED
        finally:
            self._calls.discard(call)
        ttft = first_at - due if first_at else inf
        tpot = inf
        if end is End.FINISHED and first_at is not None and last_at is not None:
            tpot = (last_at - first_at) / max(1, tokens - 1)
        on_outcome(
            Outcome(
                arrival=arrival,
                end=end,
                ttft_seconds=ttft,
                tpot_seconds=tpot,
                ended_at_seconds=arrival.at_seconds + self._clock.monotonic() - due,
                prefill=receipt.prefill_instance_id,
                decode=receipt.decode_instance_id,
                preemptions=0,
                attempts=1,
            )
        )

    def _message(self, arrival: Arrival) -> router_pb2.GenerateRequest:
        options = self._options
        message = router_pb2.GenerateRequest(
            max_tokens=arrival.max_tokens,
            slo_class=arrival.slo_class,
            tenant=arrival.tenant,
            policy=options.policy,
            correlation_id=arrival.request_id,
            want_receipt=True,
        )
        message.token_ids.ids.extend(prompt_ids(arrival, options.seed))
        message.sampling.temperature = 0.0
        if options.fix_length == "hint":
            hint = f'{{"emulated_output_tokens": {arrival.output_tokens}}}'
            message.sampling.extra_json = hint
        else:
            message.max_tokens = arrival.output_tokens
            message.sampling.ignore_eos = True
        return message


def prompt_ids(arrival: Arrival, seed: int) -> list[int]:
    """Return a request's prompt: what its session shares first, then its own."""
    span = _HIGHEST_ID - _LOWEST_ID
    shared = Random(f"{seed}/session/{arrival.session}").randbytes(arrival.prefix_tokens)
    own_tokens = arrival.prompt_tokens - arrival.prefix_tokens
    own = Random(f"{seed}/request/{arrival.number}").randbytes(own_tokens)
    return [_LOWEST_ID + byte % span for byte in shared + own]
