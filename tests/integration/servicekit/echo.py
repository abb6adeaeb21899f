"""A service of all four call kinds that does what its text says; for tests of the server."""

import asyncio
from collections.abc import AsyncIterator

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from servicekit.errors import InvalidArgument, Unavailable
from servicekit.server import ServiceBinding
from servicekit.tracing import add_log_fields, outgoing_metadata

NAME = "test.Echo"


class Echo:
    """Answers with its own text, or fails as the text asks."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.left = asyncio.Event()

    async def act(self, text: str, context: grpc.aio.ServicerContext) -> str:
        if text == "invalid":
            raise InvalidArgument.of("prompt", "is empty, at least 1 token is needed")
        if text == "unavailable":
            raise Unavailable("no decode instance", reason="NO_INSTANCE", retry_after_seconds=1.5)
        if text == "bug":
            raise KeyError("secret detail")
        if text == "foreign":
            raise FileNotFoundError("there")
        if text == "abort":
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "by hand")
        if text == "hang":
            self.entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        if text == "metadata":
            return dict(outgoing_metadata())["traceparent"]
        add_log_fields(text=text)
        return text

    async def unary_unary(self, request: StringValue, context) -> StringValue:
        return StringValue(value=await self.act(request.value, context))

    async def unary_stream(self, request: StringValue, context) -> AsyncIterator[StringValue]:
        for _ in range(2):
            yield StringValue(value=await self.act(request.value, context))

    async def stream_unary(self, requests, context) -> StringValue:
        texts = [await self.act(request.value, context) async for request in requests]
        return StringValue(value="".join(texts))

    async def stream_stream(self, requests, context) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield StringValue(value=await self.act(request.value, context))

    def binding(self) -> ServiceBinding:
        coders = {
            "request_deserializer": StringValue.FromString,
            "response_serializer": StringValue.SerializeToString,
        }
        handlers = grpc.method_handlers_generic_handler(
            NAME,
            {
                kind: getattr(grpc, f"{kind}_rpc_method_handler")(getattr(self, kind), **coders)
                for kind in KINDS
            },
        )
        return ServiceBinding(NAME, lambda server: server.add_generic_rpc_handlers((handlers,)))


KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


async def call(channel: grpc.aio.Channel, kind: str, text: str | bytes, **arguments) -> list[str]:
    """Call one kind with one request; returns the texts of the answers."""
    encode = StringValue.SerializeToString if isinstance(text, str) else bytes
    request = StringValue(value=text) if isinstance(text, str) else text
    method = getattr(channel, kind)(
        f"/{NAME}/{kind}",
        request_serializer=encode,
        response_deserializer=StringValue.FromString,
    )

    async def requests():
        yield request

    made = method(requests() if kind.startswith("stream") else request, **arguments)
    if kind.endswith("stream"):
        return [answer.value async for answer in made]
    return [(await made).value]
