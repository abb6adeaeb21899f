"""What late binding would do with a request now, for those who ask: a policy in form, not in use.

Nothing is queued, booked or charged by asking. The prefill side shows seconds (work ahead, own
work, hand-off), the decode side the terms that a hand-off is decided by.
"""

from dataclasses import dataclass

from dataplane.core.errors import NoCandidateError, RejectReason
from dataplane.core.late_binding.decode_choice import LeastOccupied
from dataplane.core.late_binding.dispatcher import Dispatcher
from dataplane.core.late_binding.engines import Engines
from dataplane.core.late_binding.lines import Line
from dataplane.core.policies.base import (
    DECODE_BITS,
    CandidateTerms,
    Explanation,
    Placement,
    by_candidate,
    least,
    paired,
)
from dataplane.core.request import Request
from dataplane.core.view import ClusterView, Side


@dataclass(frozen=True, slots=True)
class Preview:
    """Places and explains as a policy does, from the scheduler's state at one time."""

    engines: Engines
    dispatcher: Dispatcher
    decode_rule: LeastOccupied
    now: float

    def place(self, request: Request, cluster: ClusterView) -> Placement:
        """Return where the request would go if it were sent now.

        Raises:
            NoCandidateError: No instance can take it.
        """
        line, side = self._sides(request, cluster)
        decode = line.instance
        if side is not None:
            costs = self.decode_rule.costs(request, side)
            decode = side.instances[least(costs, request, shift=DECODE_BITS)]
        return paired(line.instance, decode)

    def explain(self, request: Request, cluster: ClusterView) -> Explanation:
        """Return what `place` goes by.

        Raises:
            NoCandidateError: No instance can take it.
        """
        _, side = self._sides(request, cluster)
        prefill: CandidateTerms = {
            line.instance.instance_id: self._terms(line, request) for line in self._lines(request)
        }
        if side is None:
            return Explanation({}, prefill)
        return Explanation(prefill, by_candidate(self.decode_rule.price(request, side), side))

    def _lines(self, request: Request) -> list[Line]:
        lines = [
            line
            for line in self.engines.usable
            if line.instance.instance_id not in request.excluded
        ]
        return sorted(lines, key=lambda line: line.instance.instance_id)

    def _sides(self, request: Request, cluster: ClusterView) -> tuple[Line, Side | None]:
        """Return the line to prefill on and the engines to decode on; None: the same engine."""
        lines = self._lines(request)
        if not lines:
            raise NoCandidateError(cluster.why_no_prefill())
        costs = [sum(self._terms(line, request).values()) for line in lines]
        line = lines[least(costs, request)]
        if line.instance.instance_id in self.engines.decoders:
            return line, None
        side = cluster.side("decode", line.instance.pairing_key, request.excluded)
        if not side.slots:
            raise NoCandidateError(RejectReason.NO_DECODE_INSTANCE)
        return line, side

    def _terms(self, line: Line, request: Request) -> dict[str, float]:
        tokens = request.prompt_tokens
        own = line.pace.batch_seconds(tokens, tokens * tokens, line.instance.max_batched_tokens)
        return {
            "ahead_seconds": line.remaining_seconds(self.now),
            "own_seconds": own,
            "handoff_seconds": self.engines.transfer.seconds(tokens)
            + self.dispatcher.after_prefill_seconds(),
        }
