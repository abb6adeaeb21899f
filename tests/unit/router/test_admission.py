"""Bad requests are refused by the field that is wrong and the limit that it breaks."""

import math

import pytest
from steelyard.v1 import router_pb2

from dataplane.core.cluster import State
from dataplane.router.admission import (
    FactsByPool,
    ModelLimits,
    check_fit,
    check_shape,
    limits_of,
    missing_role,
    tokenizer_source,
)
from servicekit.errors import InvalidArgument, Unavailable
from tests.unit.core.builders import instance, roster

LIMITS = ModelLimits(model_tokens=100, vocab_size=50)


def request(**fields) -> router_pb2.GenerateRequest:
    """Return a request that is right but for the fields given."""
    values = {"token_ids": router_pb2.TokenIds(ids=[1, 2, 3]), "max_tokens": 8}
    message = router_pb2.GenerateRequest(**values)
    for path, value in fields.items():
        target = message
        *parents, name = path.split("__")
        for parent in parents:
            target = getattr(target, parent)
        if hasattr(value, "DESCRIPTOR"):
            getattr(target, name).CopyFrom(value)
        elif isinstance(value, list):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return message


SHAPES = [
    ("prompt", "both", request(text="x")),
    ("prompt", "empty", router_pb2.GenerateRequest(max_tokens=1)),
    ("prompt", "empty", router_pb2.GenerateRequest(max_tokens=1, text="")),
    ("prompt", "empty", router_pb2.GenerateRequest(max_tokens=1, token_ids=router_pb2.TokenIds())),
    ("max_tokens", "at least 1", request(max_tokens=0)),
    ("sampling.temperature", "at least 0", request(sampling__temperature=-0.1)),
    ("sampling.temperature", "at least 0", request(sampling__temperature=math.nan)),
    ("sampling.temperature", "finite", request(sampling__temperature=math.inf)),
    ("sampling.top_p", "above 0 and at most 1", request(sampling__top_p=0.0)),
    ("sampling.top_p", "above 0 and at most 1", request(sampling__top_p=1.01)),
    ("sampling.top_p", "above 0 and at most 1", request(sampling__top_p=math.nan)),
    ("sampling.min_p", "at least 0 and at most 1", request(sampling__min_p=-0.5)),
    ("sampling.min_p", "at least 0 and at most 1", request(sampling__min_p=2.0)),
    ("sampling.presence_penalty", "at most 2", request(sampling__presence_penalty=2.5)),
    ("sampling.frequency_penalty", "at least -2", request(sampling__frequency_penalty=-3.0)),
    ("sampling.repetition_penalty", "above 0", request(sampling__repetition_penalty=0.0)),
    ("sampling.top_k", "at least 1, or -1", request(sampling__top_k=0)),
    ("sampling.top_k", "at least 1, or -1", request(sampling__top_k=-2)),
    ("sampling.min_tokens", "at most max_tokens (8)", request(sampling__min_tokens=9)),
    ("sampling.stop", "empty", request(sampling__stop=["fine", ""])),
    ("sampling.extra_json", "no JSON object", request(sampling__extra_json="[1]")),
    ("sampling.extra_json", "no JSON object", request(sampling__extra_json="{")),
    ("slo.ttft", "above 0", request(slo__ttft__seconds=-1)),
    ("slo.tpot", "above 0", request(slo__tpot__nanos=0)),
]


@pytest.mark.parametrize(("field", "limit", "message"), SHAPES)
def test_a_bad_shape_names_field_and_limit(field, limit, message):
    """Each bad field is named, with the limit in words, whatever the cluster is."""
    if field == "slo.tpot":
        message.slo.tpot.SetInParent()
    with pytest.raises(InvalidArgument) as caught:
        check_shape(message)

    assert [violation.field for violation in caught.value.violations] == [field]
    assert limit in caught.value.violations[0].description


