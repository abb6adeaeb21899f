"""DispatchService: other routers' front ends attach here while this router holds the lease."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from steelyard.v1 import dispatch_pb2, dispatch_pb2_grpc

from dataplane.core.events import Action
from dataplane.router.dispatch.coordinator import Dispatching
from dataplane.router.dispatch.hub import Hub
from dataplane.router.dispatch.links import SIGN_OF_LIFE_SECONDS
from dataplane.router.dispatch.wire import from_attach, to_answer
from servicekit.clock import Clock
from servicekit.errors import FailedPrecondition, InvalidArgument

Context = grpc.aio.ServicerContext[Any, Any]


class DispatchServicer(dispatch_pb2_grpc.DispatchServiceServicer):
    """Answers front ends; one a process."""

    def __init__(self, dispatching: Dispatching, clock: Clock) -> None:
        self._dispatching = dispatching
        self._clock = clock

    async def Attach(  # noqa: N802
        self,
        request_iterator: AsyncIterator[dispatch_pb2.AttachRequest],
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[dispatch_pb2.AttachResponse]:
        """Decide for a front end; see the proto."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("event") != "hello":
            raise InvalidArgument.of("hello", "is missing; it is the first message of a stream")
        hub = self._dispatching.hub(first.hello.pool)
        if hub is None or hub.token != first.hello.fencing_token:
            raise FailedPrecondition(
                f"this router does not hold the lease {first.hello.fencing_token} of "
                f"{first.hello.pool!r}",
                reason="NOT_DISPATCHER",
            )
        answers: asyncio.Queue[Action | None] = asyncio.Queue()
        reading = asyncio.get_running_loop().create_task(
            self._read(request_iterator, hub, first.hello.router_id, answers)
        )
        port = answers.put_nowait
        hub.attach(first.hello.router_id, port)
        try:
            yield dispatch_pb2.AttachResponse(fencing_token=hub.token)
            while hub.holds and not reading.done():
                try:
                    async with asyncio.timeout(SIGN_OF_LIFE_SECONDS):
                        action = await answers.get()
                except TimeoutError:
                    yield dispatch_pb2.AttachResponse(fencing_token=hub.token)
                    continue
                if action is not None and hub.holds:
                    yield to_answer(action, hub.token)
        finally:
            reading.cancel()
            hub.detach(first.hello.router_id, port)

    async def _read(
        self,
        requests: AsyncIterator[dispatch_pb2.AttachRequest],
        hub: Hub,
        router_id: str,
        answers: "asyncio.Queue[Action | None]",
    ) -> None:
        try:
            async for message in requests:
                event = from_attach(message, self._clock.monotonic())
                if event is not None:
                    hub.receive(router_id, event)
        finally:
            answers.put_nowait(None)
