"""Experiments fix how long a real engine's text is; its router has to predict it."""

import pytest

from dataplane.agent.engine import DecodeJob, Sampling
from dataplane.agent.fixed_length import with_fixed_length
from servicekit.errors import InvalidArgument


def job(extra_json: str, max_tokens: int = 100) -> DecodeJob:
    """Return a job with extra_json."""
    return DecodeJob(
        request_id="r",
        prompt=[1, 2],
        max_tokens=max_tokens,
        sampling=Sampling(extra_json=extra_json),
    )


def test_the_engine_is_asked_for_exactly_that_many():
    """The length takes the place of the cap, the end token is ignored, other parameters go on."""
    fixed = with_fixed_length(job('{"emulated_output_tokens": 7, "detokenize": false}'))

    assert fixed.max_tokens == 7
    assert fixed.sampling.ignore_eos
    assert fixed.sampling.extra_json == '{"detokenize":false}'


def test_the_clients_cap_still_holds():
    """A length beyond the client's cap is cut there."""
    assert with_fixed_length(job('{"emulated_output_tokens": 700}')).max_tokens == 100


def test_without_a_length_nothing_changes():
    """A job that fixes nothing passes as it is."""
    plain = job('{"detokenize": false}')

    assert with_fixed_length(plain) is plain


@pytest.mark.parametrize("value", ["0", "-3", "1.5", "true", '"7"'])
def test_what_is_no_length_is_refused(value):
    """A length that is no whole number above 0 is refused, by the field's name."""
    with pytest.raises(InvalidArgument, match="emulated_output_tokens"):
        with_fixed_length(job(f'{{"emulated_output_tokens": {value}}}'))
