"""The OpenAI API before real prefill and decode engines, beside a vLLM server that stands alone.

One differential test sends a few hundred requests, good and bad, to both: statuses, shapes and text agree,
or the difference is listed here with its reason.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from localcluster.cluster import LocalCluster
from localcluster.spec import ClusterSpec, Pools
from tests.support.gateway_differences import BAD, HI, SAY, good_requests
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.real_vllm,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "tiny"

NOT_OURS = frozenset(
    {
        # Names and times of one answer.
        "id",
        "created",
        # vLLM's own version and configuration; OpenAI's API lets it be null.
        "system_fingerprint",
        # Fields of other features of vLLM, always null in answers to what is asked here.
        "routed_experts",
        "ec_transfer_params",
        "metrics",
        "prompt_text",
        # Of a prompt that two engines have computed, the cached part is the prefill engine's.
        "prompt_tokens_details",
        "completion_tokens_details",
    }
)

REFUSED_HERE = {
    # field: why the engine alone takes it and we do not
    "echo with logprobs": "the prompt's log probabilities stay on the prefill engine",
    "prompt_logprobs": "likewise",
    "use_beam_search": "beams cannot move between engines",
}


@dataclass
class Site:
    """A cluster, and where its gateway is."""

    cluster: LocalCluster
    gateway_url: str


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="site")
async def _site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator["Site"]:
    """1 prefill and 2 decode engines behind a router with a gateway, and one that stands alone."""
    spec = ClusterSpec(
        engine="vllm",
        pools=Pools(1, 2),
        solo=True,
        directory=tmp_path_factory.mktemp("gateway"),
        log_level="WARNING",
        agent_settings={"vllm_metrics_seconds": 0.2},
        router_settings={
            "journal_path": str(tmp_path_factory.mktemp("journal") / "journal.jsonl"),
        },
        vllm_flags=("--served-model-name", MODEL, "--max-model-len", "2048"),
    )
    async with LocalCluster(spec) as cluster:
        yield Site(cluster, f"http://{cluster.addresses.gateways[0]}")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="pair")
async def _pair(site) -> AsyncIterator[tuple[aiohttp.ClientSession, aiohttp.ClientSession]]:
    """Sessions of the gateway and of the engine that stands alone."""
    async with (
        aiohttp.ClientSession(site.gateway_url) as ours,
        aiohttp.ClientSession(site.cluster.addresses.solo_url) as alone,
    ):
        yield ours, alone


async def ask(session: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    """Post a body; returns the status, and the object or the list of events that came."""
    async with session.post(path, json=body) as response:
        data = await response.read()
        if response.headers["content-type"].startswith("text/event-stream"):
            events = data.decode().removesuffix("\n\n").split("\n\n")
            payloads = [event.removeprefix("data: ") for event in events]
            return response.status, [p if p == "[DONE]" else json.loads(p) for p in payloads]
        return response.status, json.loads(data)


def whole(answer: Any) -> Any:
    """Put a stream's events together by choice; engines cut them where they like."""
    if not isinstance(answer, list):
        return answer
    assert answer[-1] == "[DONE]"
    chunks = answer[:-1]
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for piece in chunk["choices"]:
            choice = choices.setdefault(
                piece["index"], {"text": "", "finish": [], "stop": None, "role": [], "lps": []}
            )
            delta = piece.get("delta", {})
            choice["text"] += piece.get("text", "") or delta.get("content") or ""
            choice["role"] += [delta["role"]] if "role" in delta else []
            choice["finish"] += [piece["finish_reason"]] if piece["finish_reason"] else []
            choice["stop"] = piece.get("stop_reason") or choice["stop"]
            if piece["logprobs"]:
                lps = piece["logprobs"]
                choice["lps"] += lps.get("content") or list(
                    zip(lps["tokens"], lps["token_logprobs"], lps["text_offset"], strict=True)
                )
    return {
        "object": {chunk["object"] for chunk in chunks},
        "model": {chunk["model"] for chunk in chunks},
        "choices": choices,
        "usage": usage,
        "keys": {key for chunk in chunks for key in chunk} - NOT_OURS,
        "choice_keys": {key for c in chunks for p in c["choices"] for key in p} - NOT_OURS,
    }


