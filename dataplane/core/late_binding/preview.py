"""What late binding would do with a request now, for those who ask: a policy in form, not in use.

Nothing is queued, booked or charged by asking. The prefill side shows seconds (work ahead, own
work, hand-off), the decode side the terms that a hand-off is decided by; where the request would
wait, `held_back` says for what.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from dataplane.core.errors import NoCandidateError, RejectReason
from dataplane.core.late_binding.decode_choice import LeastOccupied
from dataplane.core.late_binding.dispatcher import Dispatcher
from dataplane.core.late_binding.engines import Engines
from dataplane.core.late_binding.gate import DecodeGate
from dataplane.core.late_binding.intake import Intake
from dataplane.core.late_binding.lines import Line
from dataplane.core.late_binding.queue import WaitQueue
from dataplane.core.late_binding.settings import LateBindingSettings
from dataplane.core.late_binding.waiting import Waiting
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
    gate: DecodeGate
    intake: Intake
    queue: WaitQueue
    settings: LateBindingSettings
    now: float
    idle: bool
    """Nothing is in flight: whoever waits is sent, room or not."""

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

    def held_back(self, request: Request) -> str:
        """Return what the request would wait for if it came now; empty where it would be sent.

        Batches that are put together at this very instant are not looked at: with one of them it
        may be sent though nothing is free for it alone.
        """
        if self.queue.size >= self.settings.queue_limit:
            return f"the queue is full: {self.queue.size} wait, and it would be refused"
        ready = list(self._ready(request))
        if not ready:
            return self._until_ready(request)
        late = self.intake.doomed(request, self.now)
        if self.queue.waits_behind(request, late=late):
            return "others like it wait already and come first"
        heads = self._heads()
        if any(self._fits(i.request, ready, i.deadline, late=i.doomed) for i in heads):
            return "others that wait already are sent first"
        deadline = self.intake.deadline(request)
        if self.idle or self._fits(request, ready, deadline, late=late):
            return ""
        late = late or all(self._too_late(line, request, deadline) for line in ready)
        return self._no_room(request, ready, late=late)

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

    def _no_room(self, request: Request, lines: Sequence[Line], *, late: bool) -> str:
        longest = max(self._longest(line, request, reserved=late) for line in lines)
        room = f"at most {longest:.0f} tokens" if longest >= 1.0 else "no prompt at all"
        why = "; it is late already, and part is kept for those on time" if late else ""
        return f"no decode engine has room for it within the TPOT targets: {room}{why}"

    def _ready(self, request: Request) -> Iterator[Line]:
        """Yield the prefill engines that would be given work now, in their order."""
        ready = [line for line in self._lines(request) if line.ready_at <= self.now]
        yield from sorted(ready, key=lambda line: (line.ready_at, line.pace.linear, line.order))

    def _until_ready(self, request: Request) -> str:
        """Return how long no prefill engine is given more."""
        at = min((line.ready_at for line in self._lines(request)), default=inf)
        if at == inf:
            return "every prefill engine has work ahead, and is given more once a prompt is done"
        seconds = at - self.now
        return f"every prefill engine has work ahead; one is given more in {seconds:.3f} s"

    def _heads(self) -> list[Waiting]:
        """Return who is first of those alike that wait."""
        lanes = (*self.queue.on_time.values(), *self.queue.late.values())
        return [item for lane in lanes for item in lane.heads(1)]

    def _fits(
        self, request: Request, lines: Sequence[Line], deadline: float, *, late: bool
    ) -> bool:
        """Tell whether a request would be sent to one of these."""
        return any(
            not self.settings.gate
            or request.prompt_tokens
            <= self._longest(
                line, request, reserved=late or self._too_late(line, request, deadline)
            )
            for line in lines
            if line.instance.instance_id not in request.excluded
        )

    def _too_late(self, line: Line, request: Request, deadline: float) -> bool:
        """Tell whether a request misses its target even if this engine begins with it now."""
        takes = line.pace.prompt_seconds(request.prompt_tokens) + line.pace.fixed_seconds
        return deadline - takes < self.now + self.dispatcher.after_prefill_seconds()

    def _longest(self, line: Line, request: Request, *, reserved: bool) -> float:
        """Return the longest prompt that some decode engine of a line has room for."""
        side = self.engines.groups[line].side
        tpot = request.targets.tpot_seconds
        return max(
            (
                self.gate.longest_on(slot, tpot, reserved=reserved)
                for slot, instance in zip(side.slots, side.instances, strict=True)
                if instance.instance_id not in request.excluded
            ),
            default=-inf,
        )

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
        line = next(self._ready(request), lines[least(costs, request)])
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
