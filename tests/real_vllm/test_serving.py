"""Prompts in, tokens out, through a real prefill/decode vLLM cluster."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable

import aiohttp
import grpc
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from steelyard.v1 import agent_pb2, agent_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2

from localcluster.cluster import LocalCluster
from localcluster.spec import ClusterSpec, Pools
from servicekit.channel import open_channel
from servicekit.redis_client import connect
from servicekit.status import from_rpc_error

pytestmark = [
    pytest.mark.real_vllm,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
]
LOWEST_ID, VOCABULARY = 6, 262
Stub = router_pb2_grpc.RouterServiceStub


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="cluster")
async def _cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """2 prefill and 4 decode engines behind one router, and one engine that stands alone."""
    spec = ClusterSpec(
        engine="vllm",
        pools=Pools(2, 4),
        solo=True,
        directory=tmp_path_factory.mktemp("cluster"),
        log_level="WARNING",
        agent_settings={"vllm_metrics_seconds": 0.2},
    )
    async with LocalCluster(spec) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", name="router")
async def _router(cluster: LocalCluster) -> AsyncIterator[Stub]:
    async with open_channel(cluster.addresses.routers[0]) as channel:
        yield Stub(channel)


def message(ids: list[int], max_tokens: int, **fields: object) -> router_pb2.GenerateRequest:
    """Make a greedy request of exactly `max_tokens`."""
    request = router_pb2.GenerateRequest(max_tokens=max_tokens, **fields)
    request.token_ids.ids.extend(ids)
    request.sampling.temperature = 0.0
    request.sampling.ignore_eos = True
    return request


async def generate(router: Stub, request: router_pb2.GenerateRequest) -> list[int]:
    """Return all tokens of a request."""
    return [token async for response in router.Generate(request) for token in response.token_ids]


async def alone(http: aiohttp.ClientSession, url: str, ids: list[int], count: int) -> list[int]:
    """Return what the engine that stands alone generates."""
    body = {
        "model": "tiny",
        "prompt": ids,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        document = await answer.json()
    return list(document["choices"][0]["token_ids"])


async def series(http: aiohttp.ClientSession, url: str) -> dict[tuple[str, str], float]:
    """Return an engine's metrics by (name, source label)."""
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    return {
        (sample.name, sample.labels.get("source", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def until(holds: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Wait until an (awaited) condition holds."""
    deadline = time.monotonic() + seconds
    while True:
        value = holds()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.1)


def engine_urls(cluster: LocalCluster, role: str) -> list[str]:
    """Return the base URLs of one role's engines."""
    assert cluster.engines is not None
    return [f"http://127.0.0.1:{p}" for n, p in cluster.engines.ports.items() if n.startswith(role)]


async def leftovers(cluster: LocalCluster) -> dict[str, float]:
    """Return everything that is not back to zero: ledger, leases, agents' loads, engines' KV."""
    left: dict[str, float] = {}
    async with aiohttp.ClientSession() as http:
        router = await series(http, f"http://{cluster.addresses.routers_http[0]}")
        for name in ("steelyard_router_in_flight_requests", "steelyard_router_ledger_requests"):
            left[name] = router[name, ""]
        for url in engine_urls(cluster, "prefill") + engine_urls(cluster, "decode"):
            left[url] = (await series(http, url))["vllm:kv_cache_usage_perc", ""]
    for name, address in cluster.addresses.agents.items():
        async with open_channel(address) as channel:
            stub = agent_pb2_grpc.AgentServiceStub(channel)
            load = (await stub.GetEngine(agent_pb2.GetEngineRequest())).load
        for row in load.by_router:
            left[name] = row.prefill_requests + row.decode_requests + row.held_requests
    client = connect(cluster.addresses.redis_url)
    for key in await client.keys("steelyard:inflight:*"):
        left[key.decode()] = await client.zcard(key)
    await client.aclose()
    return {name: value for name, value in left.items() if value}


async def nothing_left(cluster: LocalCluster) -> None:
    """Wait until all accounts are back to zero."""

    async def clean() -> bool:
        return not await leftovers(cluster)

    try:
        await until(clean, "all accounts are zero")
    except AssertionError as error:
        raise AssertionError(f"left: {await leftovers(cluster)}") from error


def mixed_prompts(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Return prompts of 3 to 1,600 tokens, a third of them with one of two shared prefixes."""
    source = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [source.randrange(LOWEST_ID, VOCABULARY) for _ in range(length)]

    prefixes = [tokens(300), tokens(700)]
    prompts = []
    for index in range(count):
        length = round(3 * (1600 / 3) ** source.random())
        prompt = tokens(length)
        if index % 3 == 0:
            prompt = (prefixes[index % 2] + prompt)[:1600]
        prompts.append((prompt, source.randint(8, 64)))
    return prompts


async def test_tokens_through_the_cluster_are_those_of_one_engine(
    cluster: LocalCluster, router: Stub
) -> None:
    """300 mixed requests, 24 at once, give the tokens of one engine, all KV pulled, none recomputed."""
    prompts = mixed_prompts(300, seed=7)
    gate = asyncio.Semaphore(24)
    # On a busy machine a connection idles longer between two requests than a server keeps it.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        before = [await series(http, url) for url in engine_urls(cluster, "decode")]

        async def both(ids: list[int], count: int) -> tuple[list[int], list[int]]:
            async with gate:
                ours = await generate(router, message(ids, count))
                return ours, await alone(http, cluster.addresses.solo_url, ids, count)

        answers = await asyncio.gather(*(both(ids, count) for ids, count in prompts))
        after = [await series(http, url) for url in engine_urls(cluster, "decode")]

    assert [solo for _, solo in answers] == [ours for ours, _ in answers]

    def grown(name: str, source: str = "") -> float:
        key = (name, source)
        return sum(b.get(key, 0.0) - a.get(key, 0.0) for a, b in zip(before, after, strict=True))

    by_source = "vllm:prompt_tokens_by_source_total"
    pulled = grown(by_source, "external_kv_transfer")
    cached = grown(by_source, "local_cache_hit")

    assert grown(by_source, "local_compute") == 0
    assert pulled + cached == sum(len(ids) for ids, _ in prompts)
    assert pulled > 0.5 * (pulled + cached)
    assert grown("vllm:nixl_num_failed_transfers_total") == 0

    await nothing_left(cluster)


async def test_tokens_stream_as_they_come(cluster: LocalCluster, router: Stub) -> None:
    """A response arrives in many messages, the first long before the last, and ends with usage."""
    stamps, last = [], None
    async for response in router.Generate(message([50] * 200, 64, want_receipt=True)):
        stamps.append(time.monotonic())
        last = response

    assert len(stamps) > 8
    assert stamps[0] - stamps[-1] < 0
    assert last is not None
    assert last.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (200, 64)

    await nothing_left(cluster)


async def test_text_is_tokenised_by_the_models_own_tokenizer(
    cluster: LocalCluster, router: Stub
) -> None:
    """Text gives the same tokens as its ids do, and the answer's text comes back."""
    request = router_pb2.GenerateRequest(
        text="Weigh first, then send.", max_tokens=12, want_text=True
    )
    request.sampling.temperature = 0.0
    request.sampling.ignore_eos = True
    responses = [response async for response in router.Generate(request)]
    ours = [token for response in responses for token in response.token_ids]
    body = {
        "model": "tiny", "prompt": "Weigh first, then send.", "max_tokens": 12,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{cluster.addresses.solo_url}/v1/completions", json=body) as answer,
    ):
        choice = (await answer.json())["choices"][0]

    assert choice["token_ids"] == ours
    assert choice["text"] == "".join(response.text for response in responses)


async def test_cancelling_half_way_frees_both_engines(cluster: LocalCluster, router: Stub) -> None:
    """A client that leaves after a few tokens, or during prefill, leaves nothing behind."""
    for wanted in (0, 3):
        call = router.Generate(message(list(range(6, 206)) * 8, 400))
        seen = 0
        while seen < wanted:
            seen += len((await call.read()).token_ids)
        call.cancel()

    await nothing_left(cluster)


async def test_a_deadline_that_passes_half_way_ends_the_request(
    cluster: LocalCluster, router: Stub
) -> None:
    """A deadline in mid generation gives DEADLINE_EXCEEDED, what came before it, and zeros."""
    tokens: list[int] = []

    async def follow() -> None:
        async for response in router.Generate(message([77] * 100, 1800), timeout=0.6):
            tokens.extend(response.token_ids)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await follow()

    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < len(tokens) < 1800

    await nothing_left(cluster)


async def test_a_killed_decode_engine_costs_only_what_it_had_begun(
    cluster: LocalCluster, router: Stub
) -> None:
    """Requests without a token yet finish elsewhere, right; others end UNAVAILABLE with a prefix."""
    assert cluster.engines is not None
    prompts = mixed_prompts(40, seed=11)
    async with aiohttp.ClientSession() as http:
        url = cluster.addresses.solo_url
        truth = await asyncio.gather(*(alone(http, url, ids, 64) for ids, _ in prompts))
    victim_busy = asyncio.Event()

    async def follow(ids: list[int]) -> tuple[list[int], grpc.aio.AioRpcError | None]:
        tokens: list[int] = []
        try:
            async for response in router.Generate(message(ids, 64, want_receipt=True)):
                tokens += response.token_ids
                if response.receipt.decode_instance_id == "decode-2":
                    victim_busy.set()
        except grpc.aio.AioRpcError as error:
            return tokens, error
        return tokens, None

    running = [asyncio.create_task(follow(ids)) for ids, _ in prompts]
    await victim_busy.wait()
    await cluster.engines.command("killed", kill="decode-2")
    ends = await asyncio.gather(*running)

    broken = [(tokens, error) for tokens, error in ends if error is not None]
    for (tokens, error), expected in zip(ends, truth, strict=True):
        assert expected[: len(tokens)] == tokens
        if error is None:
            assert len(expected) == len(tokens)
        else:
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert from_rpc_error(error).reason == "STREAM_BROKEN"
            assert tokens
    assert len(broken) < len(ends)

    await cluster.engines.command("restarted", restart="decode-2")
    await cluster.wait_ready(6, 60.0)

    async def used_again() -> bool:
        request = message([99] * 20, 4, want_receipt=True)
        request.policy = "round_robin"
        async for response in router.Generate(request):
            if response.HasField("receipt"):
                return bool(response.receipt.decode_instance_id == "decode-2")
        return False

    await until(used_again, "decode-2 is used again", 30.0)
    await nothing_left(cluster)
