"""The OpenAI API over emulated engines: what is refused, by which name and with which status."""

import asyncio

import pytest

from tests.support.gateway_bodies import CHAT, COMPLETIONS, chat, completion
from tests.support.gateway_cluster import gateway_cluster

BAD = [
    # endpoint, fields, param, status
    (COMPLETIONS, {"prompt": None}, "prompt", 400),
    (COMPLETIONS, {"prompt": []}, "prompt", 400),
    (COMPLETIONS, {"prompt": 5}, "prompt", 400),
    (COMPLETIONS, {"prompt": [1, "x"]}, "prompt", 400),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", 400),
    (COMPLETIONS, {"prompt": [999]}, "prompt", 400),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", 400),
    (COMPLETIONS, {"prompt": ["a"] * 300}, "prompt", 400),
    (COMPLETIONS, {"prompt": [7] * 2049}, "input_tokens", 400),
    (COMPLETIONS, {"prompt": [7] * 2048}, "max_tokens", 400),
    (COMPLETIONS, {"model": "nope"}, "model", 404),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", 400),
    (COMPLETIONS, {"max_tokens": 1.5}, "max_tokens", 400),
    (COMPLETIONS, {"max_tokens": 5000}, "max_tokens", 400),
    (COMPLETIONS, {"temperature": -1}, "temperature", 400),
    (COMPLETIONS, {"temperature": 2.1}, "temperature", 400),
    (COMPLETIONS, {"temperature": "hot"}, "temperature", 400),
    (COMPLETIONS, {"top_p": 0}, "top_p", 400),
    (COMPLETIONS, {"top_k": -5}, "top_k", 400),
    (COMPLETIONS, {"min_p": 2}, "min_p", 400),
    (COMPLETIONS, {"presence_penalty": 3}, "presence_penalty", 400),
    (COMPLETIONS, {"frequency_penalty": -3}, "frequency_penalty", 400),
    (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty", 400),
    (COMPLETIONS, {"seed": 1 << 70}, "seed", 400),
    (COMPLETIONS, {"stop": ""}, "stop", 400),
    (COMPLETIONS, {"stop": ["a", "b", "c", "d", "e"]}, "stop", 400),
    (COMPLETIONS, {"min_tokens": 6}, "min_tokens", 400),
    (COMPLETIONS, {"n": 0}, "n", 400),
    (COMPLETIONS, {"n": 2}, "n", 400),
    (COMPLETIONS, {"n": 500, "temperature": 1}, "n", 400),
    (COMPLETIONS, {"n": 100, "temperature": 1, "prompt": ["a"] * 50}, "n", 400),
    (COMPLETIONS, {"logprobs": 30}, "logprobs", 400),
    (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo", 400),
    (COMPLETIONS, {"suffix": "x"}, "suffix", 400),
    (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs", 400),
    (COMPLETIONS, {"use_beam_search": True}, "use_beam_search", 400),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", 400),
    (COMPLETIONS, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", 400),
    (COMPLETIONS, {"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", 400),
    (CHAT, {"messages": []}, "messages", 400),
    (CHAT, {"messages": "x"}, "messages", 400),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", 400),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", 400),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0",
        400,
    ),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", 400),
    (CHAT, {"logprobs": True, "top_logprobs": 30}, "logprobs", 400),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", 400),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice", 400),
    (CHAT, {"tool_choice": "required"}, "tool_choice", 400),
    (CHAT, {"chat_template": "x"}, "chat_template", 400),
    (CHAT, {"continue_final_message": True}, "continue_final_message", 400),
]


@pytest.mark.asyncio
async def test_what_is_wrong_is_refused_by_its_name(cluster):
    """Each bad field gets its status and an OpenAI error body that names it."""
    for path, fields, param, expected in BAD:
        body = (completion if path == COMPLETIONS else chat)(**fields)
        status, answer, _ = await cluster.post(path, body)

        error = answer["error"]
        assert (status, error["param"]) == (expected, param), (fields, answer)
        assert error["code"] == expected
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


@pytest.mark.asyncio
async def test_more_tokens_than_fit_are_shortened_as_engines_do(cluster):
    """max_tokens beyond the model's length behind the prompt is cut; chat without it fills up."""
    body = completion(prompt=[7] * 2046, max_tokens=2000)
    _, answer, _ = await cluster.post(COMPLETIONS, body)
    assert answer["usage"]["completion_tokens"] == 2
    _, answer, _ = await cluster.post(
        CHAT, chat(max_tokens=None, messages=[{"role": "user", "content": "x" * 2040}])
    )
    assert answer["usage"]["completion_tokens"] == 2048 - 2042


@pytest.mark.asyncio
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"5", b'"x"', b"\xff", b"[" * 5000])
async def test_a_body_that_is_no_object_is_400(cluster, data):
    """Whatever the bytes, the answer is an OpenAI error."""
    async with cluster.http.post(COMPLETIONS, data=data) as response:
        assert response.status == 400
        assert "error" in await response.json()


@pytest.mark.asyncio
async def test_unknown_paths_and_methods(cluster):
    """404 and 405, in the same shape."""
    async with cluster.http.get("/nothing") as response:
        assert response.status == 404
        assert (await response.json())["error"]["type"] == "NotFoundError"
    async with cluster.http.get(COMPLETIONS) as response:
        assert response.status == 405
    async with cluster.http.head("/v1/models") as response:
        assert response.status == 200
        assert await response.read() == b""


@pytest.mark.asyncio
async def test_a_full_queue_is_429_with_a_time_to_wait(redis_url):
    """Requests that the scheduler holds back fill its queue; the one too many is told to come back."""
    settings = {"late_binding": {"queue_limit": 1}}
    slow = {"time_scale": 0.2, "max_num_seqs": 1}
    async with gateway_cluster(
        redis_url, agent=slow, policy="late_binding", policy_settings=settings
    ) as cluster:
        body = completion(prompt=[9] * 1500, max_tokens=400)
        asked = [asyncio.create_task(cluster.post(COMPLETIONS, body)) for _ in range(12)]
        try:
            status, answer, headers = await next(asyncio.as_completed(asked))
            assert (status, answer["error"]["type"]) == (429, "RateLimitError")
            assert headers["retry-after"] == "1"
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
        await cluster.settled()
