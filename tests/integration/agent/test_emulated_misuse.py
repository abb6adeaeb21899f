"""Without the agent's guards an emulated engine answers misuse as vLLM does: wrongly, and gladly."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from dataplane.agent.byte_tokenizer import byte_tokenizer
from dataplane.agent.emulated_factory import emulated_options
from dataplane.agent.engine import DecodeJob, PrefillJob, Sampling
from dataplane.agent.engine_emulated import EngineEmulated
from dataplane.agent.errors import EngineFailed, EngineUnavailable
from dataplane.agent.settings import AgentSettings
from servicekit.clock import SystemClock
from servicekit.errors import InvalidArgument
from tests.integration.agent.agents import new_prompt

pytestmark = pytest.mark.asyncio


def engine(**settings: object) -> EngineEmulated:
    """An engine with a short lease."""
    fields = {"time_scale": 50.0, "handoff_lease_seconds": 0.3, **settings}
    options = emulated_options(AgentSettings(**fields))
    return EngineEmulated(options, SystemClock(), byte_tokenizer())


@dataclass
class Cluster:
    """Engines, to be closed at the end of a test."""

    engines: list[EngineEmulated]

    async def start(self, **settings: object) -> EngineEmulated:
        """Start one more."""
        one = engine(**settings)
        await one.start()
        self.engines.append(one)
        return one


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Starts engines and ends them."""
    group = Cluster([])
    yield group
    for one in group.engines:
        await one.close()


async def say(one: EngineEmulated, prompt: list[int], params: bytes | None = None) -> list[int]:
    """Generate 12 tokens."""
    job = DecodeJob(
        request_id=f"{id(prompt)}-{params is None}",
        prompt=prompt,
        max_tokens=12,
        sampling=Sampling(ignore_eos=True),
        engine_params=params,
    )
    stream = await one.decode(job)
    tokens: list[int] = []
    while True:
        chunk = await stream.read()
        tokens += chunk.token_ids
        if chunk.finish is not None:
            return tokens


async def until_freed(one: EngineEmulated) -> None:
    """Wait until no KV is in use."""
    async with asyncio.timeout(10):
        while (await one.measure()).kv_used_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_handoff_used_twice_gives_wrong_tokens(cluster):
    """The first use is right, the second reads what lies in the blocks now."""
    prefill, decode = await cluster.start(), await cluster.start()
    prompt = new_prompt()
    held = await prefill.prefill(PrefillJob(request_id="r", prompt=prompt))
    right = await say(decode, prompt, held.engine_params)
    await until_freed(prefill)

    assert right == await say(decode, prompt)
    assert await say(decode, prompt, held.engine_params) != right


async def test_a_handoff_older_than_its_lease_gives_wrong_tokens(cluster):
    """Once the lease has ended the blocks hold something else."""
    prefill, decode = await cluster.start(), await cluster.start()
    prompt = new_prompt()
    held = await prefill.prefill(PrefillJob(request_id="r", prompt=prompt))
    await until_freed(prefill)

    assert await say(decode, prompt, held.engine_params) != await say(decode, prompt)


async def test_another_block_size_gives_wrong_tokens(cluster):
    """Blocks that are read with another size are not the prompt's."""
    prefill, decode = await cluster.start(), await cluster.start(block_tokens=32)
    prompt = new_prompt()
    held = await prefill.prefill(PrefillJob(request_id="r", prompt=prompt))

    assert await say(decode, prompt, held.engine_params) != await say(decode, prompt)


async def test_another_prompts_handoff_gives_wrong_tokens(cluster):
    """The engine goes on with the KV that it got, not with the prompt that it was told."""
    prefill, decode = await cluster.start(), await cluster.start()
    held = await prefill.prefill(PrefillJob(request_id="r", prompt=new_prompt()))
    prompt = new_prompt()

    assert await say(decode, prompt, held.engine_params) != await say(decode, prompt)


async def test_a_foreign_epoch_gives_wrong_tokens(cluster):
    """Another boot at the same address does not have the blocks, and says nothing about it."""
    prefill, decode = await cluster.start(), await cluster.start()
    prompt = new_prompt()
    held = await prefill.prefill(PrefillJob(request_id="r", prompt=prompt))
    foreign = held.engine_params.replace(held.epoch.encode(), b"0" * len(held.epoch))

    assert await say(decode, prompt, foreign) != await say(decode, prompt)


async def test_a_dead_prefill_engine_is_an_error_and_leaves_nothing(cluster):
    """Nobody answers at the address: the request fails, its seat and KV are free."""
    prefill, decode = await cluster.start(), await cluster.start()
    prompt = new_prompt()
    held = await prefill.prefill(PrefillJob(request_id="r", prompt=prompt))
    await prefill.close()

    with pytest.raises(EngineFailed, match="could not be pulled"):
        await say(decode, prompt, held.engine_params)

    assert (await decode.measure()).waiting == 0
    await until_freed(decode)


async def test_a_queued_handoff_outlives_its_lease(cluster):
    """While a request waits for a seat its engine renews the lease, so its tokens are right."""
    prefill = await cluster.start(handoff_lease_seconds=0.6)
    decode = await cluster.start(max_num_seqs=1, time_scale=1.0, handoff_lease_seconds=0.6)
    blocker = await decode.decode(
        DecodeJob(
            request_id="blocker",
            prompt=new_prompt(16),
            max_tokens=5000,
            sampling=Sampling(ignore_eos=True),
        )
    )
    await blocker.read()
    prompt = new_prompt()
    held = await prefill.prefill(PrefillJob(request_id="r", prompt=prompt))
    saying = asyncio.create_task(say(decode, prompt, held.engine_params))
    for _ in range(100):
        await blocker.read()

    await blocker.close()

    assert await saying == await say(decode, prompt)


async def test_a_length_that_cannot_be_is_refused_with_a_handoff_too(cluster):
    """The length is checked before anything is pulled, so nobody waits for a text that never comes."""
    prefill, decode = await cluster.start(), await cluster.start()
    prompt = new_prompt()
    held = await prefill.prefill(PrefillJob(request_id="r", prompt=prompt))
    job = DecodeJob(
        request_id="r",
        prompt=prompt,
        max_tokens=12,
        sampling=Sampling(extra_json='{"emulated_output_tokens": 0}'),
        engine_params=held.engine_params,
    )

    with pytest.raises(InvalidArgument):
        await decode.decode(job)

    assert (await decode.measure()).waiting == 0


async def test_an_engine_that_crashes_is_unhealthy_says_why_and_closes(cluster, monkeypatch):
    """A fault of its own is in the log; it takes no requests any more."""
    one = await cluster.start()

    def crash(*_: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(one._driver, "_on_outcome", crash)
    with capture_logs() as logs:
        job = DecodeJob(request_id="r", prompt=new_prompt(), max_tokens=4)
        stream = await one.decode(job)
        async with asyncio.timeout(10):
            while (await one.measure()).healthy:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await stream.close()

    assert [line["event"] for line in logs] == ["emulated_engine_crashed"]
    with pytest.raises(EngineUnavailable):
        await one.decode(job)
