"""The player that stands for clients: what it counts, and what it does with those that take too long."""

import asyncio

import grpc
import pytest
from steelyard.v1 import router_pb2, router_pb2_grpc, types_pb2

from evaluation.live import LiveOptions, LivePlayer
from servicekit.clock import SystemClock
from simulator.values import Arrival, End

GAP_SECONDS = 0.01


class Slow(router_pb2_grpc.RouterServiceServicer):
    """Answers by tenant: some tokens, tokens without end, or nothing at all."""

    async def Generate(self, request, context):  # noqa: N802
        """Stream."""
        del context
        if request.tenant == "silent":
            await asyncio.Event().wait()
        sent = 0
        while request.tenant == "endless" or sent < 5:
            yield router_pb2.GenerateResponse(token_ids=[7])
            sent += 1
            await asyncio.sleep(GAP_SECONDS)
        yield router_pb2.GenerateResponse(finish_reason=types_pb2.FINISH_REASON_STOP)


def arrival(number: int, tenant: str) -> Arrival:
    """Return a request of a tenant."""
    return Arrival(
        number=number,
        at_seconds=0.0,
        prompt_tokens=3,
        output_tokens=5,
        max_tokens=5,
        slo_class="tight",
        tenant=tenant,
    )


@pytest.mark.asyncio
async def test_what_outlasts_the_drain_is_cut_and_counts_as_far_as_it_came():
    """A text that goes on counts by its token times so far, a request without a token as rejected."""
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(Slow(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    outcomes = {}
    try:
        player = LivePlayer(
            LiveOptions(router=f"127.0.0.1:{port}", drain_seconds=0.5), SystemClock()
        )
        tenants = ("brief", "endless", "silent")
        await player.play(
            [arrival(number, tenant) for number, tenant in enumerate(tenants)],
            lambda outcome: outcomes.setdefault(outcome.arrival.tenant, outcome),
        )
    finally:
        await server.stop(None)

    assert {tenant: outcome.end for tenant, outcome in outcomes.items()} == {
        "brief": End.FINISHED,
        "endless": End.FINISHED,
        "silent": End.REJECTED,
    }
    assert player.cut == 1
    assert outcomes["endless"].tpot_seconds >= GAP_SECONDS
    assert outcomes["silent"].ttft_seconds == float("inf")
