"""Decisions over gRPC: Route, reservations, Explain, policies, receipts."""

import grpc
import pytest
from steelyard.v1 import router_pb2

from tests.support.requests import ids_request
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_route_decides_without_dispatch(cluster):
    """Route names a placement with addresses and predictions, and charges nothing."""
    request = router_pb2.RouteRequest(request=ids_request([5] * 100, 50))
    answer = await cluster.stub.Route(request)

    agents = {name: running.server.address for name, running in cluster.agents.items()}
    assert agents[answer.receipt.prefill_instance_id] == answer.prefill_address
    assert agents[answer.receipt.decode_instance_id] == answer.decode_address
    assert answer.receipt.prompt_tokens == 100
    assert answer.receipt.predicted_ttft.ToNanoseconds() > 0
    assert answer.receipt.predicted_tpot.ToNanoseconds() > 0
    assert answer.reservation_id == ""
    assert cluster.left() == {}


async def test_a_reservation_is_charged_until_it_ends(cluster):
    """A reservation holds load in the ledger until it runs out, or until it is cancelled."""
    request = router_pb2.RouteRequest(request=ids_request([5] * 100, 50))
    request.reserve.FromMilliseconds(150)
    (driver,) = cluster.router.fleet
    short = await cluster.stub.Route(request)
    charged = sum(driver.pool.view.own.decode_kv_tokens)
    await eventually(lambda: short.reservation_id not in driver.pool.ledger)
    request.reserve.FromSeconds(60)
    long = await cluster.stub.Route(request)
    cancelled = await cluster.stub.Cancel(router_pb2.CancelRequest(request_id=long.reservation_id))

    assert charged == 100
    assert cancelled.found
    assert cluster.left() == {}


async def test_reservations_push_placements_apart(cluster):
    """What is reserved counts as load for the next decision."""
    request = router_pb2.RouteRequest(request=ids_request([5] * 500, 500))
    request.reserve.FromSeconds(30)

    async def four_take_four() -> bool:
        answers = [await cluster.stub.Route(request) for _ in range(4)]
        for answer in answers:
            await cluster.stub.Cancel(router_pb2.CancelRequest(request_id=answer.reservation_id))
        return len({a.receipt.decode_instance_id for a in answers}) == 4

    # At once, but for an engine whose reports are late for a while on a busy machine.
    assert await eventually(four_take_four)


async def test_explain_prices_every_candidate(cluster):
    """A past and a hypothetical request: each candidate's terms add up, cheapest first."""
    heard = await cluster.generate(ids_request([5] * 40, 8, want_receipt=True))
    past = await cluster.stub.Explain(
        router_pb2.ExplainRequest(request_id=heard.messages[0].request_id)
    )
    supposed = await cluster.stub.Explain(
        router_pb2.ExplainRequest(request=ids_request([5] * 40, 8))
    )

    for answer in (past, supposed):
        assert {c.instance_id for c in answer.prefill} == {"prefill-0", "prefill-1"}
        assert {c.instance_id for c in answer.decode} == {f"decode-{i}" for i in range(4)}
        for side in (answer.prefill, answer.decode):
            totals = [candidate.total for candidate in side]
            assert totals == sorted(totals)
            for candidate in side:
                assert candidate.total == pytest.approx(sum(candidate.terms.values()))
    receipt = heard.messages[0].receipt
    assert past.receipt.request_id == receipt.request_id
    assert past.receipt.prefill_instance_id == receipt.prefill_instance_id
    assert past.receipt.decode_instance_id == receipt.decode_instance_id
    chosen = next(c for c in past.decode if c.instance_id == receipt.decode_instance_id)
    assert chosen.total == past.decode[0].total


async def test_late_binding_says_what_it_would_do_now(slow_cluster):
    """Explain and Route name where it would go; once that is to wait, they say so and for what."""
    cluster = slow_cluster
    asked = ids_request([5] * 40, 8, policy="late_binding")
    explain = router_pb2.ExplainRequest(request=asked)

    async def own_view() -> bool:
        return (await cluster.stub.Explain(explain)).priced_by == "late_binding"

    await eventually(own_view)
    idle = await cluster.stub.Explain(explain)
    routed = await cluster.stub.Route(router_pb2.RouteRequest(request=asked))
    calls = [
        cluster.stub.Generate(ids_request([5] * 4_000, 2, policy="late_binding")) for _ in range(6)
    ]

    async def held() -> bool:
        return bool((await cluster.stub.Explain(explain)).held_back)

    await eventually(held)
    busy = await cluster.stub.Explain(explain)
    placed = await cluster.stub.Route(router_pb2.RouteRequest(request=asked))
    for call in calls:
        call.cancel()

    assert (idle.held_back, routed.held_back) == ("", "")
    assert idle.receipt.prefill_instance_id == routed.receipt.prefill_instance_id == "prefill-0"
    # Of equals each request's own id takes one.
    for receipt in (idle.receipt, routed.receipt):
        assert receipt.decode_instance_id in {"decode-0", "decode-1"}
    assert routed.receipt.policy == "late_binding"
    assert busy.priced_by == "late_binding"
    assert busy.receipt.decode_instance_id == ""
    assert "has work ahead" in busy.held_back
    assert placed.receipt.policy == "least_loaded"
    assert "has work ahead" in placed.held_back
    assert placed.receipt.decode_instance_id != ""


async def test_explain_of_an_unknown_request_is_not_found(cluster):
    """An id that this router has not decided on is NOT_FOUND; nothing given is INVALID_ARGUMENT."""
    codes = []
    for request in (router_pb2.ExplainRequest(request_id="nobody"), router_pb2.ExplainRequest()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stub.Explain(request)
        codes.append(caught.value.code())

    assert codes == [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT]


async def test_the_policy_is_the_messages_then_the_metadatas_then_the_routers(cluster):
    """A policy in the message wins over one in metadata, which wins over the router's own."""
    metadata = (("x-steelyard-policy", "round_robin"),)
    plain = ids_request([5] * 10, 4, want_receipt=True)
    named = ids_request([5] * 10, 4, want_receipt=True, policy="least_loaded")
    heard = [
        await cluster.generate(plain),
        await cluster.generate(plain, metadata=metadata),
        await cluster.generate(named, metadata=metadata),
    ]

    policies = [h.messages[0].receipt.policy for h in heard]
    assert policies == ["late_binding", "round_robin", "least_loaded"]


async def test_a_receipt_comes_with_the_first_message_alone(cluster):
    """Placement, predictions and the snapshot it rests on; only where it is asked for."""
    asked = await cluster.generate(ids_request([5] * 10, 8, want_receipt=True))
    silent = await cluster.generate(ids_request([5] * 10, 8))
    receipt = asked.messages[0].receipt

    assert receipt.request_id == asked.messages[0].request_id
    assert receipt.snapshot_sequence > 0
    assert receipt.prompt_tokens == 10
    assert 1 <= receipt.predicted_tokens <= 8
    assert not receipt.blind
    assert receipt.predicted_ttft.ToNanoseconds() > 0
    assert not any(m.HasField("receipt") for m in asked.messages[1:] + silent.messages)
