"""Everything but generation: models, tokens, health, metrics."""

import msgspec
from prometheus_client import CollectorRegistry

from dataplane.gateway.asking import Asker
from dataplane.gateway.bodies import DetokenizeBody, TokenizeBody, convert, read_object
from dataplane.gateway.errors import HttpFault, fault_of, refused
from dataplane.gateway.exchange import Exchange
from dataplane.gateway.generating import conversation_ids
from dataplane.gateway.prompts import Models
from servicekit.clock import Clock
from servicekit.errors import SteelyardError
from servicekit.metrics import render


class Operating:
    """Answers what tools ask before and beside generations."""

    def __init__(self, models: Models, registry: CollectorRegistry, clock: Clock) -> None:
        self._models = models
        self._registry = registry
        self._started_unix = int(clock.unix())

    async def models(self, exchange: Exchange, asker: Asker) -> None:
        """List the models that there are."""
        del asker
        rows = [
            {
                "id": model.name,
                "object": "model",
                "created": self._started_unix,
                "owned_by": "steelyard",
                "root": model.name,
                "parent": None,
                "max_model_len": model.limits.model_tokens,
            }
            for model in self._models.all()
        ]
        exchange.respond(200, msgspec.json.encode({"object": "list", "data": rows}))

    async def health(self, exchange: Exchange, asker: Asker) -> None:
        """Say whether a request could be served."""
        del asker
        if not self._models.ready():
            raise HttpFault(503, "no model can be served now", retry_after_seconds=1.0)
        exchange.respond(200, b"", content_type=b"text/plain")

    async def metrics(self, exchange: Exchange, asker: Asker) -> None:
        """Show the router's and the gateway's counters."""
        del asker
        body, content_type = render(self._registry)
        exchange.respond(200, body, content_type=content_type.encode())

    async def tokenize(self, exchange: Exchange, asker: Asker) -> None:
        """Count and show a text's or a conversation's tokens."""
        del asker
        body = convert(read_object(exchange.request.body), TokenizeBody)
        try:
            model = self._models.of(body.model)
            text = await model.text()
            if body.messages is not None:
                ids = await conversation_ids(body, model)
            elif body.prompt is not None:
                special = body.add_special_tokens is not False
                ids = await text.encode(body.prompt, add_special_tokens=special)
            else:
                raise refused("prompt", "is missing; give prompt or messages")
        except SteelyardError as error:
            raise fault_of(error, "prompt") from error
        names = text.token_names(ids) if body.return_token_strs else None
        answer = {
            "count": len(ids),
            "max_model_len": model.limits.model_tokens,
            "tokens": ids,
            "token_strs": names,
        }
        exchange.respond(200, msgspec.json.encode(answer))

    async def detokenize(self, exchange: Exchange, asker: Asker) -> None:
        """Show token ids as text."""
        del asker
        body = convert(read_object(exchange.request.body), DetokenizeBody)
        try:
            text = await self._models.of(body.model).text()
        except SteelyardError as error:
            raise fault_of(error, "tokens") from error
        if not all(0 <= token_id < 1 << 32 for token_id in body.tokens):
            raise refused("tokens", "has an id outside any vocabulary")
        exchange.respond(200, msgspec.json.encode({"prompt": text.decode(body.tokens)}))
