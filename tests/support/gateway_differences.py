"""Requests, good and bad, that a gateway and a lone engine are asked alike."""

import random
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "tiny"
HI = {"model": MODEL, "prompt": "hi"}
SAY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BAD: list[tuple[str, Any]] = [
    *(
        (COMPLETIONS, HI | {"temperature": 0} | fields)
        for fields in (
            {"model": "nope"},
            {"prompt": None},
            {"prompt": ""},
            {"prompt": []},
            {"prompt": 5},
            {"prompt": [1, "x"]},
            {"prompt": [-4]},
            {"prompt": [400]},
            {"prompt": [7] * 2047, "max_tokens": 4},
            {"prompt": [7] * 2048},
            {"prompt": [7] * 3000},
            {"max_tokens": 0},
            {"max_tokens": -3},
            {"max_tokens": 1.5},
            {"max_tokens": "x"},
            {"max_tokens": "5"},
            {"max_tokens": 5000},
            {"temperature": 3},
            {"temperature": -1},
            {"temperature": "hot"},
            {"top_p": 0},
            {"top_p": 2},
            {"top_k": -5},
            {"min_p": 2},
            {"presence_penalty": 3},
            {"frequency_penalty": -3},
            {"repetition_penalty": 0},
            {"n": 0},
            {"n": 2, "temperature": 0},
            {"logprobs": 30},
            {"logprobs": -2},
            {"stop": ""},
            {"stop": ["a", "b", "c", "d", "e"]},
            {"stop": 5},
            {"stop_token_ids": [999]},
            {"stream_options": {"include_usage": True}},
            {"min_tokens": 5, "max_tokens": 3},
            {"suffix": "x"},
            {"truncate_prompt_tokens": 1, "max_tokens": 1, "temperature": 0},
            {"response_format": {"type": "nope"}},
            {"structured_outputs": {"regex": "[ab]+"}, "max_tokens": 4, "temperature": 0},
            {"response_format": {"type": "json_object"}, "max_tokens": 4, "temperature": 0},
            {"stream": "perhaps"},
            {"echo": "perhaps"},
            {"seed": "x"},
        )
    ),
    *(
        (CHAT, SAY | {"temperature": 0} | fields)
        for fields in (
            {"model": "nope"},
            {"messages": None},
            {"messages": []},
            {"messages": "x"},
            {"messages": [{"content": "x"}]},
            {"messages": [{"role": "martian", "content": "x"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
            {"top_logprobs": 2},
            {"logprobs": True, "top_logprobs": 30},
            {"tools": [TOOL]},
            {"tools": [TOOL], "tool_choice": "none"},
            {"tools": [TOOL], "tool_choice": "required"},
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"continue_final_message": True},
            {"continue_final_message": True, "add_generation_prompt": False},
            {"add_generation_prompt": False},
            {"chat_template": "x"},
            {"chat_template_kwargs": {"a": 1}},
            {"reasoning_effort": "low"},
            {"max_completion_tokens": 5},
            {"max_completion_tokens": 0},
            {"max_tokens": 0},
            {"n": 0},
            {"parallel_tool_calls": True},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}},
            {"messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "content": "y", "tool_call_id": "1"},
            ]},
        )
    ),
]  # fmt: skip


def good_requests(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Make requests that an engine answers, with most fields there are in many combinations."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        path = rng.choice([COMPLETIONS, CHAT])
        body: dict[str, Any] = {"model": MODEL, "temperature": 0}
        text = "".join(rng.choice("abc xyzé→ß1 ") for _ in range(rng.randint(1, 60))) + "."
        if path == COMPLETIONS:
            kind = rng.choice(["text", "ids", "texts"])
            body["prompt"] = {
                "text": text,
                "ids": [rng.randrange(6, 262) for _ in range(rng.randint(1, 60))],
                "texts": [text, text[::-1]],
            }[kind]
            body["max_tokens"] = rng.randint(1, 30)
            if rng.random() < 0.3:
                body["logprobs"] = rng.randint(0, 5)
            elif rng.random() < 0.3:
                body["echo"] = True
        else:
            body["messages"] = [{"role": "user", "content": text}]
            if rng.random() < 0.5:
                body["messages"].insert(0, {"role": "system", "content": "be brief"})
            if rng.random() < 0.2:
                parts = [{"type": "text", "text": t} for t in ("one", "two")]
                body["messages"].append({"role": "user", "content": parts})
            field = rng.choice(["max_tokens", "max_completion_tokens"])
            body[field] = rng.randint(1, 30)
            if rng.random() < 0.3:
                body |= {"logprobs": True, "top_logprobs": rng.randint(0, 5)}
        _add_options(rng, body)
        made.append((path, body))
    return made


def _add_options(rng: random.Random, body: dict[str, Any]) -> None:
    """Add fields that any request may have, some of the time."""
    if rng.random() < 0.3:
        body["stop"] = rng.choice(["a", ["e", "b"], "\n", ["~"]])
    if rng.random() < 0.3:
        body["ignore_eos"] = True
    if rng.random() < 0.2:
        body["min_tokens"] = 1
    if rng.random() < 0.2:
        body["stop_token_ids"] = [rng.randrange(6, 262)]
    for field, values in {
        "presence_penalty": [0.5, -1],
        "frequency_penalty": [1.5],
        "repetition_penalty": [1.2],
        "top_p": [0.9, 1],
        "top_k": [0, -1, 5],
        "min_p": [0, 0.1],
        "user": ["u"],
        "logit_bias": [{"70": 5}],
        "something_new": [1],
        "seed": [1, 2],
    }.items():
        if rng.random() < 0.1:
            body[field] = rng.choice(values)
    if rng.random() < 0.5:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
