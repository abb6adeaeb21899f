"""Parts of a cluster of real processes die, one after another; serving goes on."""

import asyncio
import signal
import time

import grpc
import pytest
import pytest_asyncio
from steelyard.v1 import agent_pb2, router_pb2, types_pb2

from servicekit.redis_client import REDIS_ERRORS
from tests.support.processes import ProcessCluster, begin
from tests.support.requests import ids_request, mixed_requests
from tests.support.scripted_cluster import listen
from tests.support.waiting import eventually
from tests.support.whole_cluster import SoloEngine

DRAIN_GRACE_SECONDS = 30.0
ROUNDS = 5
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(90)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def processes(tmp_path_factory):
    """Yield a cluster of real processes; each test leaves it as it found it."""
    async with ProcessCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        await cluster.seen_whole()
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(processes):
    """Yield the cluster; afterwards it is whole and idle again."""
    yield processes
    await processes.local.wait_ready(6)
    await processes.seen_whole()
    await processes.settled()


def asked(count: int, seed: int, *, longest: int = 800) -> list[router_pb2.GenerateRequest]:
    """Return mixed requests with receipts, long enough to be caught in the middle."""
    messages = mixed_requests(count, seed, longest=longest)
    for message in messages:
        message.model = "tiny"
        message.want_receipt = True
        message.sampling.ignore_eos = True
        message.max_tokens += 60
    return messages


def long_request(tokens: int = 3_000) -> router_pb2.GenerateRequest:
    """Return a request that runs for seconds."""
    message = ids_request([7] * 30, tokens, model="tiny", want_receipt=True)
    message.sampling.ignore_eos = True
    return message


def decode_of(heard) -> str:
    """Return where a request is decoded; empty before its first message."""
    return heard.messages[0].receipt.decode_instance_id if heard.messages else ""


async def test_a_killed_decode_agent(cluster):
    """Requests without a token finish elsewhere, others break; it goes STALE, GONE, and returns."""
    stub, messages = cluster.stubs[0], asked(40, seed=3)
    async with SoloEngine() as solo:
        expected = await solo.all_tokens(messages)
    old_epoch = await cluster.epoch("decode-0")
    lives: list[str] = []
    watching = asyncio.create_task(cluster.life("decode-0", "GONE", lives))
    heards, ends = begin(stub, messages)
    await eventually(lambda: any(decode_of(heard) == "decode-0" for heard in heards))
    silent = [heard for heard in heards if not heard.messages]
    await cluster.local.processes.kill("decode-0")
    await ends
    await watching
    broken = [heard for heard in heards if heard.error]

    assert broken
    for heard, tokens in zip(heards, expected, strict=True):
        if heard.error is None:
            assert heard.tokens == tokens
            continue
        assert (heard.code, heard.error.reason) == (grpc.StatusCode.UNAVAILABLE, "STREAM_BROKEN")
        assert decode_of(heard) == "decode-0"
        assert heard.tokens
        assert heard.tokens == tokens[: len(heard.tokens)]
    assert any(heard.error is None for heard in silent)
    assert lives == ["READY", "STALE", "GONE"]

    await cluster.local.start_agent("decode-0", "decode")
    await cluster.local.wait_ready(6)
    assert await cluster.epoch("decode-0") not in ("", old_epoch)

    async def used_again() -> bool:
        again, ends = begin(stub, asked(12, seed=4, longest=100))
        await ends
        return "decode-0" in {decode_of(heard) for heard in again}

    # The router hears of it with the next snapshot.
    assert await eventually(used_again, within_seconds=20.0)


async def test_a_killed_prefill_agent_costs_nobody_a_token(cluster):
    """Prompts on a prefill engine that dies are computed on the other one."""
    messages = asked(24, seed=5, longest=1_600)
    async with SoloEngine() as solo:
        expected = await solo.all_tokens(messages)
    old_epoch = await cluster.epoch("prefill-0")
    heards, ends = begin(cluster.stubs[0], messages)
    await eventually(lambda: any(heard.messages for heard in heards))
    await cluster.local.processes.kill("prefill-0")
    await ends
    await _restart_prefill(cluster, old_epoch)

    assert [heard.error for heard in heards if heard.error] == []
    assert [heard.tokens for heard in heards] == expected


