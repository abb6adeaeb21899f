"""From a path to who answers it; errors in one shape, one log line and one count a request."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import structlog

from dataplane.gateway.asking import ApiKeys, Asker, asker_of
from dataplane.gateway.errors import HttpFault, error_body
from dataplane.gateway.exchange import Exchange
from dataplane.gateway.metrics import GatewayMetrics
from servicekit.clock import Clock
from servicekit.tracing import current_call

Endpoint = Callable[[Exchange, Asker], Awaitable[None]]
OPEN_PATHS = frozenset({b"/health", b"/ping"})
"""Answered without an API key: probes have none."""
_QUIET_PATHS = frozenset({b"/health", b"/ping", b"/metrics"})


class Routes:
    """Has requests answered.

    Args:
        table: Endpoints by path and method.
    """

    def __init__(
        self,
        table: Mapping[bytes, Mapping[bytes, Endpoint]],
        *,
        keys: ApiKeys,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self._table = table
        self._keys = keys
        self._requests = cache(metrics.requests.labels)
        self._clock = clock
        self._nobodys = ApiKeys({})
        self._log = structlog.get_logger("dataplane.gateway").bind()

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request, whatever it is."""
        request = exchange.request
        path = request.path if request.path in self._table else b"other"
        asker: Asker | None = None
        try:
            endpoint = self._endpoint(exchange)
            keys = self._nobodys if request.path in OPEN_PATHS else self._keys
            asker = asker_of(request, keys)
            await endpoint(exchange, asker)
        except HttpFault as fault:
            headers = fault.headers()
            call = current_call()
            if call is not None:
                headers.append((b"x-request-id", call.request_id.encode()))
                call.log_fields["message"] = fault.message
            exchange.respond(fault.status, error_body(fault), headers=headers)
        finally:
            status = exchange.status if exchange.ended else 499
            self._requests(path.decode(), str(status)).inc()
            self._write_line(exchange, asker, path.decode(), status)

    def _endpoint(self, exchange: Exchange) -> Endpoint:
        request = exchange.request
        methods = self._table.get(request.path)
        if methods is None:
            shown = request.path.decode("latin-1")[:200]
            raise HttpFault(404, f"there is nothing at {shown}")
        method = b"GET" if request.method == b"HEAD" else request.method
        endpoint = methods.get(method)
        if endpoint is None:
            raise HttpFault(405, f"{request.method.decode()} is not answered here")
        return endpoint

    def _write_line(self, exchange: Exchange, asker: Asker | None, path: str, status: int) -> None:
        level = logging.DEBUG if exchange.request.path in _QUIET_PATHS else logging.INFO
        if not self._log.is_enabled_for(level):
            return
        call = current_call()
        fields: dict[str, Any] = {
            "path": path,
            "status": status,
            "seconds": round(self._clock.monotonic() - exchange.request.arrived_at, 6),
        }
        if call is not None:
            fields |= {
                "request_id": call.request_id,
                "trace_id": call.trace_id,
                **call.log_fields,
            }
        if asker is not None and asker.session_id:
            fields["session_id"] = asker.session_id
        if asker is not None and asker.tenant:
            fields["tenant"] = asker.tenant
        self._log.log(level, "http_handled", **fields)
