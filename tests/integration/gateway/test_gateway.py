"""The OpenAI API over emulated engines: shapes, choices, limits, headers, exits."""

import asyncio
import json

import aiohttp
import pytest

from dataplane.router.app import RouterApp
from dataplane.router.settings import RouterSettings
from tests.support.gateway_bodies import CHAT, COMPLETIONS, HI, chat, completion
from tests.support.gateway_cluster import GatewayCluster, gateway_cluster
from tests.support.waiting import eventually


@pytest.mark.asyncio
async def test_a_completion_has_the_engines_text_and_its_usage(cluster):
    """A whole answer: one choice, its text and finish reason, and the decode engine's own counts."""
    status, answer, headers = await cluster.post(COMPLETIONS, completion())

    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert len(choice["text"]) == 5
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 5, 7)
    assert headers["content-type"] == "application/json"


@pytest.mark.asyncio
async def test_a_stream_is_the_whole_answer_in_pieces(cluster):
    """Text, finish reason and ids of a stream are those of the whole answer; [DONE] ends it."""
    _, whole, _ = await cluster.post(COMPLETIONS, completion(return_token_ids=True))
    events = await cluster.stream(COMPLETIONS, completion(return_token_ids=True))

    *chunks, done = events
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"
    ids = [i for c in choices for i in c["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"] == [77, 78]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.asyncio
async def test_usage_comes_last_where_asked_for(cluster):
    """With include_usage one event without choices carries the counts, just before [DONE]."""
    options = {"include_usage": True}
    *chunks, last, done = await cluster.stream(CHAT, chat(stream_options=options))

    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.asyncio
async def test_running_usage_counts_up(cluster):
    """With continuous_usage_stats every event carries the counts so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _, _ = await cluster.stream(COMPLETIONS, completion(stream_options=options))

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.asyncio
async def test_a_chat_stream_begins_with_the_role_and_no_token(cluster):
    """The first event has the role and empty content; exactly one event has a finish reason."""
    *chunks, _ = await cluster.stream(CHAT, chat())

    first = chunks[0]["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert [r for r in reasons if r] == ["length"]
    assert reasons[-1] == "length"
    text = "".join(c["choices"][0]["delta"]["content"] for c in chunks)
    _, whole, _ = await cluster.post(CHAT, chat())
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.asyncio
async def test_chat_is_the_completion_of_its_templates_prompt(cluster):
    """The model's own chat template makes the prompt, special tokens as single ids."""
    _, tokens, _ = await cluster.post("/tokenize", {"messages": HI})
    _, by_ids, _ = await cluster.post(COMPLETIONS, completion(prompt=tokens["tokens"]))
    _, answer, _ = await cluster.post(CHAT, chat())

    assert tokens["tokens"] == [3, 77, 78, 4]
    assert answer["choices"][0]["message"]["content"] == by_ids["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == 4


@pytest.mark.asyncio
async def test_batches_and_choices_come_in_order(cluster):
    """Two prompts with two choices each are four choices; a prompt counts once in usage."""
    body = completion(prompt=["hi", "hello"], n=2, temperature=1.0, seed=7, echo=True)
    status, answer, _ = await cluster.post(COMPLETIONS, body)

    assert status == 200
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"][:2] for c in answer["choices"]] == ["hi", "hi", "he", "he"]
    assert answer["usage"]["prompt_tokens"] == 2 + 5
    assert answer["usage"]["completion_tokens"] == 4 * 5
    events = await cluster.stream(COMPLETIONS, body)
    texts = dict.fromkeys(range(4), "")
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {c["index"]: c["text"] for c in answer["choices"]}


@pytest.mark.asyncio
async def test_a_stop_string_ends_the_text_before_it(cluster):
    """A stop string is not shown, wherever the engine's steps cut it."""
    _, whole, _ = await cluster.post(COMPLETIONS, completion(max_tokens=40))
    text = whole["choices"][0]["text"]
    stop = text[17:20]
    _, stopped, _ = await cluster.post(COMPLETIONS, completion(max_tokens=40, stop=stop))
    events = await cluster.stream(COMPLETIONS, completion(max_tokens=40, stop=[stop]))

    expected = text[: text.index(stop)]
    assert stopped["choices"][0]["text"] == expected
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] == stop
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == expected


@pytest.mark.asyncio
async def test_a_stop_token_is_named_by_its_id(cluster):
    """stop_reason is the id of the stop token that ended it."""
    _, whole, _ = await cluster.post(COMPLETIONS, completion(max_tokens=20, return_token_ids=True))
    ids = whole["choices"][0]["token_ids"]
    _, stopped, _ = await cluster.post(
        COMPLETIONS, completion(max_tokens=20, stop_token_ids=[ids[3]])
    )

    assert stopped["choices"][0]["stop_reason"] == ids[3]
    assert stopped["usage"]["completion_tokens"] == ids.index(ids[3]) + 1


@pytest.mark.asyncio
async def test_logprobs_have_one_entry_a_token_in_both_shapes(cluster):
    """Completions: four lists; chat: content with bytes and as many alternatives as asked for."""
    _, answer, _ = await cluster.post(COMPLETIONS, completion(logprobs=2))
    logprobs = answer["choices"][0]["logprobs"]
    assert {k: len(v) for k, v in logprobs.items()} == {
        "text_offset": 5, "token_logprobs": 5, "tokens": 5, "top_logprobs": 5,
    }  # fmt: skip
    _, answer, _ = await cluster.post(CHAT, chat(logprobs=True, top_logprobs=2))
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(bytes(e["bytes"]).decode() == e["token"] for e in content)
    events = await cluster.stream(CHAT, chat(logprobs=True))
    streamed = [
        entry
        for event in events[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [e["logprob"] for e in streamed] == [e["logprob"] for e in content]
    assert all(e["top_logprobs"] == [] for e in streamed)


@pytest.mark.asyncio
async def test_the_answer_tells_how_it_was_routed_where_asked(cluster):
    """x-steelyard-decision names both instances, the policy and the promise; x-request-id is kept."""
    status, _, headers = await cluster.post(
        COMPLETIONS,
        completion(),
        **{
            "x-steelyard-decision": "1",
            "x-request-id": "mine-1",
            "x-steelyard-policy": "round_robin",
        },
    )
    decision = json.loads(headers["x-steelyard-decision"])
    assert status == 200
    assert decision["prefill"] == "p0"
    assert decision["decode"] in ("d0", "d1")
    assert decision["policy"] == "round_robin"
    assert decision["predicted_ttft_seconds"] > 0
    assert headers["x-request-id"] == "mine-1"
    _, _, headers = await cluster.post(COMPLETIONS, completion())
    assert "x-steelyard-decision" not in headers


@pytest.mark.asyncio
async def test_targets_come_from_headers(redis_url, tmp_path):
    """SLO class and targets, by our names and by llm-d's, reach the journal with id and trace."""
    path = tmp_path / "journal.jsonl"
    async with gateway_cluster(redis_url, journal_path=path) as cluster:
        for names in (
            ("x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"),
            ("x-slo-ttft-ms", "x-slo-tpot-ms"),
        ):
            headers = {
                "x-steelyard-slo-class": "tight",
                names[0]: "123",
                names[1]: "7.5",
                "x-request-id": "mine",
                "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
            }
            assert (await cluster.post(COMPLETIONS, completion(), **headers))[0] == 200
        status, answer, _ = await cluster.post(
            COMPLETIONS, completion(), **{"x-slo-ttft-ms": "soon"}
        )
        assert (status, answer["error"]["param"]) == (400, "x-slo-ttft-ms")
        status, answer, _ = await cluster.post(
            COMPLETIONS, completion(), **{"x-steelyard-slo-class": "golden"}
        )
        assert (status, answer["error"]["param"]) == (400, "slo_class")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if row["type"] == "request"]
    assert len(rows) == 2
    for row in rows:
        assert row["slo_class"] == "tight"
        assert row["ttft_target_seconds"] == pytest.approx(0.123)
        assert row["tpot_target_seconds"] == pytest.approx(0.0075)
        assert row["correlation_id"] == "mine"
        assert row["trace_id"] == "a" * 32
        assert row["request_id"] != "mine"
        assert row["ttft_seconds"] > 0


@pytest.mark.asyncio
async def test_keys_name_tenants_and_strangers_are_turned_away(redis_url):
    """With keys set, a wrong or missing key is 401 and /health stays open."""
    keys = {"acme": ["sk-1", "sk-2"]}
    async with gateway_cluster(redis_url, gateway_api_keys=keys) as cluster:
        for authorization in ("", "Bearer nope", "Basic sk-1"):
            status, answer, _ = await cluster.post(
                COMPLETIONS, completion(), authorization=authorization
            )
            assert (status, answer["error"]["type"]) == (401, "AuthenticationError")
        for key in keys["acme"]:
            status, _, _ = await cluster.post(
                COMPLETIONS, completion(), authorization=f"Bearer {key}"
            )
            assert status == 200
        async with cluster.http.get("/health") as response:
            assert response.status == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_both_legs(redis_url, path, stream):
    """Whether it was streamed to or waited for the whole, nothing of its request is left."""
    async with gateway_cluster(redis_url, agent={"time_scale": 1.0}) as cluster:
        body = (completion if path == COMPLETIONS else chat)(max_tokens=1500, stream=stream)
        request = asyncio.create_task(_hold(cluster, path, body))
        (driver,) = cluster.router.fleet
        await eventually(lambda: any(t.request for t in driver.tickets.values()))
        await eventually(lambda: any(r.agent.accounting.by_router() for r in cluster.agents))
        request.cancel()
        await asyncio.wait([request])
        await cluster.settled()


async def _hold(cluster: GatewayCluster, path, body):
    async with (
        aiohttp.ClientSession(cluster.url) as session,
        session.post(path, json=body) as answer,
    ):
        await answer.read()


@pytest.mark.asyncio
async def test_nothing_there_is_503_with_a_time_to_wait(redis_url):
    """Without a decode instance requests and /health answer 503 and Retry-After."""
    from tests.support.snapshots import publish, roster, snapshot

    async with gateway_cluster(redis_url) as cluster:
        await publish(cluster.redis, snapshot(roster("p0"), sequence=2, version=2))
        await eventually(lambda: cluster.router.fleet.sequence == 2)
        status, answer, headers = await cluster.post(COMPLETIONS, completion(prompt=[1, 2]))
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
        assert int(headers["retry-after"]) >= 1
        async with cluster.http.get("/health") as response:
            assert response.status == 503


@pytest.mark.asyncio
async def test_before_anything_is_known_any_model_is_503(redis_url):
    """A router that has not seen the cluster yet does not say that a model is unknown."""
    settings = RouterSettings.load(redis_url=redis_url, gateway_listen="127.0.0.1:0")
    async with RouterApp(settings) as router, aiohttp.ClientSession() as http:
        url = f"http://{router.gateway.server.address}"
        for body in (completion(), completion(model="other"), {"prompt": "hi"}):
            async with http.post(url + COMPLETIONS, json=body) as response:
                assert response.status == 503
                assert response.headers["retry-after"] == "1"
        async with http.get(url + "/v1/models") as response:
            assert (await response.json())["data"] == []


@pytest.mark.asyncio
async def test_models_health_metrics_and_tokens(cluster):
    """What tools ask first: the model's name and length, counters, tokens and back."""
    async with cluster.http.get("/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 2048)
    async with cluster.http.get("/metrics") as response:
        text = await response.text()
    assert 'steelyard_gateway_requests_total{path="/v1/models",status="200"} 1.0' in text
    _, tokens, _ = await cluster.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert tokens["count"] == 3
    _, back, _ = await cluster.post("/detokenize", {"tokens": tokens["tokens"]})
    assert back == {"prompt": "hé"}
