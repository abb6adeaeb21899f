"""Serving on a whole cluster: control plane, agents, emulated engines, router, over gRPC."""

import asyncio
import time

import grpc
import pytest
from steelyard.v1 import router_pb2, types_pb2

from tests.support.requests import ids_request, mixed_requests
from tests.support.scripted_cluster import listen
from tests.support.waiting import eventually
from tests.support.whole_cluster import SoloEngine, WholeCluster

AT_ONCE = 24


pytestmark = pytest.mark.asyncio(loop_scope="session")


def endless(**fields) -> router_pb2.GenerateRequest:
    """Return a request that runs for seconds on the slow cluster."""
    message = ids_request([7] * 50, 3_000, **fields)
    message.sampling.ignore_eos = True
    return message


@pytest.mark.parametrize("policy", ["marginal_cost", "late_binding"])
async def test_tokens_equal_a_solo_engines(cluster, policy):
    """300 mixed requests, 24 at once: every sequence is the solo engine's, and all is freed."""
    messages = mixed_requests(300, seed=1)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(message):
        async with gate:
            message.policy = policy
            return await cluster.generate(message, timeout=60)

    async with SoloEngine() as solo:
        expected = await solo.all_tokens(messages)
    heard = await asyncio.gather(*(one(message) for message in messages))
    await cluster.settled()

    assert [h.error for h in heard if h.error] == []
    assert [h.tokens for h in heard] == expected
    assert all(h.finishes == [len(h.messages) - 1] for h in heard)
    for message, h in zip(messages, heard, strict=True):
        usage = h.messages[-1].usage
        assert usage.prompt_tokens == len(message.token_ids.ids)
        assert usage.completion_tokens == len(h.tokens)


async def test_work_is_spread_over_all_engines(cluster):
    """Both prefill and all four decode instances get their part of many requests."""
    prefill: set[str] = set()
    decode: set[str] = set()
    # An engine whose reports are late, on a busy machine, is passed over for a while.
    for seed in range(2, 7):
        messages = mixed_requests(60, seed=seed, longest=300)
        for message in messages:
            message.want_receipt = True
        heard = await asyncio.gather(*(cluster.generate(m, timeout=60) for m in messages))
        receipts = [h.messages[0].receipt for h in heard]
        prefill |= {r.prefill_instance_id for r in receipts}
        decode |= {r.decode_instance_id for r in receipts}
        if (len(prefill), len(decode)) == (2, 4):
            break

    assert prefill == {"prefill-0", "prefill-1"}
    assert decode == {f"decode-{i}" for i in range(4)}


async def test_tokens_stream_as_they_are_made(slow_cluster):
    """At an engine's pace, tokens come one after another, not all at the end."""
    message = ids_request([5] * 20, 400)
    message.sampling.ignore_eos = True
    heard = await slow_cluster.generate(message, timeout=30)

    assert len(heard.tokens) == 400
    assert len(heard.messages) > 10
    assert len(heard.messages[0].token_ids) < 100
    assert heard.messages[0].request_id
    assert all(not m.request_id for m in heard.messages[1:])


async def test_coalescing_saves_messages_and_never_the_first_token(redis_url):
    """With a long window the first token still comes alone and at once; the rest in bundles."""
    window_seconds = 0.1
    async with WholeCluster(
        redis_url, "1P1D", time_scale=10.0, router={"coalesce_seconds": window_seconds}
    ) as cluster:
        message = ids_request([5] * 20, 100)
        message.sampling.ignore_eos = True
        call = cluster.stub.Generate(message, timeout=30)
        arrivals = [(time.monotonic(), len(chunk.token_ids)) async for chunk in call]
        await cluster.settled()

        assert sum(count for _, count in arrivals) == 100
        assert arrivals[0][1] < 10
        assert len(arrivals) < 25
        assert arrivals[1][0] - arrivals[0][0] > window_seconds / 2


async def test_hanging_up_half_way_frees_everything(slow_cluster):
    """A client that leaves in mid stream, and one in mid prefill, leave nothing behind."""
    call = slow_cluster.stub.Generate(endless())
    stream = aiter(call)
    for _ in range(3):
        await anext(stream)
    call.cancel()
    await slow_cluster.settled()
    early = slow_cluster.stub.Generate(ids_request([9] * 2_000, 8))
    await eventually(lambda: slow_cluster.router.fleet.in_flight)
    early.cancel()


