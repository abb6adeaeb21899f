"""HTTP to one vLLM server on this host: calls, and the meaning of its refusals."""

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from dataplane.agent.errors import EngineAnswerUnreadable, EngineFailed, EngineUnavailable
from dataplane.agent.http_client import Answer, HttpClient
from dataplane.agent.vllm_shapes import ErrorAnswer, StreamError
from servicekit.errors import InvalidArgument, NotFound, SteelyardError

COMPLETIONS = "/v1/completions"
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

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    def __repr__(self) -> str:
        """Show where the server is."""
        return f"VllmHttp({self._client!r})"

    async def post(self, path: str, body: bytes, request_id: str = "") -> bytes:
        """Post JSON and return the answer's bytes.

        Raises:
            SteelyardError: the server refused, failed, or does not answer.
        """
        status, data = await self._whole("POST", path, body, request_id)
        if status != HTTPStatus.OK:
            raise refusal(status, data)
        return data

    async def status_of(self, path: str, body: bytes) -> int:
        """Post JSON and return only the status.

        Raises:
            EngineUnavailable: the server does not answer.
        """
        status, _ = await self._whole("POST", path, body)
        return status

    async def stream(self, path: str, body: bytes, request_id: str) -> Answer:
        """Post JSON and return the open answer; closing it aborts the request.

        Raises:
            SteelyardError: the server refused, failed, or does not answer.
        """
        try:
            answer = await self._client.ask("POST", path, body, _headers(request_id))
            if answer.status == HTTPStatus.OK:
                return answer
            data = await _body_of(answer)
        except (TimeoutError, OSError) as error:
            raise unreachable(error) from error
        raise refusal(answer.status, data)

    async def get(self, path: str, timeout_seconds: float = 10.0) -> bytes:
        """Get a page.

        Raises:
            SteelyardError: the server refused, failed, or does not answer.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                status, data = await self._whole("GET", path)
        except TimeoutError as error:
            raise unreachable(error) from error
        if status != HTTPStatus.OK:
            raise refusal(status, data)
        return data

    async def close(self) -> None:
        """Hang up; requests under way are aborted by that."""
        await self._client.close()

    async def _whole(
        self, method: str, path: str, body: bytes = b"", request_id: str = ""
    ) -> tuple[int, bytes]:
        try:
            answer = await self._client.ask(method, path, body, _headers(request_id))
            return answer.status, await _body_of(answer)
        except (TimeoutError, OSError) as error:
            raise unreachable(error) from error


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


def _headers(request_id: str) -> Sequence[tuple[str, str]]:
    """Return the headers of a request; an id that no header can hold is left out."""
    if request_id and request_id.isascii() and request_id.isprintable():
        return (("x-request-id", request_id),)
    return ()


async def _body_of(answer: Answer) -> bytes:
    """Read an answer to its end; one that is not read to its end aborts its request."""
    try:
        data = await answer.read_all()
    except BaseException:
        answer.close()
        raise
    answer.release()
    return data


def unreachable(error: Exception) -> EngineUnavailable:
    """Return the error for a connection that could not be had, or broke."""
    return EngineUnavailable(f"the engine does not answer: {error!r}")
