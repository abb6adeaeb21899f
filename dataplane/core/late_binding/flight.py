"""Where a request is on its way through late binding."""

from dataclasses import dataclass

from dataplane.core.late_binding.gate import Decoder
from dataplane.core.late_binding.lines import Batch, Line
from dataplane.core.late_binding.waiting import Waiting
from dataplane.core.request import Request


@dataclass(slots=True, eq=False)
class Flight:
    """A request between submission and end: waiting, then on a line, then on a decoder.

    Attributes:
        booked: Where decode room is kept for it while it is on a line.
        counted: Whether its TPOT target binds its decoder.
        decode_sent_at: When its hand-off was sent; None where another scheduler sent it.
    """

    request: Request
    attempts: int = 1
    waiting: Waiting | None = None
    line: Line | None = None
    batch: Batch | None = None
    booked: Decoder | None = None
    decoder: Decoder | None = None
    counted: bool = False
    decode_sent_at: float | None = None
    last_token_at: float | None = None
