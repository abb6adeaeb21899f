"""What every engine owes its agent: one suite, on emulated engines and on real vLLM with NIXL."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from dataplane.agent.byte_tokenizer import byte_tokenizer
from dataplane.agent.emulated_factory import emulated_options
from dataplane.agent.engine import (
    Chunk,
    DecodeJob,
    Engine,
    Finish,
    PrefillJob,
    PrefillResult,
    Sampling,
)
from dataplane.agent.engine_emulated import EngineEmulated
from dataplane.agent.engine_vllm import EngineVllm
from dataplane.agent.http_client import HttpClient
from dataplane.agent.settings import AgentSettings
from dataplane.agent.vllm_describe import Fallbacks
from dataplane.agent.vllm_http import VllmHttp
from servicekit.clock import SystemClock
from servicekit.errors import InvalidArgument
from tests.real_vllm.engine_cluster import engine_cluster, make_tiny_model, servers_spec

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
SETTLE_SECONDS = 20.0

pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Trio:
    """A pair and an engine of its own, all of one model."""

    prefill: Engine
    decode: Engine
    solo: Engine


def emulated_engine(**settings: object) -> EngineEmulated:
    """An emulated engine, twenty times faster than an A40."""
    options = emulated_options(AgentSettings(time_scale=20, **settings))
    return EngineEmulated(options, SystemClock(), byte_tokenizer())


async def emulated_trio(stack: AsyncExitStack) -> Trio:
    """Three emulated engines."""
    engines = [emulated_engine() for _ in range(3)]
    for engine in engines:
        stack.push_async_callback(engine.close)
        await engine.start()
    return Trio(*engines)


async def real_trio(stack: AsyncExitStack, directory: Path) -> Trio:
    """Three vLLM servers from one warm image."""
    model = make_tiny_model(directory / "model", "--seed", "0")
    servers = servers_spec(directory, prefills=1, decodes=1)
    for server in servers[:2]:
        server["kv_transfer"] = {"kv_connector_extra_config": {"kv_lease_duration": 6}}
    cluster = await asyncio.to_thread(stack.enter_context, engine_cluster(model, servers))
    engines = []
    for name in ("p0", "d0", "solo"):
        engine = EngineVllm(
            VllmHttp(HttpClient(f"http://127.0.0.1:{cluster.ports[name]}")),
            SystemClock(),
            fallbacks=Fallbacks(
                dtype="auto",
                max_num_seqs=256,
                max_batched_tokens=2048,
                lease_seconds=30.0,
                profile="",
            ),
            metrics_interval_seconds=0.05,
        )
        stack.push_async_callback(engine.close)
        await engine.start()
        engines.append(engine)
    return Trio(*engines)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["emulated", pytest.param("vllm", marks=pytest.mark.real_vllm)],
)
async def trio(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Trio]:
    """The engines under test."""
    async with AsyncExitStack() as stack:
        if request.param == "emulated":
            yield await emulated_trio(stack)
        else:
            yield await real_trio(stack, tmp_path_factory.mktemp("engines"))


@pytest.fixture
def prompt() -> list[int]:
    """300 random tokens that no test has used before."""
    rng = random.Random()
    return [rng.randrange(6, 250) for _ in range(300)]


def job(prompt: list[int], max_tokens: int = 16, **more: object) -> DecodeJob:
    """A greedy generation with an id of its own."""
    return DecodeJob(
        request_id=f"r-{random.getrandbits(64):x}",
        prompt=prompt,
        max_tokens=max_tokens,
        **{"sampling": GREEDY, **more},
    )


async def run(engine: Engine, a_job: DecodeJob) -> tuple[list[int], list[Chunk]]:
    """Read one generation to its end."""
    stream = await engine.decode(a_job)
    chunks = []
    try:
        while not chunks or chunks[-1].finish is None:
            chunks.append(await stream.read())
    finally:
        await stream.close()
    return [token for chunk in chunks for token in chunk.token_ids], chunks


async def until(condition: Callable[[object], bool], engine: Engine) -> None:
    """Wait until a measurement of the engine satisfies a condition; it offers nothing to await."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while not condition(await engine.measure()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_empty(*engines: Engine) -> None:
    """Wait until nothing runs, waits or is held."""
    for engine in engines:
        await until(
            lambda m: m.healthy and (m.running, m.waiting, m.kv_used_tokens) == (0, 0, 0), engine
        )


