"""Bad jobs are refused with the field and the limit."""

import math
from dataclasses import replace

import pytest

from dataplane.agent.emulated_factory import emulated_options
from dataplane.agent.engine import DecodeJob, PrefillJob, Sampling
from dataplane.agent.engine_emulated import _describe
from dataplane.agent.settings import AgentSettings
from dataplane.agent.validation import check_decode, check_prefill
from servicekit.errors import InvalidArgument, SettingsInvalid

ENGINE = _describe(emulated_options(AgentSettings(max_model_tokens=100)), "epoch", b"")
JOB = DecodeJob(request_id="r", prompt=[1, 2, 3], max_tokens=10)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": []}, "prompt_token_ids"),
        ({"prompt": [1, 384]}, "prompt_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 98}, "max_tokens"),
        ({"sampling": Sampling(temperature=-0.1)}, "sampling.temperature"),
        ({"sampling": Sampling(temperature=math.nan)}, "sampling.temperature"),
        ({"sampling": Sampling(temperature=math.inf)}, "sampling.temperature"),
        ({"sampling": Sampling(top_p=0.0)}, "sampling.top_p"),
        ({"sampling": Sampling(top_p=1.1)}, "sampling.top_p"),
        ({"sampling": Sampling(top_k=0)}, "sampling.top_k"),
        ({"sampling": Sampling(min_p=-1.0)}, "sampling.min_p"),
        ({"sampling": Sampling(presence_penalty=2.5)}, "sampling.presence_penalty"),
        ({"sampling": Sampling(frequency_penalty=-3.0)}, "sampling.frequency_penalty"),
        ({"sampling": Sampling(repetition_penalty=0.0)}, "sampling.repetition_penalty"),
        ({"sampling": Sampling(min_tokens=11)}, "sampling.min_tokens"),
        ({"sampling": Sampling(stop=("",))}, "sampling.stop"),
        ({"sampling": Sampling(extra_json="nope")}, "sampling.extra_json"),
    ],
)
def test_a_bad_generation_is_refused_with_its_field(change, field):
    """Each rule names what it is about."""
    with pytest.raises(InvalidArgument) as caught:
        check_decode(replace(JOB, **change), ENGINE)

    assert [violation.field for violation in caught.value.violations] == [field]


def test_the_limits_themselves_are_allowed():
    """Prompt plus output may fill the model exactly; ranges include what they say."""
    check_decode(replace(JOB, max_tokens=97), ENGINE)
    check_decode(replace(JOB, sampling=Sampling(temperature=0.0, top_p=1.0, top_k=-1)), ENGINE)
    check_prefill(PrefillJob(request_id="r", prompt=[1] * 99), ENGINE)


def test_a_prompt_that_leaves_no_room_is_refused():
    """A prompt of the model's whole length cannot get its first token."""
    with pytest.raises(InvalidArgument, match="100 tokens"):
        check_prefill(PrefillJob(request_id="r", prompt=[1] * 100), ENGINE)


@pytest.mark.parametrize(
    "bad",
    [{"profile": "nope"}, {"constants": {"q7": 1.0}}, {"max_model_tokens": 9_000, "kv_total_tokens": 8_000}],
)  # fmt: skip
def test_settings_that_make_no_engine_are_refused(bad):
    """An unknown profile or constant, or a model longer than the KV cache, ends the start."""
    with pytest.raises(SettingsInvalid):
        emulated_options(AgentSettings(**bad))


def test_settings_change_the_profile():
    """Single constants and a factor on all of them are taken over the profile's."""
    options = emulated_options(AgentSettings(constants={"d0_seconds": 0.01}, slowness=2.0))

    assert options.batching.constants.d0_seconds == pytest.approx(0.02)
    assert options.batching.kv_total_tokens == 60_000
