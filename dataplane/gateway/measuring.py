"""What a request will cost, without running it: its prompt in tokens and its limit."""

from steelyard.v1 import router_pb2, types_pb2

from dataplane.gateway.asking import Asker
from dataplane.gateway.bodies import ChatBody, CompletionBody, convert, read_object
from dataplane.gateway.generating import DEFAULT_MAX_TOKENS, conversation_ids
from dataplane.gateway.prompts import Models, fitting_max_tokens, prompt_token_ids
from dataplane.gateway.running import jobs_of
from dataplane.gateway.values import HttpRequest


class Measuring:
    """Reads bodies that somebody else will send to an engine."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def message(self, request: HttpRequest, asker: Asker) -> router_pb2.GenerateRequest:
        """Return the request that a body makes; of a batch of prompts the first.

        Raises:
            HttpFault: It is no completion and no conversation.
            SteelyardError: Nothing serves its model.
        """
        raw = read_object(request.body)
        field = "max_tokens"
        if raw.get("messages") is not None:
            body = convert(raw, ChatBody)
            model = self._models.of(body.model)
            prompt = await conversation_ids(body, model)
            wanted = body.max_tokens
            if body.max_completion_tokens is not None:
                wanted, field = body.max_completion_tokens, "max_completion_tokens"
        else:
            text = convert(raw, CompletionBody)
            model = self._models.of(text.model)
            prompts = await prompt_token_ids(
                text.prompt, model, add_special_tokens=True, truncate_to=text.truncate_prompt_tokens
            )
            prompt = prompts[0]
            wanted = DEFAULT_MAX_TOKENS if text.max_tokens is None else text.max_tokens
        most = fitting_max_tokens(wanted, len(prompt), model.limits, field=field)
        sampling = types_pb2.SamplingParams()
        (job,) = jobs_of(asker, model.pool_name, [prompt], [most], sampling, choices=1)
        return job.message