def plain(value: Any) -> Any:
    """Take out what is no engine's business, and round log probabilities."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in NOT_OURS}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


def take_tops(answer: Any) -> list[list[Any]]:
    """Take the alternatives out of a chat answer; those without text are left out.

    Alternatives of equal text are one entry here. Parts of characters have none, and only vocabularies of
    bytes have many of those; an engine's own chat lists each.
    """
    entries: list[dict[str, Any]] = []
    choices = answer["choices"]
    for choice in choices.values() if isinstance(choices, dict) else choices:
        logprobs = choice.get("logprobs") or {}
        entries += logprobs.get("content") or [
            e for e in choice.get("lps", []) if isinstance(e, dict)
        ]
    return [[top for top in entry.pop("top_logprobs") if top["token"]] for entry in entries]


async def compare(pair: Any, path: str, body: Any) -> tuple[int, Any]:
    """Send a body to both and hold one answer against the other."""
    (our_status, ours), (their_status, theirs) = await asyncio.gather(
        *(ask(session, path, body) for session in pair)
    )
    assert our_status == their_status, (body, ours, theirs)
    if our_status != 200:
        assert set(ours["error"]) == set(theirs["error"]), (ours, theirs)
        assert ours["error"]["code"] == theirs["error"]["code"]
        return our_status, ours
    mine, alone = plain(whole(ours)), plain(whole(theirs))
    for here, there in zip(take_tops(mine), take_tops(alone), strict=True):
        assert [top for top in here if top in there] == there, (body, here, there)
    assert mine == alone, (body, ours, theirs)
    return our_status, ours


async def test_good_requests_are_answered_as_by_the_engine_alone(pair):
    """Every field that the API fixes is equal, streamed and whole, over a hundred and fifty requests."""
    for path, body in good_requests(150, seed=11):
        status, _ = await compare(pair, path, body)
        assert status == 200, body


async def test_bad_requests_are_refused_as_by_the_engine_alone(pair):
    """Seventy requests at the edge of what is allowed: the same status, the same kind of body."""
    differences = []
    for path, body in BAD:
        try:
            await compare(pair, path, body)
        except AssertionError as error:
            differences.append(f"{path} {str(error)[:700]}")
    assert not differences, "\n".join(differences)


async def test_what_we_refuse_and_an_engine_does_not_is_listed(pair):
    """The list of differences is exact: each is refused by name here and served there."""
    bodies = {
        "echo with logprobs": {"echo": True, "logprobs": 1},
        "prompt_logprobs": {"prompt_logprobs": 1},
        "use_beam_search": {"use_beam_search": True, "n": 2},
    }
    assert bodies.keys() == REFUSED_HERE.keys()
    for name, fields in bodies.items():
        body = HI | {"max_tokens": 1} | fields
        ours, theirs = await asyncio.gather(*(ask(s, COMPLETIONS, body) for s in pair))
        assert (ours[0], theirs[0]) == (400, 200), (ours, theirs)
        assert ours[1]["error"]["param"] == name.partition(" ")[0]


async def test_seeded_choices_are_those_of_the_engine_alone(pair):
    """N continuations of a seeded prompt, sampled: each choice's text is the same."""
    body = HI | {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 12, "return_token_ids": True}
    await compare(pair, COMPLETIONS, body)


