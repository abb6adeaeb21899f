"""HTTP to one vLLM server on this host: calls, and the meaning of its refusals."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from dataplane.agent.errors import EngineAnswerUnreadable, EngineFailed, EngineUnavailable
from dataplane.agent.vllm_shapes import ErrorAnswer, StreamError
from servicekit.errors import InvalidArgument, NotFound, SteelyardError

COMPLETIONS = "/v1/completions"
_CONNECT_SECONDS = 5.0
_MESSAGE_CHARACTERS = 500
_FIELDS = {
    "max_tokens": "max_tokens",
    "input_tokens": "prompt_token_ids",
    "prompt": "prompt_token_ids",
    "model": "model",
}
"""Our names of vLLM's parameters; the others are sampling parameters of the same name."""


class VllmHttp:
    """One server's HTTP interface."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self._base_url = base_url.rstrip("/")

    def __repr__(self) -> str:
        """Show where the server is."""
        return f"VllmHttp({self._base_url})"

    async def post(self, path: str, body: bytes, request_id: str = "") -> bytes:
        """Post JSON and return the answer's bytes.

        Raises:
            SteelyardError: the server refused, failed, or does not answer.
        """
        async with (
            _translated(),
            self._session.post(
                self._base_url + path, data=body, headers=_headers(request_id)
            ) as response,
        ):
            data = await response.read()
            if response.status != HTTPStatus.OK:
                raise refusal(response.status, data)
            return data

    async def status_of(self, path: str, body: bytes) -> int:
        """Post JSON and return only the status.

        Raises:
            EngineUnavailable: the server does not answer.
        """
        async with (
            _translated(),
            self._session.post(self._base_url + path, data=body, headers=_headers("")) as response,
        ):
            await response.read()
            return response.status

    async def stream(self, path: str, body: bytes, request_id: str) -> aiohttp.ClientResponse:
        """Post JSON and return the open response; closing it aborts the request.

        Raises:
            SteelyardError: the server refused, failed, or does not answer.
        """
        async with _translated():
            response = await self._session.post(
                self._base_url + path, data=body, headers=_headers(request_id)
            )
            if response.status != HTTPStatus.OK:
                try:
                    data = await response.read()
                finally:
                    response.release()
                raise refusal(response.status, data)
            return response

    async def get(self, path: str, timeout_seconds: float = 10.0) -> bytes:
        """Get a page.

        Raises:
            SteelyardError: the server refused, failed, or does not answer.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        url = self._base_url + path
        async with _translated(), self._session.get(url, timeout=timeout) as response:
            data = await response.read()
            if response.status != HTTPStatus.OK:
                raise refusal(response.status, data)
            return data


def new_session() -> aiohttp.ClientSession:
    """Open a session for one engine: as many connections as requests, no time limit on answers."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        trust_env=False,
    )


def refusal(status: int, data: bytes) -> SteelyardError:
    """Return what a status other than 200 means."""
    return meaning(status, _read_error(data))


def meaning(status: int, error: StreamError) -> SteelyardError:
    """Return what an error of the server means, as a status or inside a stream."""
    message = error.message[:_MESSAGE_CHARACTERS] or f"the engine answered {status}"
    if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        return InvalidArgument.of(_field(error.param), message)
    if status == HTTPStatus.NOT_FOUND:
        return NotFound(message, reason="ENGINE_DOES_NOT_KNOW")
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        return EngineUnavailable(message)
    return EngineFailed(message, metadata={"http_status": str(status)})


def unreadable(what: str, error: Exception) -> EngineAnswerUnreadable:
    """Return the error for an answer of another shape; its content stays out of it."""
    return EngineAnswerUnreadable(f"{what} of the engine has another shape: {error}")


def _read_error(data: bytes) -> StreamError:
    try:
        return msgspec.json.decode(data, type=ErrorAnswer).error
    except msgspec.DecodeError:
        return StreamError()


def _field(param: str | None) -> str:
    if not param:
        return "sampling"
    name = param.removeprefix("body.")
    return _FIELDS.get(name, f"sampling.{name}")


def _headers(request_id: str) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if request_id:
        headers["X-Request-Id"] = request_id
    return headers


@asynccontextmanager
async def _translated() -> AsyncIterator[Any]:
    """Turn failures of the connection into our errors."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineUnavailable(f"the engine does not answer: {error!r}") from error
