"""Envoy's external processor: the router as endpoint picker behind an existing Envoy or Gateway API.

The protocol is the Gateway API inference extension's endpoint picker (v1): the decode engine's address
goes into the header and the `envoy.lb` metadata `x-gateway-destination-endpoint`, the prefill engine's
into `x-prefiller-host-port`, which a prefill/decode sidecar reads. A placement is charged to the
router's ledger until Envoy ends the exchange.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from google.protobuf.struct_pb2 import Struct

from dataplane.gateway.asking import ApiKeys, Asker, asker_of
from dataplane.gateway.errors import HttpFault, error_body, fault_of
from dataplane.gateway.measuring import Measuring
from dataplane.gateway.values import HttpRequest
from dataplane.router.desk import Desk
from dataplane.router.intake import Intake, Taken
from servicekit.clock import Clock
from servicekit.errors import SteelyardError

DESTINATION = "x-gateway-destination-endpoint"
PREFILLER = "x-prefiller-host-port"
NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
_STREAMED_PIECE_BYTES = 62_000
_MAX_HOLD_SECONDS = 3600.0
_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED


@dataclass(slots=True)
class _Exchange:
    """One HTTP request as Envoy shows it."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    subset: frozenset[str] | None = None
    duplex: bool = False
    reservation_id: str = ""


@dataclass(frozen=True, slots=True)
class Picked:
    """Where a request goes; `prefill` is empty where its decode engine computes the prompt."""

    decode: str
    prefill: str
    reservation_id: str


