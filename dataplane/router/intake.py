"""Turns a message into a request of one pool: checked, tokenised, predicted, with its targets."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.v1 import router_pb2

from dataplane.core.predictor import LengthQuery
from dataplane.core.request import Request
from dataplane.core.slo import resolve, urgency
from dataplane.router.admission import Facts, FactsByPool, check_fit, check_shape
from dataplane.router.driver import PoolDriver
from dataplane.router.fleet import Fleet
from dataplane.router.snapshots import targets_from
from dataplane.router.tokenizers import Tokenizers
from servicekit.clock import Clock
from servicekit.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Taken:
    """A request that was taken in."""

    driver: PoolDriver
    request: Request
    query: LengthQuery
    policy: str
    prompt_token_ids: Sequence[int]


class Intake:
    """Takes messages in; nothing is charged or kept before it is through."""

    def __init__(
        self, fleet: Fleet, tokenizers: Tokenizers, *, clock: Clock, default_policy: str
    ) -> None:
        self._fleet = fleet
        self._tokenizers = tokenizers
        self._clock = clock
        self._default_policy = default_policy
        self._facts = FactsByPool()

    async def take(
        self, message: router_pb2.GenerateRequest, arrived_at: float, policy: str = ""
    ) -> Taken:
        """Return the request that a message asks for.

        Args:
            message: What the client sent.
            arrived_at: When, by the monotonic clock.
            policy: Asked for in metadata; the message's own wins.

        Raises:
            InvalidArgument: Names the field and the limit.
            NotFound: No pool serves the model.
            Unavailable: A role has no instance that takes requests.
            FailedPrecondition: Text was given and the model has no tokenizer.
        """
        check_shape(message)
        driver = self._fleet.driver(message.model)
        roster = driver.pool.roster
        name = message.policy or policy or self._default_policy
        try:
            driver.scheduler(name)
        except ValueError as error:
            raise InvalidArgument.of("policy", str(error), reason="UNKNOWN_POLICY") from error
        try:
            slo_class, targets = resolve(roster.slo, message.slo_class)
        except KeyError as error:
            known = ", ".join(sorted(roster.slo.classes))
            raise InvalidArgument.of(
                "slo_class", f"is {message.slo_class!r}; there are: {known}"
            ) from error
        facts = self._facts.of(driver.name, roster)
        facts.check_roles()
        tokens = await self._tokens(message, facts)
        check_fit(tokens, message.max_tokens, facts.limits)
        wish = targets_from(message.slo)
        query = LengthQuery(
            model=driver.name.partition("@")[0],
            tenant=message.tenant,
            slo_class=slo_class,
            prompt_tokens=len(tokens),
            max_tokens=message.max_tokens,
            request_id=message.correlation_id or "",
        )
        request = Request(
            # Fresh and of fixed width: a client's own id may come twice, ours never does.
            request_id=secrets.token_hex(12),
            prompt_tokens=len(tokens),
            max_tokens=message.max_tokens,
            length=self._fleet.predictor.predict(query),
            slo_class=slo_class,
            urgency=urgency(roster.slo, targets.tightened(wish)),
            targets=targets.for_prompt(len(tokens)).tightened(wish.for_prompt(len(tokens))),
            arrived_at=arrived_at,
        )
        return Taken(driver, request, query, name, tokens)

    async def _tokens(self, message: router_pb2.GenerateRequest, facts: Facts) -> Sequence[int]:
        if message.HasField("token_ids"):
            return message.token_ids.ids
        source = facts.source
        assert source is not None, "a pool with roles has an instance"
        return await self._tokenizers.encode(message.text, source.tokenizer_sha256, source.address)