@pytest.mark.parametrize(
    "message",
    [
        request(),
        router_pb2.GenerateRequest(text="x", max_tokens=1),
        request(sampling__temperature=0.0, sampling__top_p=1.0, sampling__top_k=-1),
        request(sampling__min_tokens=8, sampling__repetition_penalty=0.1),
        request(sampling__presence_penalty=-2.0, sampling__frequency_penalty=2.0),
        request(slo__ttft__nanos=1, sampling__stop=["a"]),
    ],
)
def test_values_at_their_limits_pass(message):
    """A limit itself is allowed where its wording says so."""
    check_shape(message)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "field", "parts"),
    [
        ([1] * 90, 11, "max_tokens", ("90 tokens", "11", "101", "100")),
        ([1, 50, 2], 1, "token_ids.ids", ("id 50", "position 1", "below 50")),
        ([], 1, "text", ("no token",)),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(tokens, max_tokens, field, parts):
    """Too long, outside the vocabulary, or nothing at all: field, value and limit are named."""
    with pytest.raises(InvalidArgument) as caught:
        check_fit(tokens, max_tokens, LIMITS)

    (violation,) = caught.value.violations
    assert violation.field == field
    assert all(part in violation.description for part in parts)


def test_ids_straight_from_the_message_are_checked():
    """The protocol's own list of ids is taken, not only Python lists."""
    ids = request(token_ids=router_pb2.TokenIds(ids=[3, 99])).token_ids.ids
    with pytest.raises(InvalidArgument, match="id 99 at position"):
        check_fit(ids, 1, LIMITS)


def test_what_just_fits_is_taken():
    """Prompt plus max_tokens may equal the model's length, and the highest id may be used."""
    check_fit([49] * 92, 8, LIMITS)


def test_the_strictest_instance_sets_the_limits():
    """A pool's limits hold for each of its instances."""
    limits = limits_of(
        roster(
            instance("p0", max_model_tokens=10, vocab_size=9),
            instance("d0", max_model_tokens=8, vocab_size=11),
        )
    )

    assert limits == ModelLimits(model_tokens=8, vocab_size=9)


@pytest.mark.parametrize(
    ("names", "states", "reason"),
    [
        (["d0"], {}, "NO_PREFILL_INSTANCE"),
        (["p0"], {}, "NO_DECODE_INSTANCE"),
        ([], {}, "NO_PREFILL_INSTANCE"),
        (["p0", "d0"], {"d0": State.DRAINING}, "NO_DECODE_INSTANCE"),
        (["p0", "d0"], {"p0": State.JOINING}, "NO_PREFILL_INSTANCE"),
        (["p0", "d0"], {"p0": State.STALE}, None),
        (["m0"], {}, None),
        (["p0", "m0"], {"m0": State.DRAINING}, "NO_DECODE_INSTANCE"),
    ],
)
def test_a_missing_role_is_unavailable_by_name(names, states, reason):
    """A role counts where an instance is READY or STALE; a mixed one is both."""
    members = roster(*(instance(name, state=states.get(name, State.READY)) for name in names))
    if reason is None:
        FactsByPool().of("m", members).check_roles()
        return
    with pytest.raises(Unavailable) as caught:
        FactsByPool().of("m", members).check_roles()

    assert caught.value.reason == reason
    assert caught.value.retry_after_seconds is not None


def test_the_tokenizer_comes_from_an_instance_that_has_one():
    """An instance with a tokenizer is preferred, one that takes requests is needed."""
    members = roster(
        instance("d0", state=State.JOINING, tokenizer_sha256="x"),
        instance("p0"),
        instance("d1", tokenizer_sha256="y"),
    )

    assert tokenizer_source(members).instance_id == "d1"
    assert tokenizer_source(roster(instance("d0", state=State.JOINING))) is None


def test_facts_of_a_roster_are_worked_out_once_and_again_for_its_successor():
    """The same roster gives the same facts; a new one, and another pool's, give their own."""
    facts = FactsByPool()
    first, second = roster("m0"), roster("d0")
    known = facts.of("a", first)
    assert facts.of("a", first) is known
    assert known.limits == limits_of(first)
    assert known.source is first.instances[0]
    known.check_roles()

    later = facts.of("a", second)

    assert later.missing is missing_role(second)
    with pytest.raises(Unavailable):
        later.check_roles()
    assert facts.of("b", first).missing is None