async def test_text_is_never_cut_inside_a_character(pair):
    """Every event of a stream is valid text by itself, and their sum is the whole answer's text."""
    ours, _ = pair
    body = HI | {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    _, answer = await ask(ours, COMPLETIONS, body)
    _, events = await ask(ours, COMPLETIONS, body | {"stream": True})
    pieces = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(pieces) == answer["choices"][0]["text"]
    assert len(pieces) > 2  # a busy engine puts many tokens into one event


async def test_tokenize_agrees(pair):
    """Tokens of texts and conversations are the engine's."""
    for body in (
        {"prompt": "héllo → wörld"},
        {"messages": SAY["messages"], "return_token_strs": True},
        {"messages": SAY["messages"], "add_generation_prompt": False},
    ):
        ours, theirs = await asyncio.gather(
            *(ask(session, "/tokenize", {"model": MODEL} | body) for session in pair)
        )
        assert ours == theirs


@pytest_asyncio.fixture(loop_scope="module", name="client")
async def _client(site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{site.gateway_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_openai_package_async(client, pair):
    """Completions and chat, whole and streamed, models: the texts are the engine's alone."""
    _, alone = pair
    _, expected = await ask(alone, CHAT, SAY | {"temperature": 0, "max_tokens": 12})
    text = expected["choices"][0]["message"]["content"]
    arguments: dict[str, Any] = {
        "model": MODEL, "messages": SAY["messages"], "temperature": 0, "max_tokens": 12,
    }  # fmt: skip
    answer = await client.chat.completions.create(**arguments)
    assert answer.choices[0].message.content == text
    assert answer.usage.completion_tokens == 12
    stream = await client.chat.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == answer.usage
    raw = await client.completions.with_raw_response.create(
        model=MODEL, prompt="hi", max_tokens=3, temperature=0,
        extra_headers={"x-request-id": "mine", "x-steelyard-decision": "1"},
    )  # fmt: skip
    assert raw.headers["x-request-id"] == raw.request_id == "mine"
    assert json.loads(raw.headers["x-steelyard-decision"])["decode"].startswith("decode-")
    assert raw.parse().usage.completion_tokens == 3
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_openai_package_sync(site):
    """The synchronous client, in a thread."""

    def work() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{site.gateway_url}/v1", api_key="none") as client:
            whole = client.completions.create(model=MODEL, prompt="hi", max_tokens=5, temperature=0)
            stream = client.completions.create(
                model=MODEL, prompt="hi", max_tokens=5, temperature=0, stream=True
            )
            return whole.choices[0].text, "".join(c.choices[0].text for c in stream if c.choices)

    text, streamed = await asyncio.to_thread(work)
    assert text == streamed


async def test_openai_package_errors_and_timeouts(client, site):
    """Errors become the package's own classes; a timeout and a closed stream leave nothing."""
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="nope", prompt="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt="hi", temperature=9)
    assert caught.value.param == "temperature"
    long: dict[str, Any] = {
        "model": MODEL, "prompt": "hi", "max_tokens": 2000, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    with pytest.raises(openai.APITimeoutError):
        await client.with_options(timeout=0.3).completions.create(**long)
    stream = await client.completions.create(**long, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await nothing_left(site)


async def nothing_left(site: Site) -> None:
    """Wait until the router has nothing in flight and no engine holds any KV."""

    async def left() -> bool:
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{site.gateway_url}/metrics") as response:
                if "steelyard_router_in_flight_requests 0.0" not in await response.text():
                    return False
            for name, port in site.cluster.engines.ports.items():
                if name == "solo":
                    continue
                async with http.get(f"http://127.0.0.1:{port}/metrics") as response:
                    for line in (await response.text()).splitlines():
                        if line.startswith("vllm:kv_cache_usage_perc{") and float(line.split()[-1]):
                            return False
        return True

    assert await eventually(left, within_seconds=40)


async def test_curl_streams(site):
    """`curl -N` shows events as they come, and [DONE]."""
    body = json.dumps(HI | {"max_tokens": 5, "stream": True})
    process = await asyncio.create_subprocess_exec(
        "curl", "-sN", f"{site.gateway_url}{COMPLETIONS}",
        "-H", "content-type: application/json", "-d", body,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert output.endswith(b"data: [DONE]\n\n")
    assert output.count(b"data: ") > 2