async def test_a_handed_off_generation_equals_the_solo_engines(trio, prompt):
    """Prefill here, decode there: token for token what one engine says, and nothing stays."""
    held = await trio.prefill.prefill(PrefillJob(request_id="pair", prompt=prompt))
    tokens, chunks = await run(trio.decode, job(prompt, engine_params=held.engine_params))
    alone, _ = await run(trio.solo, job(prompt))

    assert tokens == alone
    assert len(tokens) == 16
    assert chunks[-1].finish is Finish.LENGTH
    assert chunks[-1].usage.prompt_tokens == 300
    assert chunks[-1].usage.completion_tokens == 16
    assert held.prompt_tokens == 300
    assert held.first_token_id in (None, alone[0])
    await until_empty(trio.prefill, trio.decode, trio.solo)


async def test_many_generations_at_once_all_equal_the_solo_engines(trio):
    """Batching and hand-offs side by side change no token."""
    rng = random.Random(5)
    prompts = [[rng.randrange(6, 250) for _ in range(rng.choice([2, 33, 257]))] for _ in range(12)]

    async def pair(prompt):
        name = f"many-{random.getrandbits(64):x}"
        held = await trio.prefill.prefill(PrefillJob(request_id=name, prompt=prompt))
        return (await run(trio.decode, job(prompt, engine_params=held.engine_params)))[0]

    together = await asyncio.gather(*(pair(prompt) for prompt in prompts))
    alone = [(await run(trio.solo, job(prompt)))[0] for prompt in prompts]

    assert together == alone
    await until_empty(trio.prefill, trio.decode)


async def test_closing_a_stream_frees_the_engine(trio, prompt):
    """A generation whose reader has left takes no seat and no KV."""
    stream = await trio.solo.decode(job(prompt, max_tokens=1500))
    await stream.read()
    await until(lambda m: m.running == 1, trio.solo)

    await stream.close()
    await stream.close()

    await until_empty(trio.solo)


async def test_a_read_under_way_ends_when_the_stream_is_closed(trio, prompt):
    """Whoever waits for tokens is told that there will be none."""
    stream = await trio.solo.decode(job(prompt, max_tokens=1500))
    chunk = await stream.read()

    async def drain():
        last = chunk
        while last.finish is None:
            last = await stream.read()
        return last

    reading = asyncio.create_task(drain())
    await asyncio.sleep(0)
    await stream.close()

    assert (await reading).finish is Finish.ABORT
    await until_empty(trio.solo)


async def test_cancelling_a_prefill_leaves_nothing(trio):
    """A prefill that nobody waits for is neither computed on nor held."""
    prompts = [[random.randrange(6, 250) for _ in range(1800)] for _ in range(8)]
    tasks = [
        asyncio.create_task(trio.prefill.prefill(PrefillJob(request_id=f"gone-{n}", prompt=prompt)))
        for n, prompt in enumerate(prompts)
    ]
    await tasks[0]
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    finished = [result for result in results if isinstance(result, PrefillResult)]
    assert len(finished) < len(tasks)

    for held in finished:
        await trio.decode.release(held.engine_params, [])

    await until_empty(trio.prefill)


async def test_a_release_frees_the_prefill_engine(trio, prompt):
    """Through the decode engine, a hand-off that nobody pulls is freed before its lease ends."""
    held = await trio.prefill.prefill(PrefillJob(request_id="unwanted", prompt=prompt))
    await until(lambda m: m.kv_used_tokens >= 300, trio.prefill)

    assert await trio.decode.release(held.engine_params, prompt)

    await until_empty(trio.prefill, trio.decode)


