"""Which waiting request goes to which prefill engine now, if any."""

from dataclasses import dataclass
from math import inf

from dataplane.core.late_binding.calibration import HandoffTime, RoundTrip
from dataplane.core.late_binding.candidates import Candidates
from dataplane.core.late_binding.engines import Engines
from dataplane.core.late_binding.gate import DecodeGate, Group, Hold
from dataplane.core.late_binding.lines import Batch, Line
from dataplane.core.late_binding.queue import WaitQueue
from dataplane.core.late_binding.settings import LateBindingSettings
from dataplane.core.late_binding.waiting import Waiting

_GATED_SECONDS = 0.1
_FIXED_SHARE = 0.3


@dataclass(slots=True, eq=False)
class Forming:
    """A batch that is being put together at this instant.

    Attributes:
        slack_seconds: By how much more work nobody on time in it would become late.
    """

    line: Line
    seconds: float
    slack_seconds: float
    batch: Batch | None = None
    closed: bool = False


@dataclass(slots=True)
class Pick:
    """A request to be sent to a line, alone or into a batch.

    Attributes:
        decode_slot: The decode engine that has room for it; -1 where none was asked.
    """

    line: Line
    item: Waiting
    cost_seconds: float
    slack_seconds: float = inf
    forming: Forming | None = None
    decode_slot: int = -1
    late: bool = False
    paid: bool = False


