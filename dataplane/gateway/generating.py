"""Generations over HTTP: the two endpoints, streamed and whole."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from dataplane.gateway.asking import Asker
from dataplane.gateway.bodies import ChatBody, CompletionBody, SamplingBody, read_object, shaped
from dataplane.gateway.chat import ChatRenderer
from dataplane.gateway.completions import CompletionRenderer
from dataplane.gateway.decision import decision_header
from dataplane.gateway.errors import HttpFault, error_object, fault_of, refused
from dataplane.gateway.exchange import Exchange
from dataplane.gateway.prompts import (
    Models,
    ServedModel,
    fitting_max_tokens,
    prompt_token_ids,
    truncated,
)
from dataplane.gateway.rendering import DONE, Renderer, Shape, sse
from dataplane.gateway.running import Job, Progress, Runner, UsageTotals, jobs_of
from dataplane.gateway.sampling import (
    check_generations,
    check_stream_options,
    choices_of,
    sampling_params,
)
from servicekit.clock import Clock
from servicekit.errors import SteelyardError

DEFAULT_MAX_TOKENS = 16
"""Of /v1/completions, as in OpenAI's API; chat generates as much as fits."""


class Generating:
    """Answers /v1/completions and /v1/chat/completions."""

    def __init__(self, models: Models, runner: Runner, clock: Clock) -> None:
        self._models = models
        self._runner = runner
        self._clock = clock

    async def completions(self, exchange: Exchange, asker: Asker) -> None:
        """Continue texts.

        Raises:
            HttpFault: The request is refused; nothing was sent.
        """
        raw = read_object(exchange.request.body)
        body = shaped(raw, CompletionBody)
        try:
            await self._complete(exchange, asker, raw, body)
        except SteelyardError as error:
            raise fault_of(error, "prompt") from error

    async def chat(self, exchange: Exchange, asker: Asker) -> None:
        """Continue a conversation.

        Raises:
            HttpFault: The request is refused; nothing was sent.
        """
        raw = read_object(exchange.request.body)
        body = shaped(raw, ChatBody)
        try:
            await self._chat(exchange, asker, raw, body)
        except SteelyardError as error:
            raise fault_of(error, "messages") from error

    async def _complete(
        self, exchange: Exchange, asker: Asker, raw: Mapping[str, Any], body: CompletionBody
    ) -> None:
        check_stream_options(body)
        model = self._models.of(body.model)
        if body.echo and body.logprobs is not None:
            raise refused("echo", "with logprobs is not supported: the prompt has none here")
        sampling = sampling_params(body, raw, body.logprobs)
        choices = choices_of(body)
        prompts = await prompt_token_ids(
            body.prompt,
            model,
            add_special_tokens=body.add_special_tokens is not False,
            truncate_to=body.truncate_prompt_tokens,
        )
        check_generations(len(prompts), choices)
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        limits = model.limits
        most = [fitting_max_tokens(wanted, len(p), limits, field="max_tokens") for p in prompts]
        echoes = []
        if body.echo:
            text = await model.text()
            given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            echoes = [
                given[i] if isinstance(given[i], str) else text.decode(ids)
                for i, ids in enumerate(prompts)
            ]
        renderer = CompletionRenderer(
            self._shape(body, model, choices, body.logprobs), prompts, echoes
        )
        jobs = jobs_of(asker, model.pool_name, prompts, most, sampling, choices=choices)
        await self._answer(exchange, asker, jobs, renderer, body)

    async def _chat(
        self, exchange: Exchange, asker: Asker, raw: Mapping[str, Any], body: ChatBody
    ) -> None:
        check_stream_options(body)
        model = self._models.of(body.model)
        _check_tools(body)
        logprobs = _chat_logprobs(body)
        sampling = sampling_params(body, raw, logprobs)
        choices = choices_of(body)
        prompt = truncated(
            await conversation_ids(body, model), body.truncate_prompt_tokens, model.limits
        )
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        wanted = getattr(body, field)
        most = fitting_max_tokens(wanted, len(prompt), model.limits, field=field)
        role = "assistant"
        if body.add_generation_prompt is False and body.messages:
            role = str(body.messages[-1]["role"])
            if body.echo:
                raise refused("echo", "is not supported for conversations")
        renderer = ChatRenderer(self._shape(body, model, choices, logprobs), prompt, role)
        jobs = jobs_of(asker, model.pool_name, [prompt], [most], sampling, choices=choices)
        await self._answer(exchange, asker, jobs, renderer, body)

    def _shape(
        self,
        body: SamplingBody,
        model: ServedModel,
        choices: int,
        logprobs: int | None,
    ) -> Shape:
        options = body.stream_options
        return Shape(
            model=body.model or model.name,
            created=int(self._clock.unix()),
            choices=choices,
            logprobs=logprobs,
            return_token_ids=bool(body.return_token_ids),
            include_usage=bool(options and options.include_usage),
            running_usage=bool(
                options and options.include_usage and options.continuous_usage_stats
            ),
        )

    async def _answer(
        self,
        exchange: Exchange,
        asker: Asker,
        jobs: list[Job],
        renderer: Renderer,
        body: SamplingBody,
    ) -> None:
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        choices = body.n or 1
        run = self._runner.run(jobs, asker, exchange.request.arrived_at)
        async with aclosing(run) as progress:
            if body.stream:
                await _stream(
                    exchange,
                    asker,
                    progress,
                    renderer,
                    choices=choices,
                    include_usage=include_usage,
                )
            else:
                await _whole(exchange, asker, progress, renderer, choices=choices)


