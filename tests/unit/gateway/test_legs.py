"""From a client's body to what each leg's engine is sent: one token for prefill, all limits for decode."""

import json

import pytest
from steelyard.v1 import agent_pb2, types_pb2

from dataplane.agent import wire
from dataplane.agent.vllm_shapes import decode_body, prefill_body
from dataplane.gateway.asking import ApiKeys, asker_of
from dataplane.gateway.bodies import ChatBody, CompletionBody, shaped
from dataplane.gateway.errors import HttpFault
from dataplane.gateway.running import jobs_of
from dataplane.gateway.sampling import choices_of, sampling_params
from dataplane.gateway.values import HttpRequest

NOBODY = HttpRequest(b"POST", b"/", {}, b"", 0.0)


def legs(kind, fields, *, max_tokens=9, logprobs=None):
    """What prefill and decode engines are sent for each choice of a body."""
    body = shaped(fields, kind)
    sampling = sampling_params(body, fields, logprobs)
    jobs = jobs_of(
        asker_of(NOBODY, ApiKeys({})), "m", [[1, 2, 3]], [max_tokens], sampling,
        choices=choices_of(body),
    )  # fmt: skip
    sent = []
    for job in jobs:
        message = job.message
        prefill = agent_pb2.PrefillRequest(
            request_id="r", prompt_token_ids=message.token_ids.ids, sampling=message.sampling
        )
        decode = agent_pb2.DecodeRequest(
            request_id="r",
            prompt_token_ids=message.token_ids.ids,
            max_tokens=message.max_tokens,
            sampling=message.sampling,
            want_text=message.want_text,
        )
        sent.append(
            (
                json.loads(prefill_body(wire.prefill_job(prefill), "m")),
                json.loads(decode_body(wire.decode_job(decode), "m")),
            )
        )
    return sent


# fields of the body, what the decode leg gets of it
TABLE = [
    (CompletionBody, {"max_tokens": 9}, {"max_tokens": 9}),
    (ChatBody, {"max_completion_tokens": 9}, {"max_tokens": 9}),
    (ChatBody, {"max_tokens": 5, "max_completion_tokens": 9}, {"max_tokens": 9}),
    (CompletionBody, {"min_tokens": 4}, {"min_tokens": 4}),
    (ChatBody, {"min_tokens": 4}, {"min_tokens": 4}),
    (CompletionBody, {"stream": False}, {"stream": True}),
    (CompletionBody, {"stream": True}, {"stream": True}),
    (
        CompletionBody,
        {"stream": True, "stream_options": {"include_usage": False}},
        {"stream_options": {"include_usage": True}},
    ),
    (CompletionBody, {"stop": "x"}, {"stop": ["x"]}),
    (CompletionBody, {"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
    (CompletionBody, {"stop_token_ids": [5]}, {"stop_token_ids": [5]}),
    (CompletionBody, {"ignore_eos": True}, {"ignore_eos": True}),
    (CompletionBody, {"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
    (CompletionBody, {"top_k": 0}, {"top_k": -1}),
    (CompletionBody, {"top_k": 7}, {"top_k": 7}),
    (CompletionBody, {"min_p": 0.1}, {"min_p": 0.1}),
    (CompletionBody, {"presence_penalty": -1}, {"presence_penalty": -1.0}),
    (CompletionBody, {"frequency_penalty": 1}, {"frequency_penalty": 1.0}),
    (CompletionBody, {"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    (CompletionBody, {"seed": 3}, {"seed": 3}),
]


@pytest.mark.parametrize(("kind", "fields", "expected"), TABLE)
def test_the_decode_leg_has_what_the_client_asked_for(kind, fields, expected):
    """Limits, stops and sampling arrive at the decode engine."""
    ((_, decode),) = legs(kind, fields)

    assert {name: decode[name] for name in expected} == expected
    assert decode["prompt"] == [1, 2, 3]


@pytest.mark.parametrize(("kind", "fields", "_expected"), TABLE)
def test_the_prefill_leg_is_one_token_whatever_is_asked(kind, fields, _expected):
    """max_tokens is 1, and nothing that could end, delay or stream it gets through."""
    ((prefill, _),) = legs(kind, fields)

    assert prefill["max_tokens"] == 1
    assert prefill["stream"] is False
    kept_out = {"max_completion_tokens", "min_tokens", "stream_options", "n", "stop", "seed"}
    assert not kept_out & prefill.keys()


def test_each_choice_is_a_request_of_its_own():
    """N never reaches an engine; a seed counts up from choice to choice, as vLLM's own n does."""
    sent = legs(CompletionBody, {"n": 3, "seed": 5, "temperature": 1.0})

    assert [decode["seed"] for _, decode in sent] == [5, 6, 7]
    assert all("n" not in body for pair in sent for body in pair)
    assert all("seed" not in decode for _, decode in legs(CompletionBody, {"n": 2}))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "[ab]+"}},
        {"logit_bias": {"5": 1}},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [1, 2]},
        {"skip_special_tokens": False},
        {"include_stop_str_in_output": True},
        {"priority": 3},
        {"cache_salt": "s"},
        {"vllm_xargs": {"a": 1}},
    ],
)
def test_what_engines_understand_goes_to_both_unread(fields):
    """Structured outputs and the like shape the first token as well as the rest."""
    ((prefill, decode),) = legs(CompletionBody, fields)

    for name, value in fields.items():
        assert prefill[name] == value
        assert decode[name] == value


def test_logprobs_are_the_decode_legs():
    """The number of alternatives goes to the decode engine alone."""
    ((prefill, decode),) = legs(ChatBody, {"logprobs": True, "top_logprobs": 4}, logprobs=4)

    assert decode["logprobs"] == 4
    assert "logprobs" not in prefill


@pytest.mark.parametrize(
    "name", ["suffix", "prompt_embeds", "kv_transfer_params", "use_beam_search"]
)
def test_known_fields_that_are_not_supported_are_refused_by_name(name):
    """A value is refused; null and false are as good as nothing."""
    with pytest.raises(HttpFault) as caught:
        shaped({name: "x"}, CompletionBody)
    assert caught.value.param == name
    for nothing in (None, False):
        shaped({name: nothing}, CompletionBody)


def test_unknown_fields_are_ignored_and_lenient_types_read():
    """As vLLM does: what nobody knows is left out, "5" is 5, 5.0 is 5."""
    body = shaped({"nobody_knows": 1, "max_tokens": "5", "seed": 4.0}, CompletionBody)

    assert (body.max_tokens, body.seed) == (5, 4)


def test_targets_of_a_request_are_its_headers():
    """Milliseconds in headers become durations; the new names win over the old."""
    headers = {b"x-llm-d-slo-ttft-ms": b"150", b"x-slo-ttft-ms": b"9", b"x-slo-tpot-ms": b"7.5"}
    asker = asker_of(HttpRequest(b"POST", b"/", headers, b"", 0.0), ApiKeys({}))

    assert asker.slo == types_pb2.SloTargets(ttft={"nanos": 150_000_000}, tpot={"nanos": 7_500_000})


def test_a_request_shows_neither_its_headers_nor_its_body():
    """Keys and prompts are not in what ends up in logs and tracebacks."""
    request = HttpRequest(b"POST", b"/p", {b"authorization": b"Bearer sk-1"}, b"secret", 0.0)

    assert "sk-1" not in repr(request)
    assert "secret" not in repr(request)