class Picker(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    """Answers Envoy.

    Args:
        endpoints: host:port of each engine's own HTTP server, by instance id; others are not picked.
    """

    def __init__(
        self,
        *,
        measuring: Measuring,
        intake: Intake,
        desk: Desk,
        clock: Clock,
        endpoints: Mapping[str, str],
        max_body_bytes: int,
    ) -> None:
        self._measuring = measuring
        self._intake = intake
        self._desk = desk
        self._clock = clock
        self._endpoints = endpoints
        self._max_body_bytes = max_body_bytes
        self._everybody = ApiKeys({})

    async def Process(  # noqa: N802
        self, requests: AsyncIterator[ext_proc.ProcessingRequest], context: Any
    ) -> AsyncIterator[ext_proc.ProcessingResponse]:
        """Follow one HTTP exchange."""
        del context
        exchange = _Exchange()
        try:
            async for message in requests:
                try:
                    for answer in await self._answers(exchange, message):
                        yield answer
                except HttpFault as fault:
                    yield _immediate(fault)
                    return
        finally:
            if exchange.reservation_id:
                self._desk.cancel(exchange.reservation_id)

    async def _answers(
        self, exchange: _Exchange, message: ext_proc.ProcessingRequest
    ) -> list[ext_proc.ProcessingResponse]:
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            return await self._request_headers(exchange, message)
        if kind == "request_body":
            return await self._request_body(exchange, message.request_body)
        answer = ext_proc.ProcessingResponse()
        if kind is not None:
            getattr(answer, kind).SetInParent()
        if kind == "response_body" and exchange.duplex:
            streamed = answer.response_body.response.body_mutation.streamed_response
            streamed.body = message.response_body.body
            streamed.end_of_stream = message.response_body.end_of_stream
        return [answer]

    async def _request_headers(
        self, exchange: _Exchange, message: ext_proc.ProcessingRequest
    ) -> list[ext_proc.ProcessingResponse]:
        for header in message.request_headers.headers.headers:
            value = header.raw_value or header.value.encode()
            exchange.headers[header.key.lower().encode()] = value
        exchange.duplex = message.protocol_config.request_body_mode == _DUPLEX
        exchange.subset = _subset(message.metadata_context)
        if message.request_headers.end_of_stream:
            raise HttpFault(400, "there is no body to pick an engine for")
        if exchange.duplex:
            return []  # headers are answered once the body is known
        answer = ext_proc.ProcessingResponse()
        answer.request_headers.SetInParent()
        return [answer]

    async def _request_body(
        self, exchange: _Exchange, piece: ext_proc.HttpBody
    ) -> list[ext_proc.ProcessingResponse]:
        exchange.body += piece.body
        if len(exchange.body) > self._max_body_bytes:
            raise HttpFault(413, f"the body exceeds {self._max_body_bytes} bytes")
        if not piece.end_of_stream:
            return []
        picked = await self._pick(exchange)
        exchange.reservation_id = picked.reservation_id
        answer = ext_proc.ProcessingResponse(dynamic_metadata=_metadata(picked))
        if not exchange.duplex:
            _mutate(answer.request_body.response, picked)
            return [answer]
        _mutate(answer.request_headers.response, picked)
        return [answer, *_echo(bytes(exchange.body))]

    async def _pick(self, exchange: _Exchange) -> Picked:
        path = exchange.headers.get(b":path", b"").partition(b"?")[0]
        request = HttpRequest(
            exchange.headers.get(b":method", b"POST"),
            path,
            exchange.headers,
            bytes(exchange.body),
            self._clock.monotonic(),
        )
        asker = asker_of(request, self._everybody)
        prompt_field = "messages" if path.endswith(b"/chat/completions") else "prompt"
        try:
            message = await self._measuring.message(request, asker)
            taken = await self._intake.take(message, request.arrived_at, asker.policy)
            return self._place(taken, exchange.subset, asker)
        except SteelyardError as error:
            raise fault_of(error, prompt_field) from error

    def _place(self, taken: Taken, subset: frozenset[str] | None, asker: Asker) -> Picked:
        del asker
        pool = taken.driver.pool
        out = frozenset(
            instance.instance_id
            for instance in pool.roster.instances
            if not self._may_pick(instance.instance_id, subset)
        )
        request = replace(taken.request, excluded=taken.request.excluded | out)
        placement = self._desk.place(taken.driver.name, request, taken.policy, pool.view)
        reservation_id = self._desk.reserve(pool, request, placement, _MAX_HOLD_SECONDS)
        prefill = placement.prefill_id
        return Picked(
            decode=self._endpoints[placement.decode_id],
            prefill=self._endpoints[prefill] if prefill else "",
            reservation_id=reservation_id,
        )

    def _may_pick(self, instance_id: str, subset: frozenset[str] | None) -> bool:
        endpoint = self._endpoints.get(instance_id)
        return endpoint is not None and (subset is None or endpoint in subset)


def _subset(metadata: base_pb2.Metadata) -> frozenset[str] | None:
    """Return the endpoints that Envoy allows; None where it allows all."""
    hint = metadata.filter_metadata.get(SUBSET_NAMESPACE)
    if hint is None or SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        return frozenset(entry.string_value for entry in value.list_value.values)
    return frozenset(entry.strip() for entry in value.string_value.split(",") if entry.strip())


def _metadata(picked: Picked) -> Struct:
    struct = Struct()
    struct.update({NAMESPACE: {DESTINATION: picked.decode}})
    return struct


def _mutate(response: ext_proc.CommonResponse, picked: Picked) -> None:
    """Set the headers that route the request, whatever the client sent under their names."""
    response.clear_route_cache = True
    mutation = response.header_mutation
    for name, value in ((DESTINATION, picked.decode), (PREFILLER, picked.prefill)):
        if value:
            option = mutation.set_headers.add()
            option.header.key = name
            option.header.raw_value = value.encode()
            option.append_action = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
        else:
            mutation.remove_headers.append(name)


def _echo(body: bytes) -> list[ext_proc.ProcessingResponse]:
    """Give the body back in pieces, as a full-duplex exchange asks."""
    answers = []
    for start in range(0, max(len(body), 1), _STREAMED_PIECE_BYTES):
        answer = ext_proc.ProcessingResponse()
        streamed = answer.request_body.response.body_mutation.streamed_response
        streamed.body = body[start : start + _STREAMED_PIECE_BYTES]
        streamed.end_of_stream = start + _STREAMED_PIECE_BYTES >= len(body)
        answers.append(answer)
    return answers


def _immediate(fault: HttpFault) -> ext_proc.ProcessingResponse:
    """Have Envoy answer by itself."""
    answer = ext_proc.ProcessingResponse()
    response = answer.immediate_response
    response.status.code = fault.status
    response.body = error_body(fault)
    response.details = "steelyard_refused"
    for name, value in ((b"content-type", b"application/json"), *fault.headers()):
        option = response.headers.set_headers.add()
        option.header.key = name.decode()
        option.header.raw_value = value
    return answer