async def conversation_ids(body: Any, model: ServedModel) -> Any:
    """Return the token ids of a body's conversation.

    Raises:
        HttpFault: There is none, or the template refuses it.
    """
    if not body.messages:
        raise refused("messages", "must hold at least one message")
    variables = dict(body.chat_template_kwargs or {})
    for name in ("documents", "reasoning_effort"):
        value = getattr(body, name, None)
        if value is not None:
            variables.setdefault(name, value)
    template = await model.template()
    prompt = template.render(
        body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables={k: v for k, v in variables.items() if k not in _OURS},
    )
    text = await model.text()
    return await text.encode(prompt, add_special_tokens=bool(body.add_special_tokens))


_OURS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


async def _stream(
    exchange: Exchange,
    asker: Asker,
    progress: AsyncGenerator[Progress],
    renderer: Renderer,
    *,
    choices: int,
    include_usage: bool,
) -> None:
    """Send events as they come; the head waits for the first, so that a refusal has its status."""
    usage = UsageTotals()
    try:
        async for one in progress:
            if not exchange.started:
                renderer.begin(one.served.request_id)
                exchange.stream(headers=answer_headers(asker, one))
            response = one.response
            if response.finish_reason:
                usage = usage.with_job(
                    one.job, choices, response.usage, one.served.record.cached_prompt_tokens
                )
            exchange.send(renderer.event(one))
            if exchange.paused:
                await exchange.drain()
    except SteelyardError as error:
        if not exchange.started:
            raise
        # The status is out; the stream says what broke it, as vLLM does, and ends.
        exchange.finish(sse(error_object(fault_of(error, "prompt"))) + DONE)
        return
    if not exchange.started:
        raise HttpFault(500, "the engine sent nothing")
    exchange.finish((renderer.last_event(usage) if include_usage else b"") + DONE)


async def _whole(
    exchange: Exchange,
    asker: Asker,
    progress: AsyncGenerator[Progress],
    renderer: Renderer,
    *,
    choices: int,
) -> None:
    usage = UsageTotals()
    first: Progress | None = None
    async for one in progress:
        first = first or one
        renderer.gather(one)
        if one.response.finish_reason:
            usage = usage.with_job(
                one.job, choices, one.response.usage, one.served.record.cached_prompt_tokens
            )
    if first is None:
        raise HttpFault(500, "the engine sent nothing")
    renderer.begin(first.served.request_id)
    exchange.respond(200, renderer.whole(usage), headers=answer_headers(asker, first))


def answer_headers(asker: Asker, progress: Progress) -> list[tuple[bytes, bytes]]:
    """Return what the head of an answer says about it."""
    headers = [(b"x-request-id", asker.call.request_id.encode())]
    if asker.wants_decision:
        headers.append((b"x-steelyard-decision", msgspec.json.encode(decision_header(progress))))
    return headers


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise refused("top_logprobs", "needs `logprobs` to be true")
    return None


def _check_tools(body: ChatBody) -> None:
    """Refuse what needs a parser of the model's calls, which only its engine's chat has."""
    if body.tools and body.tool_choice != "none":
        raise refused(
            "tool_choice",
            'must be "none": tools are shown to the model, but its calls are not parsed here',
        )
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise refused("tool_choice", "is set, and there are no tools")