class Dispatcher:
    """Decides, one request at a time, until nothing more is to be sent."""

    def __init__(
        self,
        settings: LateBindingSettings,
        queue: WaitQueue,
        engines: Engines,
        gate: DecodeGate,
        *,
        handoff: HandoffTime,
        trip: RoundTrip,
    ) -> None:
        self._settings = settings
        self._trip = trip
        self._queue = queue
        self._engines = engines
        self._gate = gate
        self._handoff = handoff
        self._candidates = Candidates(queue, by_laxity=settings.order_by_laxity)
        self._share = settings.fairness.terms.work_share
        self.credit_seconds = 0.0
        self.loosest_tpot_seconds = inf
        self._held: Waiting | None = None
        self._refused_at = -inf
        self._now = -inf
        self._forming: list[Forming] = []
        self._stash: list[Line] = []
        self._blocked = False
        self._prepared = False
        self._passed_over = False
        self._after_seconds = 0.0
        self._mode: tuple[bool, bool] | None = None

    def after_prefill_seconds(self) -> float:
        """Return what passes of a request's way beside prefill and KV transfer."""
        if not self._engines.transfer.hands_off:
            return self._trip.seconds
        return self._trip.seconds + self._handoff.seconds

    def begin(self, now: float) -> None:
        """Begin deciding; batches of the same instant are still open."""
        if now != self._now:
            self._forming = []
            self._now = now
        self._blocked = False
        self._prepared = False

    def end(self) -> float:
        """Stop deciding; return when the next line is to be given more, infinity if by an event."""
        at = inf if self._blocked else self._engines.ready.next_at()
        for line in self._stash:
            self._engines.ready.update(line)
        self._stash.clear()
        return at if self._queue.size else inf

    def pick(self, now: float, *, nothing_in_flight: bool) -> Pick | None:
        """Return the next request to send; the caller sends it and tells `sent`."""
        while self._queue.size and not self._blocked:
            line = self._engines.ready.pop(now)
            if line is None:
                break
            pick = self._choose(line, now, None)
            if pick is not None:
                return pick
            self._stash.append(line)
            self._blocked = self._engines.all_alike and not self._passed_over
        if nothing_in_flight:
            for line in self._stash:
                pick = self._anybody(line)
                if pick is not None:
                    self._stash.remove(line)
                    return pick
        return None if self._blocked else self._fill(now)

    def _prepare(self, now: float) -> None:
        """Forget what was computed at an earlier instant; give up those who are late by now."""
        self._prepared = True
        self._passed_over = False
        self._mode = None
        self._after_seconds = self.after_prefill_seconds()
        self._gate.forget()
        self._candidates.forget()
        if self._held is not None and self._held.lane is None:
            self._held = self._gate.hold = None
        fixed = self._engines.fleet.fixed_seconds + self._after_seconds
        self._queue.give_up(now + fixed - self._settings.doomed_after_seconds)

    def sent(self, pick: Pick, batch: Batch) -> None:
        """Take in that a pick was sent as part of `batch`."""
        fixed = pick.line.pace.fixed_seconds
        work = pick.cost_seconds + _FIXED_SHARE * fixed
        if pick.paid:
            self.credit_seconds -= (1.0 - self._share) * work
        elif not pick.late:
            limit = self._settings.credit_limit_seconds
            self.credit_seconds = min(limit, self.credit_seconds + self._share * work)
        forming = pick.forming
        if forming is None:
            self._forming.append(
                Forming(pick.line, pick.cost_seconds + fixed, pick.slack_seconds, batch)
            )
        else:
            forming.seconds += pick.cost_seconds
            forming.slack_seconds = min(
                forming.slack_seconds - pick.cost_seconds, pick.slack_seconds
            )
        self._engines.ready.used(pick.line)

    def _fill(self, now: float) -> Pick | None:
        settings = self._settings
        most = max(settings.batch_seconds, settings.batch_seconds_overloaded)
        for forming in self._forming:
            if forming.batch is None or not forming.batch.open or not forming.line.usable:
                continue
            while self._queue.size and not forming.closed and forming.seconds < most:
                pick = self._choose(forming.line, now, forming)
                if pick is not None:
                    return pick
                forming.closed = True
        return None

    def _choose(self, line: Line, now: float, forming: Forming | None) -> Pick | None:
        if not self._prepared:
            self._prepare(now)
        ahead = line.remaining_seconds(now) if forming is None else forming.seconds
        fixed = line.pace.fixed_seconds + self._after_seconds
        group = self._engines.groups[line]
        if forming is None:
            pick = self._overdue(line, group, now)
            if pick is not None:
                return pick
        pick = self._on_time(line, group, now + ahead + fixed, forming)
        return pick or self._behind(line, group, now + fixed, now + ahead + fixed, forming)

    def _overdue(self, line: Line, group: Group, now: float) -> Pick | None:
        if self._share <= 0.0 or self.credit_seconds < 0.0:
            return None
        item = self._queue.most_overdue(now)
        if item is None or self._shuns(item, line):
            return None
        if self._held is item:
            self._gate.hold = None
            self._gate.forget()
        slot = self._room(group, item, reserved=False, patient=True)
        if slot is not None:
            self._held = self._gate.hold = None
            cost = line.pace.prompt_seconds(item.request.prompt_tokens)
            return Pick(line, item, cost, decode_slot=slot, late=True, paid=True)
        # Nothing that is freed elsewhere goes past it: the roomiest engine is kept for it.
        if group.best_slot >= 0:
            self._held = item
            self._gate.hold = Hold(group.best_slot, item.request.prompt_tokens)
            self._gate.forget()
        return None

    def _on_time(
        self, line: Line, group: Group, start_by: float, forming: Forming | None
    ) -> Pick | None:
        queue, settings, pace = self._queue, self._settings, line.pace
        if not queue.on_time_count:
            return None
        overloaded, small = self._overload()
        limit, urgent = inf, settings.urgent_seconds if small else 0.0
        if forming is not None:
            most = settings.batch_seconds_overloaded if small else settings.batch_seconds
            limit = min(forming.slack_seconds, most - forming.seconds)
            urgent = min(urgent, most - forming.seconds)
        weight = settings.cost_weight_overloaded if overloaded else settings.cost_weight
        refused = 0
        for cost, laxity, item in self._candidates.ordered(pace, weight, start_by, urgent):
            if cost > limit or self._shuns(item, line):
                continue
            slot = self._room(group, item, reserved=False)
            if slot is not None:
                return Pick(line, item, cost, laxity, forming, slot)
            self._refused_at = self._now
            refused += 1
            if refused > settings.gate_tries:
                break
        return None

    def _behind(
        self,
        line: Line,
        group: Group,
        start_now: float,
        start_by: float,
        forming: Forming | None,
    ) -> Pick | None:
        settings, pace = self._settings, line.pace
        limit = inf
        if forming is not None:
            small = self._overload()[1] or not self._queue.on_time_count
            most = settings.batch_seconds_overloaded if small else settings.batch_seconds
            limit = min(forming.slack_seconds, most - forming.seconds)
        refused = 0
        for item in sorted(self._queue.behind(start_by), key=_age):
            cost = pace.prompt_seconds(item.request.prompt_tokens)
            if cost > limit or self._shuns(item, line):
                continue
            doomed = item.doomed or item.deadline - cost < start_now
            slot = self._room(group, item, reserved=doomed)
            if slot is not None:
                return Pick(line, item, cost, forming=forming, decode_slot=slot, late=True)
            refused += 1
            if refused > settings.gate_tries:
                break
        return None

    def _anybody(self, line: Line) -> Pick | None:
        """Return the first that may go there, room or not: nothing runs that could make room."""
        lanes = (*self._queue.on_time.values(), *self._queue.late.values())
        heads = [item for lane in lanes for item in lane.heads(1)]
        for item in sorted(heads, key=lambda item: (item.doomed, *_age(item))):
            if not self._shuns(item, line):
                return Pick(line, item, line.pace.prompt_seconds(item.request.prompt_tokens))
        return None

    def _shuns(self, item: Waiting, line: Line) -> bool:
        """Tell whether a request failed on a line before; another line may still take it."""
        if not item.request.excluded or line.instance.instance_id not in item.request.excluded:
            return False
        self._passed_over = True
        return True

    def _room(
        self, group: Group, item: Waiting, *, reserved: bool, patient: bool = False
    ) -> int | None:
        """Return a decode engine with room, -1 where the gate is off; None where none has any."""
        if not self._settings.gate:
            return -1
        request, gate = item.request, self._gate
        tpot = request.targets.tpot_seconds
        if patient:
            # Its target is missed anyway: it may share a batch that is slower than it wished.
            tpot = max(tpot, self.loosest_tpot_seconds)
        tokens = request.prompt_tokens
        if not request.excluded:
            slot = gate.find(group, tokens, tpot, reserved=reserved)
            return slot if slot >= 0 else None
        for slot, instance in zip(group.side.slots, group.side.instances, strict=True):
            if instance.instance_id not in request.excluded and tokens <= gate.longest_on(
                slot, tpot, reserved=reserved
            ):
                return slot
        return None

    def _overload(self) -> tuple[bool, bool]:
        """Tell whether prefill cannot make all deadlines, and whether with small prompts."""
        if self._mode is None:
            engines, queue = self._engines, self._queue
            fixed = engines.fleet.fixed_seconds + self._after_seconds
            overloaded = self._now - self._refused_at >= _GATED_SECONDS and queue.overloaded(
                engines.fleet, len(engines.usable), self._now + fixed
            )
            mean = queue.mean_prompt_seconds(engines.fleet)
            self._mode = (overloaded, overloaded and mean < self._settings.small_prompt_seconds)
        return self._mode


def _age(item: Waiting) -> tuple[float, int]:
    return (item.request.arrived_at, item.sequence)