async def test_a_killed_prefill_agent_does_not_idle_a_decode_engine(cluster):
    """Round robin decodes on both engines while each second request has to be placed again."""
    old_epoch = await cluster.epoch("prefill-0")
    await cluster.local.processes.kill("prefill-0")
    decoded = []
    for _ in range(12):  # over long before the engine is taken for gone
        message = ids_request([7] * 30, 2, model="tiny", policy="round_robin", want_receipt=True)
        heard = await listen(cluster.stubs[0].Generate(message, timeout=30))
        assert heard.error is None
        decoded.append(decode_of(heard))
    await _restart_prefill(cluster, old_epoch)

    assert set(decoded) == {"decode-0", "decode-1"}


async def _restart_prefill(cluster, old_epoch: str) -> None:
    """Start prefill-0 again, and wait until the control plane knows its new boot."""
    await cluster.local.start_agent("prefill-0", "prefill")

    async def back() -> bool:
        return await cluster.epoch("prefill-0") not in ("", old_epoch)

    await eventually(back, within_seconds=30.0)


async def test_a_hand_off_is_used_once_and_in_its_time(cluster):
    """Agents refuse a hand-off that was used, is over, is another prompt's or another layout's."""
    prefill, decode, odd = [
        await cluster.agent(name) for name in ("prefill-0", "decode-0", "decode-2")
    ]

    async def handoff(request_id: str) -> types_pb2.Handoff:
        answer = await prefill.Prefill(
            agent_pb2.PrefillRequest(request_id=request_id, prompt_token_ids=[1, 2, 3])
        )
        return answer.handoff

    async def refusal(at, request_id: str, held, prompt=(1, 2, 3), **fields) -> str:
        request = agent_pb2.DecodeRequest(
            request_id=request_id, prompt_token_ids=prompt, max_tokens=4, handoff=held, **fields
        )
        heard = await listen(at.Decode(request))
        return "" if heard.error is None else heard.error.reason

    used = await handoff("used")
    outcomes = [
        await refusal(decode, "used", used),
        await refusal(decode, "used-again", used),
    ]
    late = await handoff("late")
    over = types_pb2.Handoff()
    over.CopyFrom(late)
    over.expire_time.GetCurrentTime()
    outcomes += [
        await refusal(decode, "late", over),
        await refusal(decode, "other", late, prompt=(1, 2, 4)),
        await refusal(odd, "odd", late),
    ]
    released = await prefill.Release(agent_pb2.ReleaseRequest(handoff=late))

    assert outcomes == [
        "",
        "HANDOFF_CONSUMED",
        "HANDOFF_EXPIRED",
        "HANDOFF_PROMPT_MISMATCH",
        "PAIR_MISMATCH",
    ]
    assert released.released


@pytest.mark.parametrize("policy", ["round_robin", "marginal_cost"])
async def test_engines_that_differ_are_never_paired(cluster, policy):
    """A decode engine of another block size or model gets nothing, and Explain says why."""
    messages = asked(16, seed=6, longest=60)
    for message in messages:
        message.policy = policy
    used: set[str] = set()
    # On a busy machine an engine's reports may be late, and then it is passed over for a while.
    for _ in range(ROUNDS):
        heards, ends = begin(cluster.stubs[0], messages)
        await ends
        assert [heard.error for heard in heards if heard.error] == []
        used |= {decode_of(heard) for heard in heards}
        if len(used) > 1:
            break
    await cluster.seen_whole()
    explained = await cluster.stubs[0].Explain(
        router_pb2.ExplainRequest(request=ids_request([5], 4, model="tiny"))
    )
    alone = await listen(cluster.stubs[0].Generate(ids_request([5], 4, model="other")))
    excluded = {c.instance_id: c.excluded for c in explained.decode if c.excluded}

    assert used == {"decode-0", "decode-1"}
    assert set(excluded) == {"decode-2"}
    assert "layout" in excluded["decode-2"]
    assert alone.error.reason == "NO_PREFILL_INSTANCE"


