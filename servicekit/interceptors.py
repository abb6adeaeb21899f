"""The one server interceptor: reads requests, maps errors, counts, and logs one line a call.

`context.code()` of grpc.aio is None after success, cancellation and unhandled exceptions alike, so
the outcome is taken from how the handler ended, not from the context.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, contextmanager
from functools import cache
from typing import Any, NoReturn

import grpc
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from servicekit.clock import Clock
from servicekit.decoding import Refused, guarded
from servicekit.errors import Internal, SteelyardError
from servicekit.metrics import RPC_BUCKETS_SECONDS
from servicekit.status import to_grpc
from servicekit.tracing import CallContext, enter_call

Translate = Callable[[Exception], SteelyardError | None]
"""Gives the meaning of a foreign exception; None where it has none and is a bug."""

QUIET_SERVICES = frozenset(
    {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "grpc.channelz.v1.Channelz",
    }
)
"""Their calls are logged at debug level: probes come every few seconds."""


class _Call:
    """Outcome of one call, filled in by `_observed`."""

    __slots__ = ("code", "context", "log", "reason")

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], log: CallContext) -> None:
        self.context = context
        self.log = log
        self.code = grpc.StatusCode.OK
        self.reason = ""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps handlers of all four kinds that are coroutines or async generators.

    Handlers raise `SteelyardError`s and read requests from their arguments, not from
    `context.read()`. Whatever else they raise becomes INTERNAL, with its traceback in the log and
    nothing of it on the wire.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry,
        clock: Clock,
        max_message_bytes: int,
        translate: Translate | None = None,
    ) -> None:
        self._clock = clock
        self._max_message_bytes = max_message_bytes
        self._translate = translate
        self._log = structlog.get_logger("servicekit.rpc").bind()
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        labels = ("grpc_service", "grpc_method", "grpc_code")
        handled = Counter(
            "grpc_server_handled_total", "Calls that ended.", labels, registry=registry
        )
        seconds = Histogram(
            "grpc_server_handling_seconds",
            "Length of a call.",
            labels[:2],
            buckets=RPC_BUCKETS_SECONDS,
            registry=registry,
        )
        # Looking a series up by its labels costs more than counting.
        self._handled, self._seconds = cache(handled.labels), cache(seconds.labels)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Give gRPC the method's handler, wrapped; it asks for every call, we wrap once."""
        known = self._wrapped.get(handler_call_details.method)
        if known is not None:
            return known
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if handler.unary_unary:
            wrapped, make = handler.unary_unary, grpc.unary_unary_rpc_method_handler
        elif handler.stream_unary:
            wrapped, make = handler.stream_unary, grpc.stream_unary_rpc_method_handler
        elif handler.unary_stream:
            wrapped, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        else:
            wrapped, make = handler.stream_stream, grpc.stream_stream_rpc_method_handler
        outer = self._wrap(
            wrapped, service, method, streams_requests=bool(handler.request_streaming)
        )
        decode = handler.request_deserializer
        made: grpc.RpcMethodHandler[Any, Any] = make(
            outer,
            request_deserializer=decode and guarded(decode, self._max_message_bytes),
            response_serializer=handler.response_serializer,
        )
        self._wrapped[handler_call_details.method] = made
        return made

    def observed(
        self, service: str, method: str, handler: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap a handler that is called for one of many requests on a stream, as if for a call.

        It is given a context with what is used here of gRPC's: `invocation_metadata`,
        `time_remaining`, `code` and `abort_with_status`.
        """
        return self._wrap(handler, service, method, streams_requests=False)

    def _wrap(
        self, inner: Callable[..., Any], service: str, method: str, *, streams_requests: bool
    ) -> Callable[..., Any]:
        """Wrap one handler; async generators stay async generators, since gRPC looks."""
        admit = _checked_stream if streams_requests else _checked

        async def answer(request: Any, context: Any) -> Any:
            with self._observed(service, method, context) as call:
                try:
                    return await inner(admit(request), context)
                except Exception as exception:  # noqa: BLE001  the last one to see it
                    await self._refuse(call, exception)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._observed(service, method, context) as call:
                try:
                    # Closed here, not by the collector: a cancelled call cleans up at once.
                    async with aclosing(inner(admit(request), context)) as responses:
                        async for response in responses:
                            yield response
                except Exception as exception:  # noqa: BLE001  the last one to see it
                    await self._refuse(call, exception)

        return stream if inspect.isasyncgenfunction(inner) else answer

    async def _refuse(self, call: _Call, exception: Exception) -> NoReturn:
        """End the call with the status that the exception means.

        Raises:
            AbortError: always; it is how grpc.aio ends a call.
        """
        if isinstance(exception, grpc.aio.AbortError):
            call.code = _set_code(call.context) or grpc.StatusCode.UNKNOWN
            raise exception
        error = exception if isinstance(exception, SteelyardError) else None
        if error is None and self._translate is not None:
            error = self._translate(exception)
        if error is None:
            self._log.error("rpc_crashed", request_id=call.log.request_id, exc_info=exception)
            error = Internal(
                "internal error; the server's log has the details",
                metadata={"request_id": call.log.request_id},
            )
        call.code, call.reason = error.code, error.reason
        call.log.log_fields.setdefault("message", error.message)
        await call.context.abort_with_status(to_grpc(error))
        raise AssertionError("abort_with_status returned")

    @contextmanager
    def _observed(self, service: str, method: str, context: Any) -> Any:
        """Count, time and log a call, however it ends."""
        started = self._clock.monotonic()
        call = _Call(context, enter_call(context.invocation_metadata() or ()))
        try:
            yield call
            call.code = _set_code(context) or call.code
        except (asyncio.CancelledError, GeneratorExit):
            left_seconds = context.time_remaining()
            late = left_seconds is not None and left_seconds <= 0
            call.code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        finally:
            seconds = self._clock.monotonic() - started
            self._handled(service, method, call.code.name).inc()
            self._seconds(service, method).observe(seconds)
            self._write_line(service, method, call, seconds)

    def _write_line(self, service: str, method: str, call: _Call, seconds: float) -> None:
        level = logging.DEBUG if service in QUIET_SERVICES else logging.INFO
        if not self._log.is_enabled_for(level):
            return
        fields: dict[str, Any] = {
            "service": service,
            "method": method,
            "code": call.code.name,
            "seconds": round(seconds, 6),
            "request_id": call.log.request_id,
            "trace_id": call.log.trace_id,
            **call.log.log_fields,
        }
        if call.reason:
            fields["reason"] = call.reason
        self._log.log(level, "rpc_handled", **fields)


def _set_code(context: Any) -> grpc.StatusCode | None:
    """The code a handler has set itself; the context knows no other."""
    code = context.code()
    return code if isinstance(code, grpc.StatusCode) else None


def _checked(request: Any) -> Any:
    """Pass a request on, or raise what is wrong with it."""
    if isinstance(request, Refused):
        raise request.error
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Pass requests on until one that could not be read."""
    async for request in requests:
        yield _checked(request)