async def test_a_generation_ends_at_a_stop_token(trio, prompt):
    """The stop token is the last token, and named."""
    whole, _ = await run(trio.solo, job(prompt, max_tokens=30))
    stop = whole[12]
    sampling = Sampling(temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))

    tokens, chunks = await run(trio.solo, job(prompt, max_tokens=30, sampling=sampling))

    assert tokens == whole[: whole.index(stop) + 1]
    assert chunks[-1].finish is Finish.STOP
    assert chunks[-1].stop_reason == str(stop)


async def test_a_generation_ends_at_a_stop_string(trio):
    """Text stops before the stop string; the tokens that made it are there."""
    rng = random.Random(3)
    for _ in range(50):
        prompt = [rng.randrange(6, 250) for _ in range(20)]
        whole, chunks = await run(trio.solo, job(prompt, max_tokens=40, want_text=True))
        text = "".join(chunk.text for chunk in chunks)
        stop = text[10:12]
        if stop.isascii() and stop.isprintable() and len(stop) == 2:
            break
    sampling = Sampling(temperature=0.0, ignore_eos=True, stop=(stop,))

    tokens, chunks = await run(
        trio.solo, job(prompt, max_tokens=40, sampling=sampling, want_text=True)
    )

    assert "".join(chunk.text for chunk in chunks) == text[: text.index(stop)]
    assert tokens == whole[: len(tokens)]
    assert chunks[-1].finish is Finish.STOP
    assert chunks[-1].stop_reason == stop
    await until_empty(trio.solo)


async def test_log_probabilities_come_one_a_token(trio, prompt):
    """Every token has its entry, with the alternatives asked for."""
    sampling = Sampling(temperature=0.0, ignore_eos=True, logprobs=2)

    tokens, chunks = await run(trio.solo, job(prompt, max_tokens=5, sampling=sampling))

    entries = [entry for chunk in chunks for entry in chunk.logprobs]
    assert [entry.token_id for entry in entries] == tokens
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in entries)


@pytest.mark.parametrize(
    "bad",
    [
        {"sampling": Sampling(temperature=-1.0)},
        {"sampling": Sampling(top_p=2.0)},
        {"prompt": [1_000_000]},
        {"prompt": []},
    ],
    ids=["temperature", "top_p", "vocabulary", "empty"],
)
async def test_a_bad_generation_is_an_invalid_argument(trio, bad):
    """The engine's refusal names a field; nothing is left on it."""
    fields = {"request_id": "bad", "prompt": [10, 11], "max_tokens": 4, **bad}

    with pytest.raises(InvalidArgument) as caught:
        await run(trio.solo, DecodeJob(**fields))

    assert caught.value.violations
    await until_empty(trio.solo)


async def test_an_engine_says_what_it_is(trio):
    """A pair shares its pairing key and not its epoch; the sizes are there."""
    prefill, decode = await trio.prefill.describe(), await trio.decode.describe()

    assert prefill.pairing_key == decode.pairing_key
    assert prefill.epoch != decode.epoch
    assert prefill.epoch == (await trio.prefill.measure()).epoch
    for name in (
        "max_model_tokens",
        "vocab_size",
        "block_tokens",
        "kv_total_tokens",
        "max_num_seqs",
    ):
        assert getattr(decode, name) > 0


async def test_an_engine_gives_its_tokenizer(trio):
    """tokenizer.json is the one whose hash is announced."""
    from hashlib import sha256

    data = await trio.solo.tokenizer()

    assert sha256(data).hexdigest() == (await trio.solo.describe()).tokenizer_sha256


async def test_the_prefix_cache_can_be_emptied(trio, prompt):
    """After a reset the same prompt is not found in the cache."""
    await run(trio.solo, job(prompt, max_tokens=1))

    await trio.solo.reset_prefix_cache()
    _, chunks = await run(trio.solo, job(prompt, max_tokens=1))

    assert chunks[-1].usage.cached_prompt_tokens == 0
