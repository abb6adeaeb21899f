"""JSON and text of a vLLM server: what is sent and what is read of it."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.agent.engine import DecodeJob, Finish, PrefillJob, Sampling
from dataplane.agent.vllm_http import refusal
from dataplane.agent.vllm_metrics import read_metrics
from dataplane.agent.vllm_shapes import (
    ChoiceLogprobs,
    PrefillAnswer,
    decode_body,
    finish_of,
    logprobs_of,
    prefill_body,
    refused_body,
)
from dataplane.agent.vllm_stream import SseReader
from servicekit.errors import InvalidArgument, NotFound, Unavailable

HANDOFF = b'{"remote_engine_id": "e", "a_new_key": [[1, 2]],  "remote_port":5601}'


def test_a_prefill_leg_asks_for_one_token_and_never_streams():
    """Limits and stops of the request stay out of it; a streamed leg would lose the hand-off."""
    sampling = Sampling(temperature=0.7, min_tokens=5, stop=("x",), logprobs=3)
    body = json.loads(prefill_body(PrefillJob(request_id="r", prompt=[1], sampling=sampling), "m"))

    assert body == {
        "model": "m",
        "prompt": [1],
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }


def test_a_decode_leg_carries_what_is_set_and_nothing_else():
    """Parameters that the caller left out are left to the engine."""
    sampling = Sampling(temperature=0.0, top_k=5, seed=7, stop=("a", "b"), stop_token_ids=(3,))
    job = DecodeJob(request_id="r", prompt=[1, 2], max_tokens=9, sampling=sampling)

    body = json.loads(decode_body(job, "m"))

    assert body == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 9,
        "temperature": 0.0,
        "top_k": 5,
        "seed": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def test_a_handoff_travels_as_the_bytes_that_came():
    """Keys that we do not know, and their very spelling, reach the decode engine."""
    answer = msgspec.json.decode(
        b'{"choices": [], "usage": {"prompt_tokens": 3}, "kv_transfer_params": ' + HANDOFF + b"}",
        type=PrefillAnswer,
    )
    params = bytes(answer.kv_transfer_params)
    job = DecodeJob(request_id="r", prompt=[1], max_tokens=1, engine_params=params)

    assert params == HANDOFF
    assert HANDOFF in decode_body(job, "m")
    assert HANDOFF in refused_body(params, "m", 1)


def test_extra_parameters_pass_unless_they_are_the_agents_own():
    """Guided decoding and the like pass through; fields that the agent lives by do not."""
    extra = Sampling(extra_json='{"structured_outputs": {"regex": "a+"}}')
    body = json.loads(
        decode_body(DecodeJob(request_id="r", prompt=[1], max_tokens=1, sampling=extra), "m")
    )
    assert body["structured_outputs"] == {"regex": "a+"}

    for bad in ('{"stream": false}', '{"n": 2}', "[1]", "{"):
        job = DecodeJob(request_id="r", prompt=[1], max_tokens=1, sampling=Sampling(extra_json=bad))
        with pytest.raises(InvalidArgument) as caught:
            decode_body(job, "m")
        assert caught.value.violations[0].field == "sampling.extra_json"


@given(cuts=st.lists(st.integers(0, 60), max_size=8))
def test_events_are_whole_however_the_network_cuts_them(cuts):
    """Payloads come out once, in order, and only when complete."""
    stream = b'data: {"a": 1}\n\ndata: {"b": "x\\n"}\r\n\n: comment\n\ndata: [DONE]\n\n'
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader, got = SseReader(), []
    for index in range(1, len(edges)):
        got += reader.feed(stream[edges[index - 1] : edges[index]])

    assert got == [b'{"a": 1}', b'{"b": "x\\n"}', b"[DONE]"]


def test_log_probabilities_keep_their_order():
    """Alternatives come most probable first; one that is missing counts as impossible."""
    logprobs = ChoiceLogprobs(
        token_logprobs=[-0.5, None], top_logprobs=[{"b": -2.0, "a": -0.5}, None]
    )

    first, second = logprobs_of(logprobs, [10, 11])

    assert (first.token_id, first.logprob) == (10, -0.5)
    assert [top.token for top in first.top] == ["a", "b"]
    assert (second.logprob, list(second.top)) == (-9999.0, [])


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", Finish.STOP),
        ("length", Finish.LENGTH),
        ("abort", Finish.ABORT),
        ("new", Finish.ABORT),
    ],
)
def test_finish_reasons_are_translated(reason, finish):
    """An unknown reason counts as an abort."""
    assert finish_of(reason) is finish


@pytest.mark.parametrize(
    ("status", "body", "kind", "field"),
    [
        (400, b'{"error": {"message": "bad", "param": "temperature"}}', InvalidArgument, "sampling.temperature"),
        (400, b'{"error": {"message": "long", "param": "input_tokens"}}', InvalidArgument, "prompt_token_ids"),
        (400, b'{"error": {"message": "x", "param": "body.top_p"}}', InvalidArgument, "sampling.top_p"),
        (404, b'{"error": {"message": "no model"}}', NotFound, None),
        (503, b"", Unavailable, None),
    ],
)  # fmt: skip
def test_refusals_have_a_meaning(status, body, kind, field):
    """The engine's words become the caller's: the field it named, by our name."""
    error = refusal(status, body)

    assert isinstance(error, kind)
    assert [violation.field for violation in error.violations] == ([field] if field else [])


METRICS = """\
# HELP process_start_time_seconds Start time.
process_start_time_seconds 1.79604962738e+09
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.1
vllm:num_preemptions_total{engine="0",model_name="tiny"} 4.0
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.7e+09
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="65536",num_gpu_blocks="512"} 1.0
vllm:cache_config_info{block_size="128",engine="1",kv_cache_size_tokens="None",num_gpu_blocks="512"} 1.0
"""


def test_metrics_of_all_ranks_are_added():
    """Counts add up over data-parallel ranks, the KV share is their mean, sizes their sum."""
    sample = read_metrics(METRICS)

    assert sample.start_seconds == "1.79604962738e+09"
    assert (sample.running, sample.waiting, sample.preemptions) == (5, 1, 4)
    assert sample.kv_used_share == pytest.approx(0.3)
    assert (sample.block_tokens, sample.kv_total_tokens) == (128, 131_072)


def test_an_empty_page_reads_as_nothing():
    """A server without statistics is not an error."""
    assert read_metrics("").kv_total_tokens == 0
