"""What the gateway answers when it does not serve, in the words and shape of an OpenAI server.

The shape is vLLM's: `{"error": {"message", "type", "param", "code"}}`, the code being the status, so
that a client written for one engine reads our errors as it read that engine's.
"""

import math
import re

import grpc
import msgspec

from servicekit.errors import SteelyardError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 503,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_PROMPT_FIELDS = frozenset({"token_ids", "token_ids.ids", "prompt_token_ids", "text"})


class HttpFault(Exception):  # noqa: N818
    """Raised when a request is answered with an error; the client corrects `param`, or waits."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return what the answer's head says beside the status."""
        if self.retry_after_seconds is None:
            return []
        return [(b"retry-after", b"%d" % math.ceil(self.retry_after_seconds))]


def refused(field: str, why: str) -> HttpFault:
    """Make the error for a field that is wrong or not supported; the message begins with it."""
    return HttpFault(400, f"{field}: {why}", param=field)


def error_object(fault: HttpFault) -> dict[str, object]:
    """Return the object that an answer or an event carries."""
    kind = _TYPES.get(fault.status, "BadRequestError" if fault.status < 500 else "ServerError")
    return {
        "error": {
            "message": fault.message,
            "type": kind,
            "param": fault.param,
            "code": fault.status,
        }
    }


def error_body(fault: HttpFault) -> bytes:
    """Return the body of an error."""
    return msgspec.json.encode(error_object(fault))


def fault_of(error: SteelyardError, prompt_field: str) -> HttpFault:
    """Translate a router's error.

    Args:
        error: What it raised.
        prompt_field: What the client calls the prompt: "prompt" or "messages".
    """
    status = _STATUS.get(error.code, 500)
    param = None
    if error.violations:
        param = _client_name(error.violations[0].field, prompt_field)
    elif error.reason == "UNKNOWN_MODEL":
        param = "model"
    elif error.reason == "NO_TOKENIZER":
        param = prompt_field
    retry_after = error.retry_after_seconds
    if retry_after is None and status in (429, 503):
        retry_after = 1.0
    return HttpFault(status, error.message, param=param, retry_after_seconds=retry_after)


def fault_of_shape(error: msgspec.MsgspecError, root: str = "body") -> HttpFault:
    """Translate a body that is no JSON, or whose field is of another type."""
    text = str(error)
    match = _PATH.search(text)
    param = match[1] if match and match[1] else None
    message = text[: match.start()] if match else text
    return HttpFault(400, f"{param or root}: {message}", param=param)


def _client_name(field: str, prompt_field: str) -> str:
    """Return a field's name in the client's request."""
    if field in _PROMPT_FIELDS:
        return prompt_field
    return field.removeprefix("sampling.")
