"""Texts as long as an experiment says, which routers then have to predict."""

from dataclasses import replace

import msgspec

from dataplane.agent.engine import DecodeJob, Sampling
from dataplane.agent.validation import extra_parameters
from servicekit.errors import InvalidArgument

OUTPUT_TOKENS_KEY = "emulated_output_tokens"
"""In extra_json."""


def output_tokens(sampling: Sampling) -> int | None:
    """Return the length that an experiment fixes; None where it leaves it to the text.

    Raises:
        InvalidArgument: it is not a whole number above 0.
    """
    value = extra_parameters(sampling).get(OUTPUT_TOKENS_KEY)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise InvalidArgument.of(
        f"sampling.extra_json.{OUTPUT_TOKENS_KEY}", f"is {value!r}; it is a whole number above 0"
    )


def with_fixed_length(job: DecodeJob) -> DecodeJob:
    """Return a job that asks a real engine for exactly the length that an experiment fixes.

    The client's own cap still holds, and is all that the router has seen.

    Raises:
        InvalidArgument: as `output_tokens`.
    """
    fixed = output_tokens(job.sampling)
    if fixed is None:
        return job
    extra = extra_parameters(job.sampling)
    del extra[OUTPUT_TOKENS_KEY]
    sampling = replace(
        job.sampling,
        ignore_eos=True,
        extra_json=msgspec.json.encode(extra).decode() if extra else "",
    )
    return replace(job, max_tokens=min(job.max_tokens, fixed), sampling=sampling)
