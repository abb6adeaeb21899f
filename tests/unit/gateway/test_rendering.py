"""Events and answers: the fast way to write an event is the slow one's equal."""

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from steelyard.v1 import agent_pb2, router_pb2, types_pb2

from dataplane.gateway.chat import ChatRenderer
from dataplane.gateway.completions import CompletionRenderer
from dataplane.gateway.logprobs import chat_logprobs, completion_logprobs
from dataplane.gateway.rendering import Shape, stop_reason
from dataplane.gateway.running import Job, Progress, UsageTotals

RECORD = SimpleNamespace(completion_tokens=1, cached_prompt_tokens=0)
SERVED = SimpleNamespace(
    request_id="r", record=RECORD, taken=SimpleNamespace(request=SimpleNamespace(prompt_tokens=2))
)


def shape(**changes) -> Shape:
    """A plain shape."""
    values = {
        "model": 'm"\\',
        "created": 7,
        "choices": 1,
        "logprobs": None,
        "return_token_ids": False,
        "include_usage": False,
        "running_usage": False,
    }
    return Shape(**values | changes)


def progress(text="", index=0, **fields) -> Progress:
    """One response of a job."""
    job = Job(index, 0, router_pb2.GenerateRequest())
    return Progress(job, SERVED, agent_pb2.DecodeResponse(text=text, token_ids=[5], **fields))


def event_of(data: bytes):
    """The object of one event."""
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert b"\n" not in data[:-2]
    return msgspec.json.decode(data[6:-2])


@given(st.text(), st.integers(0, 300))
def test_a_completion_event_is_one_line_of_json_with_the_text(text, index):
    """Whatever the text, the fast event has the same fields and values as the full one."""
    renderer = CompletionRenderer(shape(choices=301), [[1, 2]], [])
    renderer.begin("x")
    one = progress(text, index)

    assert event_of(renderer.event(one)) == renderer._full_event(one)


@given(st.text(), st.integers(0, 300))
def test_a_chat_event_is_one_line_of_json_with_the_text(text, index):
    """Likewise, once the role is out."""
    renderer = ChatRenderer(shape(choices=301), [1, 2], "assistant")
    renderer.begin("x")
    one = progress(text, index)
    renderer.event(one)

    assert event_of(renderer.event(one)) == renderer._full_event(one)


def test_the_role_comes_once_a_choice_and_without_a_token():
    """Each choice's first event has its role before it."""
    renderer = ChatRenderer(shape(choices=2), [1], "assistant")
    renderer.begin("x")
    data = b"".join(renderer.event(progress("t", index)) for index in (0, 1, 0, 1))

    events = [msgspec.json.decode(e[6:]) for e in data.split(b"\n\n")[:-1]]
    deltas = [(e["choices"][0]["index"], e["choices"][0]["delta"]) for e in events]
    role = {"role": "assistant", "content": ""}
    assert deltas[:4] == [(0, role), (0, {"content": "t"}), (1, role), (1, {"content": "t"})]
    assert len(deltas) == 6


def test_usage_counts_a_prompt_once_and_every_choices_tokens():
    """Of two prompts with two choices each: two prompts, four completions."""
    usage = UsageTotals()
    for index in range(4):
        job = Job(index, index // 2, router_pb2.GenerateRequest())
        counts = types_pb2.Usage(prompt_tokens=10, completion_tokens=3, cached_prompt_tokens=4)
        usage = usage.with_job(job, 2, counts, 0)

    assert usage.row() == {
        "prompt_tokens": 20,
        "total_tokens": 32,
        "completion_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


@pytest.mark.parametrize(("reason", "expected"), [("", None), ("7", 7), ("x", "x"), ("12", "12")])
def test_stop_reasons_keep_their_kind(reason, expected):
    """A token's id is a number, a string is a string, even one of digits that was asked for."""
    sampling = types_pb2.SamplingParams(stop=["12"], stop_token_ids=[7])
    job = Job(0, 0, router_pb2.GenerateRequest(sampling=sampling))

    assert stop_reason(job, reason) == expected


def entry(token, logprob, *top) -> types_pb2.TokenLogprob:
    """One token and its alternatives."""
    alternatives = [types_pb2.TokenAlternative(token=t, logprob=p) for t, p in top]
    return types_pb2.TokenLogprob(token_id=1, token=token, logprob=logprob, top=alternatives)


def test_logprobs_list_the_chosen_token_first_and_count_offsets_in_text():
    """The chosen one comes first whatever its rank; offsets are characters of the choice's text."""
    entries = [
        entry("b", -2.0, ("a", -1.0), ("b", -2.0)),
        entry("é", -0.5, ("é", -0.5), ("x", -3.0)),
    ]
    lists, offset = completion_logprobs(entries, 1, 4)
    chat = chat_logprobs(entries, 1)

    assert lists["text_offset"] == [4, 5]
    assert offset == 6
    assert list(lists["top_logprobs"][0]) == ["b", "a"]
    assert chat["content"][1]["bytes"] == list("é".encode())
    assert [top["token"] for top in chat["content"][0]["top_logprobs"]] == ["b"]
