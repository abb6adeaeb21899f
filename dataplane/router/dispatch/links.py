"""The two ways from a front end to the dispatcher: within the process, and over a stream."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import grpc
from steelyard.v1 import dispatch_pb2, dispatch_pb2_grpc

from dataplane.core.delegation import Forward, Submission
from dataplane.core.events import Action, TokensStreamed
from dataplane.router.dispatch.hub import Hub
from dataplane.router.dispatch.lease import Holder
from dataplane.router.dispatch.wire import from_answer, to_attach
from servicekit.channel import open_channel
from servicekit.clock import Clock

SIGN_OF_LIFE_SECONDS = 0.1
SILENCE_SECONDS = 0.45
_TOKENS_EVERY_SECONDS = 0.02


class LocalLink:
    """The dispatcher is this router."""

    def __init__(self, hub: Hub, router_id: str, on_action: Callable[[Action], None]) -> None:
        self._hub = hub
        self._router_id = router_id
        self._on_action = on_action
        hub.attach(router_id, on_action)

    def send(self, message: Forward) -> None:
        """Pass a message on."""
        self._hub.receive(self._router_id, message)

    def close(self) -> None:
        """Take leave."""
        self._hub.detach(self._router_id, self._on_action)


class RemoteLink:
    """The dispatcher is another router; one stream carries everything.

    Counts of streamed tokens are gathered for a few milliseconds, all else goes at once. A stream
    that ends, or is silent for longer than a few signs of life, is lost, and `on_lost` is called
    once. Messages with an older token than the lease's are dropped.
    """

    def __init__(
        self,
        holder: Holder,
        pool: str,
        *,
        router_id: str,
        clock: Clock,
        on_ready: Callable[["RemoteLink"], None],
        on_action: Callable[[Action], None],
        on_lost: Callable[["RemoteLink", str], None],
    ) -> None:
        self.holder = holder
        self._pool = pool
        self._router_id = router_id
        self._clock = clock
        self._on_ready = on_ready
        self._on_action = on_action
        self._on_lost = on_lost
        self._outgoing: deque[dispatch_pb2.AttachRequest] = deque()
        self._tokens: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="dispatch-link")

    def send(self, message: Forward) -> None:
        """Pass a message on."""
        if isinstance(message, TokensStreamed):
            first = message.request_id not in self._tokens
            self._tokens[message.request_id] = (
                self._tokens.get(message.request_id, 0) + message.count
            )
            if first and len(self._tokens) == 1:
                loop = asyncio.get_running_loop()
                loop.call_later(_TOKENS_EVERY_SECONDS, self._flush_tokens)
            return
        if not isinstance(message, Submission):
            # Events of one request stay in order.
            counted = self._tokens.pop(message.request_id, 0)
            if counted:
                self._push(TokensStreamed(message.request_id, counted))
        self._push(message)

    def close(self) -> None:
        """Take leave; `on_lost` is not called."""
        self._task.cancel()

    def _push(self, message: Forward) -> None:
        self._outgoing.append(to_attach(message, self._clock.monotonic()))
        self._wake.set()

    def _flush_tokens(self) -> None:
        tokens, self._tokens = self._tokens, {}
        for request_id, count in tokens.items():
            self._push(TokensStreamed(request_id, count))

    async def _run(self) -> None:
        reason = "the stream ended"
        try:
            async with open_channel(self.holder.address) as channel:
                await self._follow(dispatch_pb2_grpc.DispatchServiceStub(channel))
        except TimeoutError:
            reason = "it fell silent"
        except grpc.aio.AioRpcError as error:
            reason = error.details() or error.code().name
        self._on_lost(self, reason)

    async def _follow(self, stub: dispatch_pb2_grpc.DispatchServiceStub) -> None:
        call = stub.Attach(self._requests())
        try:
            ready = False
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    answer = await call.read()
                if not isinstance(answer, dispatch_pb2.AttachResponse):
                    return
                if answer.fencing_token != self.holder.token:
                    continue
                if not ready:
                    ready = True
                    self._on_ready(self)
                action = from_answer(answer)
                if action is not None:
                    self._on_action(action)
        finally:
            call.cancel()

    async def _requests(self) -> AsyncIterator[dispatch_pb2.AttachRequest]:
        hello = dispatch_pb2.Hello(
            router_id=self._router_id, pool=self._pool, fencing_token=self.holder.token
        )
        yield dispatch_pb2.AttachRequest(hello=hello)
        while True:
            while self._outgoing:
                yield self._outgoing.popleft()
            self._wake.clear()
            await self._wake.wait()