async def test_a_deadline_half_way_frees_everything(slow_cluster):
    """A deadline that passes in mid stream ends the request with DEADLINE_EXCEEDED."""
    heard = await slow_cluster.generate(endless(), timeout=0.6)
    await slow_cluster.settled()

    assert heard.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert heard.tokens


async def test_cancel_by_id(slow_cluster):
    """Cancel ends a stream with CANCELLED and says that it found it; unknown ids are not found."""
    call = slow_cluster.stub.Generate(endless())
    first = await anext(aiter(call))
    found = await slow_cluster.stub.Cancel(router_pb2.CancelRequest(request_id=first.request_id))
    heard = await listen(call)
    unknown = await slow_cluster.stub.Cancel(router_pb2.CancelRequest(request_id="nobody"))

    assert (found.found, unknown.found) == (True, False)
    assert heard.code is grpc.StatusCode.CANCELLED


async def test_text_goes_through_the_models_tokenizer(cluster):
    """Text is counted exactly, generates what its ids generate, and comes back as text."""
    text = "Weigh first, then send: ähnlich 秤."
    as_text = await cluster.generate(
        router_pb2.GenerateRequest(text=text, max_tokens=12, want_text=True)
    )
    long = await cluster.generate(router_pb2.GenerateRequest(text="x" * 3_000, max_tokens=4))
    engine = next(iter(cluster.agents.values())).agent.engine
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str((await engine.tokenizer()).decode())
    ids = tokenizer.encode(text).ids
    as_ids = await cluster.generate(ids_request(ids, 12))

    assert as_text.error is None
    assert as_text.tokens == as_ids.tokens
    assert as_text.messages[-1].usage.prompt_tokens == len(ids) == len(text.encode())
    text_back = "".join(m.text for m in as_text.messages)
    assert text_back == tokenizer.decode(as_text.tokens)
    assert long.messages[-1].usage.prompt_tokens == 3_000


async def test_sampling_reaches_the_engines(cluster):
    """Stop strings, log probabilities and seeds arrive: the answer shows it."""
    request = ids_request([5] * 30, 32, want_text=True)
    request.sampling.ignore_eos = True
    whole = await cluster.generate(request)
    text = "".join(m.text for m in whole.messages)
    stop = text[10:12]
    request.sampling.stop.append(stop)
    request.sampling.logprobs = 2
    stopped = await cluster.generate(request)

    last = stopped.messages[-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_STOP
    assert last.stop_reason == stop
    assert "".join(m.text for m in stopped.messages) == text[: text.index(stop)]
    logprobs = [entry for m in stopped.messages for entry in m.logprobs]
    assert [entry.token_id for entry in logprobs] == stopped.tokens
    assert all(len(entry.top) == 2 for entry in logprobs)


async def test_outcomes_reach_the_control_plane(cluster):
    """Every finished request is a row of the outcomes stream, and teaches the lengths."""

    async def mine() -> list:
        kept = await cluster.redis.xrange("steelyard:outcomes")
        return [fields for _, fields in kept if fields.get(b"tenant") == b"books"]

    message = ids_request([5] * 20, 8, tenant="books")
    await asyncio.gather(*(cluster.generate(message) for _ in range(10)))

    async def all_there() -> bool:
        return len(await mine()) == 10

    await eventually(all_there)
    assert {fields[b"status"] for fields in await mine()} == {b"ok"}


async def test_while_it_runs_operators_see_it(slow_cluster):
    """A running request has a lease on its decode instance's boot and a row that says where."""
    call = slow_cluster.stub.Generate(endless(want_receipt=True))
    first = await anext(aiter(call))
    await eventually(lambda: _keys(slow_cluster, "steelyard:inflight:decode-*"))
    (key,) = await _keys(slow_cluster, "steelyard:inflight:decode-*")
    members = [m.decode() for m in await slow_cluster.redis.zrange(key, 0, -1)]
    row = await slow_cluster.redis.hgetall(f"steelyard:request:{first.request_id}")
    call.cancel()

    at = first.receipt.decode_instance_id
    epoch = slow_cluster.agents[at].agent.description.epoch
    assert key.decode() == f"steelyard:inflight:{at}:{epoch}"
    assert members == [first.request_id]
    assert (row[b"phase"], row[b"at"], row[b"router"]) == (b"decode", at.encode(), b"router-0")


async def _keys(cluster: WholeCluster, pattern: str) -> list[bytes]:
    return await cluster.redis.keys(pattern)
