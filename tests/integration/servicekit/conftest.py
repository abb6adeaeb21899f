"""A service of all four call kinds that does what its text says, served on loopback."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from google.protobuf.wrappers_pb2 import StringValue
from prometheus_client import CollectorRegistry

from servicekit.channel import open_channel
from servicekit.clock import SystemClock
from servicekit.errors import InvalidArgument, NotFound, Unavailable
from servicekit.options import ServerOptions
from servicekit.server import RpcServer, ServiceBinding
from servicekit.status import from_rpc_error
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


def translate(error: Exception):
    """Give FileNotFoundError a meaning."""
    return NotFound(str(error)) if isinstance(error, FileNotFoundError) else None


class Running:
    """A served Echo and a channel to it."""

    def __init__(self, **options) -> None:
        self.registry = CollectorRegistry()
        self.service = Echo()
        self.server = RpcServer(
            ServerOptions(http_listen="127.0.0.1:0", max_message_bytes=65_536, **options),
            services=[self.service.binding()],
            registry=self.registry,
            clock=SystemClock(),
            translate=translate,
        )

    async def __aenter__(self):
        await self.server.start()
        await self.server.set_serving(True)
        self.channel = open_channel(self.server.address)
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.stop(grace_seconds=0)

    def handled(self, kind: str, code: str) -> float:
        labels = {"grpc_service": NAME, "grpc_method": kind, "grpc_code": code}
        return self.registry.get_sample_value("grpc_server_handled_total", labels) or 0.0

    async def fail(self, kind: str, text, **arguments):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(kind, text, **arguments)
        return from_rpc_error(caught.value)

    async def call(self, kind: str, text: str | bytes, **arguments) -> list[str]:
        """Call one kind with one request; returns the texts of the answers."""
        encode = StringValue.SerializeToString if isinstance(text, str) else bytes
        request = StringValue(value=text) if isinstance(text, str) else text
        method = getattr(self.channel, kind)(
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


@pytest.fixture
def serve():
    """Give the class that serves an Echo, for servers with other options."""
    return Running


@pytest_asyncio.fixture
async def running():
    """Yield a served Echo."""
    async with Running() as served:
        yield served