async def test_without_redis_serving_goes_on(cluster):
    """Redis dies and returns: nobody notices, and leases are right soon after."""
    stub, redis_server = cluster.stubs[0], cluster.local.redis
    call = stub.Generate(long_request())
    first = await anext(aiter(call))
    redis_server.kill()
    messages = asked(12, seed=7, longest=200)
    async with SoloEngine() as solo:
        expected = await solo.all_tokens(messages)
    tokens = []
    for message in messages:
        heard = await listen(stub.Generate(message, timeout=30))
        assert heard.error is None
        tokens.append(heard.tokens)
    blind = await _until_blind(stub)
    redis_server.start()

    async def written() -> bool:
        try:
            return set().union(*(await cluster.leases()).values()) == {first.request_id}
        except REDIS_ERRORS:
            return False

    await eventually(written, within_seconds=20)
    seen = await eventually(lambda: _sees_again(stub), within_seconds=20)
    call.cancel()

    assert tokens == expected
    assert blind
    assert seen


async def _until_blind(stub) -> bool:
    async def blind() -> bool:
        request = router_pb2.RouteRequest(request=ids_request([5], 4, model="tiny"))
        return (await stub.Route(request)).receipt.blind

    return await eventually(blind)


async def _sees_again(stub) -> bool:
    request = router_pb2.RouteRequest(request=ids_request([5], 4, model="tiny"))
    return not (await stub.Route(request)).receipt.blind


async def test_without_a_control_plane_serving_goes_on(cluster):
    """The control plane dies and returns: requests are served all the while."""
    stub = cluster.stubs[0]
    await cluster.local.processes.kill("control-0")
    assert await _until_blind(stub)
    heards, ends = begin(stub, asked(12, seed=8, longest=200))
    await ends
    await cluster.local.start_control(0)
    await cluster.local.wait_ready(6)
    await eventually(lambda: _sees_again(stub), within_seconds=20)

    assert [heard.error for heard in heards if heard.error] == []


async def test_routers_see_each_others_load(cluster):
    """What one router has in flight is in the columns that the other decides on."""
    calls, used = [], set()
    # Six at once spread over both engines, unless one's reports are late for a while.
    while len(calls) < 6 or (len(used) < 2 and len(calls) < 6 * ROUNDS):
        calls.append(cluster.stubs[0].Generate(long_request()))
        used.add((await anext(aiter(calls[-1]))).receipt.decode_instance_id)

    async def reported() -> bool:
        return await cluster.loads("router-0", "decode_requests") == len(calls)

    await eventually(reported)

    async def load_seen_by_the_other() -> float:
        explained = await cluster.stubs[1].Explain(
            router_pb2.ExplainRequest(
                request=ids_request([5], 4, model="tiny", policy="least_loaded")
            )
        )
        return sum(candidate.total for candidate in explained.decode)

    async def seen() -> bool:
        return await load_seen_by_the_other() >= len(calls)

    await eventually(seen)
    assert await cluster.loads("router-1", "decode_requests") == 0
    for call in calls:
        call.cancel()
    assert used == {"decode-0", "decode-1"}


async def test_a_router_that_is_told_to_stop_finishes_what_it_has(cluster):
    """After SIGTERM a stream runs to its end, new requests are refused, and the process is gone."""
    stub, processes = cluster.stubs[1], cluster.local.processes
    message = long_request(600)
    message.policy = "late_binding"
    async with SoloEngine() as solo:
        expected = await solo.tokens(message)
    heards, ends = begin(stub, [message])
    await eventually(lambda: heards[0].messages)
    child = processes["router-1"]
    processes.signal("router-1", signal.SIGTERM)
    told_at = time.monotonic()

    async def refused() -> bool:
        try:
            await stub.Route(router_pb2.RouteRequest(request=ids_request([5], 4, model="tiny")))
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
        return False

    await eventually(refused)
    await ends
    code = await asyncio.wait_for(child.process.wait(), 40)
    stopped_after_seconds = time.monotonic() - told_at
    await processes.end("router-1")
    await cluster.local.start_router(1)
    await eventually(lambda: _answers(stub), within_seconds=20)

    assert heards[0].error is None
    assert heards[0].tokens == expected
    assert code == 0
    assert stopped_after_seconds < DRAIN_GRACE_SECONDS


async def _answers(stub) -> bool:
    try:
        return await _sees_again(stub)
    except grpc.aio.AioRpcError:
        return False
