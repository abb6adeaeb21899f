"""From what a client sent as its prompt to token ids of one pool's vocabulary."""

from collections.abc import Sequence
from typing import Any

from dataplane.core.cluster import Instance
from dataplane.gateway.chat_template import ChatTemplate
from dataplane.gateway.errors import HttpFault, refused
from dataplane.gateway.model_text import ModelText, ModelTexts
from dataplane.router.admission import Facts, FactsByPool, ModelLimits
from dataplane.router.driver import PoolDriver
from dataplane.router.fleet import Fleet

MAX_PROMPTS = 256


class ServedModel:
    """One model as the gateway needs it: its limits and its text."""

    def __init__(self, driver: PoolDriver, facts: Facts, texts: ModelTexts) -> None:
        self._driver = driver
        self._facts = facts
        self._texts = texts

    @property
    def name(self) -> str:
        """What clients call it."""
        return self._driver.name.partition("@")[0]

    @property
    def pool_name(self) -> str:
        """The pool, revision included."""
        return self._driver.name

    @property
    def limits(self) -> ModelLimits:
        """What holds for each of its instances."""
        return self._facts.limits

    async def text(self) -> ModelText:
        """Return its tokenizer, fetched from an agent at first use.

        Raises:
            SteelyardError: No instance takes requests, or the model has no tokenizer.
        """
        source = self._source()
        return await self._texts.text(source.tokenizer_sha256, source.address)

    async def template(self) -> ChatTemplate:
        """Return its chat template, fetched from an agent at first use.

        Raises:
            HttpFault: The model has none.
            SteelyardError: No instance takes requests.
        """
        source = self._source()
        return await self._texts.template(source.tokenizer_sha256, source.address)

    def _source(self) -> Instance:
        self._facts.check_roles()
        source = self._facts.source
        assert source is not None, "a pool with roles has an instance"
        return source


class Models:
    """The models that the fleet serves, by the names that clients use."""

    def __init__(self, fleet: Fleet, texts: ModelTexts) -> None:
        self._fleet = fleet
        self._texts = texts
        self._facts = FactsByPool()

    def of(self, name: str | None) -> ServedModel:
        """Return a model; without a name the only one there is.

        Raises:
            SteelyardError: No pool serves it.
            HttpFault: There is no pool at all, so whether the name is wrong cannot be said yet.
        """
        if next(iter(self._fleet), None) is None:
            raise HttpFault(503, "no model can be served now", retry_after_seconds=1.0)
        return self._model(self._fleet.driver(name or ""))

    def all(self) -> list[ServedModel]:
        """Return every model, one a name, in their order."""
        named = {d.name.partition("@")[0]: d for d in sorted(self._fleet, key=lambda d: d.name)}
        return [self._model(driver) for driver in named.values()]

    def ready(self) -> bool:
        """Whether any model can be served now."""
        facts = (self._facts.of(driver.name, driver.pool.roster) for driver in self._fleet)
        return any(of_one.missing is None for of_one in facts)

    def _model(self, driver: PoolDriver) -> ServedModel:
        return ServedModel(driver, self._facts.of(driver.name, driver.pool.roster), self._texts)


async def prompt_token_ids(
    prompt: Any, model: ServedModel, *, add_special_tokens: bool, truncate_to: int | None
) -> list[Sequence[int]]:
    """Return the token ids of each prompt in a body.

    Args:
        prompt: A text, token ids, or a list of one of these.
        model: Whose tokenizer is used.
        add_special_tokens: As the engine would, to texts.
        truncate_to: Keep the last that many tokens; -1 is the model's length.

    Raises:
        HttpFault: It is something else, or empty.
    """
    if prompt is None or prompt == "":
        raise refused("prompt", "must be provided and non-empty")
    many = _split(prompt)
    if len(many) > MAX_PROMPTS:
        raise refused("prompt", f"has {len(many)} prompts; at most {MAX_PROMPTS} are taken at once")
    found: list[Sequence[int]] = []
    for one in many:
        if isinstance(one, str):
            text = await model.text()
            ids = await text.encode(one, add_special_tokens=add_special_tokens)
        else:
            ids = one
        found.append(truncated(ids, truncate_to, model.limits))
    return found


def truncated(ids: Sequence[int], truncate_to: int | None, limits: ModelLimits) -> Sequence[int]:
    """Return the end of a prompt.

    Raises:
        HttpFault: The number is none of tokens.
    """
    if truncate_to is None:
        return ids
    keep = limits.model_tokens if truncate_to == -1 else truncate_to
    if not 0 < keep <= limits.model_tokens:
        raise refused(
            "truncate_prompt_tokens",
            f"is {truncate_to}; it is -1, or between 1 and {limits.model_tokens}",
        )
    return ids[-keep:]


def fitting_max_tokens(
    wanted: int | None, prompt_tokens: int, limits: ModelLimits, *, field: str
) -> int:
    """Return how many tokens may be generated: as vLLM does, shortened to the model's length.

    Args:
        wanted: What the client asked for; None for as many as fit.
        prompt_tokens: Length of the prompt.
        limits: The model's.
        field: What the client calls it.

    Raises:
        HttpFault: Nothing can be generated, or more is wanted than the model has.
    """
    length = limits.model_tokens
    if prompt_tokens > length:
        raise HttpFault(
            400,
            f"This model's maximum context length is {length} tokens. However, your prompt "
            f"contains {prompt_tokens} input tokens",
            param="input_tokens",
        )
    if wanted is not None and wanted > length:
        raise refused(field, f"{wanted} cannot be greater than the model's length, {length}")
    left = length - prompt_tokens
    most = left if wanted is None else min(wanted, left)
    if most < 1:
        raise refused(field, f"must be at least 1, got {most}")
    return most


def _split(prompt: Any) -> list[Any]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise refused("prompt", "is neither a text nor token ids, nor a list of one of these")
    if not prompt:
        raise refused("prompt", "you must pass at least one prompt")
    if isinstance(prompt[0], int):
        return [_ids(prompt)]
    if all(isinstance(one, str) and one for one in prompt):
        return prompt
    if all(isinstance(one, list) and one for one in prompt):
        return [_ids(one) for one in prompt]
    raise refused("prompt", "has an entry that is empty or of another kind than the others")


def _ids(ids: list[Any]) -> list[int]:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < 1 << 32:
            raise refused("prompt", f"has {token_id!r} among its token ids")
    return ids
