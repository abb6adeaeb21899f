"""What an agent refuses or fails with; callers over the network see code and reason."""

from dataplane.core.handoff import HandoffRefusal
from servicekit.errors import (
    Aborted,
    FailedPrecondition,
    Internal,
    NotFound,
    Unavailable,
)


class EngineUnavailable(Unavailable):
    """Raised while the engine does not answer; the router places the request elsewhere."""

    default_reason = "ENGINE_UNAVAILABLE"


class EngineFailed(Internal):
    """Raised when the engine gave a request up (a lost KV pull, a fault of its own).

    The router starts over with a new prefill, unless tokens were streamed already.
    """

    default_reason = "ENGINE_FAILED"


class HandoffRefused(FailedPrecondition):
    """Raised when a hand-off must not reach the engine; the router prefills again."""

    def __init__(self, refusal: HandoffRefusal, message: str) -> None:
        super().__init__(message, reason=refusal.value)
        self.refusal = refusal


class EpochChanged(FailedPrecondition):
    """Raised when the engine has restarted since the router looked; the router looks again."""

    default_reason = "EPOCH_CHANGED"


class WrongRole(FailedPrecondition):
    """Raised when a prefill goes to a decode-only engine or the reverse; the router is confused."""

    default_reason = "WRONG_ROLE"


class NotSupported(FailedPrecondition):
    """Raised when this engine cannot do that at all; the caller does without."""

    default_reason = "NOT_SUPPORTED"


class DuplicateRequest(FailedPrecondition):
    """Raised when a request id is live on this engine already; the caller chooses a new one."""

    default_reason = "DUPLICATE_REQUEST"


class RequestAborted(Aborted):
    """Raised when somebody aborted the request by its id; whoever sent it has lost interest."""

    default_reason = "REQUEST_ABORTED"


class NoTokenizer(NotFound):
    """Raised when the engine has no tokenizer.json; the caller sends token ids."""

    default_reason = "NO_TOKENIZER"


class EngineAnswerUnreadable(Internal):
    """Raised when the engine's answer has not the shape we know; the operator checks versions."""

    default_reason = "ENGINE_ANSWER_UNREADABLE"


class EngineNotStarted(Unavailable):
    """Raised when a spawned engine ends or stays silent past its start time; see its log."""

    default_reason = "ENGINE_NOT_STARTED"
