"""From what a client sent to a request that can be scheduled: every limit, by field and value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from steelyard.v1 import router_pb2, types_pb2

from dataplane.core.cluster import Instance, Role, Roster, State
from dataplane.core.errors import RejectReason
from dataplane.router.errors import rejection
from servicekit.errors import InvalidArgument

_USABLE = {State.READY, State.STALE}
# (field, least, most, whether the least itself is allowed)
_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("temperature", 0.0, math.inf, True),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, True),
    ("presence_penalty", -2.0, 2.0, True),
    ("frequency_penalty", -2.0, 2.0, True),
    ("repetition_penalty", 0.0, math.inf, False),
)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What holds for every instance of a pool: the strictest of each."""

    model_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What is asked of a roster at every request.

    Attributes:
        missing: Why it can serve none; None where it can.
        source: An instance to fetch the tokenizer from; None where none takes requests.
    """

    roster: Roster
    limits: ModelLimits
    missing: RejectReason | None
    source: Instance | None

    def check_roles(self) -> None:
        """Refuse when a role has no instance that takes requests.

        Raises:
            Unavailable: Names the role.
        """
        if self.missing is not None:
            raise rejection(self.missing)


class FactsByPool:
    """The facts of each pool's roster, worked out once for each roster."""

    def __init__(self) -> None:
        self._facts: dict[str, Facts] = {}

    def of(self, pool: str, roster: Roster) -> Facts:
        """Return the facts of the roster that a pool has now."""
        facts = self._facts.get(pool)
        if facts is None or facts.roster is not roster:
            facts = Facts(roster, limits_of(roster), missing_role(roster), tokenizer_source(roster))
            self._facts[pool] = facts
        return facts


def limits_of(roster: Roster) -> ModelLimits:
    """Return the limits of a pool's instances."""
    return ModelLimits(
        model_tokens=min((i.max_model_tokens for i in roster.instances), default=0),
        vocab_size=min((i.vocab_size for i in roster.instances), default=0),
    )


def check_shape(request: router_pb2.GenerateRequest) -> None:
    """Refuse what is wrong whatever the cluster is.

    Raises:
        InvalidArgument: Names the field and the limit.
    """
    has_text, has_ids = request.HasField("text"), request.HasField("token_ids")
    if has_text and has_ids:
        raise InvalidArgument.of("prompt", "text and token_ids are both set; exactly one is given")
    if not (has_text and request.text) and not (has_ids and request.token_ids.ids):
        raise InvalidArgument.of("prompt", "is empty; give text or at least one of token_ids")
    if request.max_tokens == 0:
        raise InvalidArgument.of("max_tokens", "is 0; at least 1 token is generated")
    _check_sampling(request.sampling, request.max_tokens)
    for name in ("ttft", "tpot"):
        if request.slo.HasField(name) and getattr(request.slo, name).ToNanoseconds() <= 0:
            raise InvalidArgument.of(f"slo.{name}", "is not above 0; leave it out for no target")


def check_fit(tokens: Sequence[int], max_tokens: int, limits: ModelLimits) -> None:
    """Refuse a prompt that the model cannot take.

    Raises:
        InvalidArgument: Names the field and the limit.
    """
    if not tokens:
        raise InvalidArgument.of("text", "makes no token at all; the least is 1")
    total = len(tokens) + max_tokens
    if total > limits.model_tokens:
        raise InvalidArgument.of(
            "max_tokens",
            f"prompt ({len(tokens)} tokens) and max_tokens ({max_tokens}) make {total}; "
            f"the model's length is {limits.model_tokens}",
        )
    highest = max(tokens)
    if highest >= limits.vocab_size:
        position = next(at for at, token in enumerate(tokens) if token == highest)
        raise InvalidArgument.of(
            "token_ids.ids",
            f"id {highest} at position {position} is outside the vocabulary; "
            f"ids are below {limits.vocab_size}",
        )


def missing_role(roster: Roster) -> RejectReason | None:
    """Return which role has no instance that takes requests; None where requests can be served."""
    roles = {i.role for i in roster.instances if i.state in _USABLE}
    if Role.MIXED in roles:
        return None
    if Role.PREFILL not in roles:
        return RejectReason.NO_PREFILL_INSTANCE
    if Role.DECODE not in roles:
        return RejectReason.NO_DECODE_INSTANCE
    return None


def tokenizer_source(roster: Roster) -> Instance | None:
    """Return an instance to fetch the tokenizer from; None where none takes requests."""
    usable = [i for i in roster.instances if i.state in _USABLE]
    return next((i for i in usable if i.tokenizer_sha256), usable[0] if usable else None)


def _check_sampling(sampling: types_pb2.SamplingParams, max_tokens: int) -> None:
    for name, least, most, inclusive in _RANGES:
        if not sampling.HasField(name):  # type: ignore[arg-type]
            continue
        value = getattr(sampling, name)
        above = value >= least if inclusive else value > least
        if not (above and value <= most and math.isfinite(value)):
            lower = f"{'at least' if inclusive else 'above'} {least:g}"
            upper = "finite" if math.isinf(most) else f"at most {most:g}"
            raise InvalidArgument.of(f"sampling.{name}", f"is {value:g}; it is {lower} and {upper}")
    if sampling.HasField("top_k") and sampling.top_k < 1 and sampling.top_k != -1:
        raise InvalidArgument.of(
            "sampling.top_k", f"is {sampling.top_k}; it is at least 1, or -1 for all"
        )
    if sampling.HasField("min_tokens") and sampling.min_tokens > max_tokens:
        raise InvalidArgument.of(
            "sampling.min_tokens",
            f"is {sampling.min_tokens}; it is at most max_tokens ({max_tokens})",
        )
    if any(not stop for stop in sampling.stop):
        raise InvalidArgument.of("sampling.stop", "holds an empty string; each has a character")
    if sampling.extra_json:
        try:
            msgspec.json.decode(sampling.extra_json, type=dict[str, object])
        except msgspec.DecodeError as error:
            raise InvalidArgument.of(
                "sampling.extra_json", f"is no JSON object: {error}"
            ) from error
