"""Real vLLM at the pace of the engine model: a prefill and a decode engine, and one that stands alone."""

import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from steelyard.v1 import router_pb2, router_pb2_grpc

from enginemodel.model import decode_step_seconds, handoff_seconds, prefill_seconds
from localcluster.cluster import LocalCluster
from localcluster.pace import paced_profile, record_path
from localcluster.pace_records import read_validity
from localcluster.spec import ClusterSpec, Pools
from servicekit.channel import open_channel

pytestmark = [
    pytest.mark.real_vllm,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]
LOWEST_ID, VOCABULARY = 6, 262
DILATION = 3.0
PROMPT_TOKENS = 3000
SLOW_LINK_BYTES_PER_SECOND = 4e8
"""A tenth of the profile's: 3,000 tokens take 0.28 engine seconds, where the real pull takes 10 ms."""


def cluster_spec(directory: Path) -> ClusterSpec:
    """The cluster under test."""
    return ClusterSpec(
        engine="paced",
        pools=Pools(1, 1),
        solo=True,
        directory=directory,
        time_scale=1.0 / DILATION,
        profile_overrides={
            "constants": {"handoff_bytes_per_second": SLOW_LINK_BYTES_PER_SECOND},
        },
        log_level="WARNING",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="cluster")
async def _cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Its pair has spoken before: the first hand-off pays a handshake."""
    async with LocalCluster(cluster_spec(tmp_path_factory.mktemp("paced"))) as cluster:
        await generate(cluster, prompt(40), 4)
        yield cluster


def prompt(tokens: int) -> list[int]:
    """A random prompt."""
    return [random.randrange(LOWEST_ID, VOCABULARY) for _ in range(tokens)]


async def generate(cluster: LocalCluster, ids: list[int], count: int) -> tuple[list[int], float]:
    """Return all tokens of a request through the router, and real seconds to the first."""
    request = router_pb2.GenerateRequest(max_tokens=count)
    request.token_ids.ids.extend(ids)
    request.sampling.temperature = 0.0
    request.sampling.ignore_eos = True
    tokens: list[int] = []
    first_seconds = 0.0
    begun = time.monotonic()
    async with open_channel(cluster.addresses.routers[0]) as channel:
        async for response in router_pb2_grpc.RouterServiceStub(channel).Generate(request):
            if response.token_ids and not tokens:
                first_seconds = time.monotonic() - begun
            tokens += response.token_ids
    return tokens, first_seconds


async def alone(url: str, ids: list[int], count: int) -> list[int]:
    """Return what the engine that stands alone generates."""
    body = {
        "model": "tiny",
        "prompt": ids,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/completions", json=body) as answer,
    ):
        document = await answer.json()
    return list(document["choices"][0]["token_ids"])


def recorded(cluster: LocalCluster, instance_id: str, since_unix: float) -> list[dict[str, Any]]:
    """Return an engine's steps since a time."""
    path = record_path(cluster.spec.directory, instance_id)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["end_unix"] > since_unix]


async def test_steps_take_what_the_model_says_and_all_are_recorded(cluster: LocalCluster):
    """Every token is a step, each is modelled by its own batch, and the mean interval is the model's."""
    constants = paced_profile(cluster.spec).constants
    began = time.time()

    await generate(cluster, prompt(PROMPT_TOKENS), 100)

    chunks = [row["chunks"] for row in recorded(cluster, "prefill-0", began)]
    decodes = recorded(cluster, "decode-0", began)
    assert chunks == [[[2048, 0]], [[PROMPT_TOKENS - 2048, 2048]]]
    assert [row["kv_tokens"] for row in decodes] == [PROMPT_TOKENS + i for i in range(100)]
    for row in decodes:
        modelled = decode_step_seconds(constants, 1, row["kv_tokens"]) * DILATION
        assert row["modelled_seconds"] == pytest.approx(modelled, abs=1e-6)
    verdict = read_validity(cluster.spec.directory, began, time.time())
    assert verdict.engines["decode-0"].real_to_modelled == pytest.approx(1.0, abs=0.04)


async def test_a_hand_off_is_held_back_until_the_modelled_link_has_moved_it(cluster: LocalCluster):
    """The first token waits for prefill, link and a decode step, which add up; NIXL alone is far faster."""
    profile = paced_profile(cluster.spec)
    prefill = prefill_seconds(profile.constants, PROMPT_TOKENS, profile.max_batched_tokens)
    link = handoff_seconds(profile.constants, PROMPT_TOKENS, profile.kv_bytes_per_token)
    step = decode_step_seconds(profile.constants, 1, PROMPT_TOKENS)

    _, first_seconds = await generate(cluster, prompt(PROMPT_TOKENS), 2)

    assert link > prefill
    assert first_seconds >= DILATION * (prefill + link + step)


async def test_tokens_are_those_of_an_engine_that_is_not_paced(cluster: LocalCluster):
    """Pacing and holding back change when tokens come, not which."""
    ids = prompt(700)

    paced, _ = await generate(cluster, ids, 24)

    assert paced == await alone(cluster.addresses.solo_url, ids, 24)
    assert len(paced) == 24
