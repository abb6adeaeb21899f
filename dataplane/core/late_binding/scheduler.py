"""Late binding as a scheduler: events in, actions out.

Requests wait in one queue a pool. A prefill engine is given work when what it has is nearly done;
on-time requests go first, by laxity, and only those for which some decode engine has room; the
decode engine is chosen at hand-off. No length prediction is needed. The rules, their constants
and what each is worth: docs/decisions.
"""

from dataclasses import replace

from dataplane.core.errors import RejectReason
from dataplane.core.events import (
    Action,
    Cancelled,
    Event,
    Failed,
    Finished,
    Leg,
    PrefillDone,
    Reject,
    SnapshotArrived,
    StartDecode,
    StartPrefill,
    Tick,
    TokensStreamed,
    WakeAt,
)
from dataplane.core.late_binding.calibration import HandoffTime, RoundTrip
from dataplane.core.late_binding.decode_choice import LeastOccupied
from dataplane.core.late_binding.dispatcher import Dispatcher, Pick
from dataplane.core.late_binding.engines import Engines
from dataplane.core.late_binding.flight import Flight
from dataplane.core.late_binding.gate import DecodeGate, Decoder
from dataplane.core.late_binding.intake import Intake
from dataplane.core.late_binding.preview import Preview
from dataplane.core.late_binding.queue import WaitQueue
from dataplane.core.late_binding.settings import LateBindingSettings
from dataplane.core.policies.base import DECODE_BITS, least
from dataplane.core.pool import Pool
from dataplane.core.request import Request
from dataplane.core.view import Side
from enginemodel.model import decode_step_seconds

_SOONEST_WAKE_SECONDS = 0.0005
_SAMPLE_SHARE = 0.5


class LateBinding:
    """Binds a request to prefill when it can start, and to decode when it is prefilled."""

    def __init__(self, pool: Pool, settings: LateBindingSettings | None = None) -> None:
        self.pool = pool
        self.settings = LateBindingSettings() if settings is None else settings
        self.queue = WaitQueue()
        self.engines = Engines(self.settings)
        self.gate = DecodeGate(self.settings)
        self.handoff = HandoffTime(self.settings.round_trip_seconds)
        self.trip = RoundTrip(self.settings.round_trip_seconds)
        self.dispatcher = Dispatcher(
            self.settings,
            self.queue,
            self.engines,
            self.gate,
            handoff=self.handoff,
            trip=self.trip,
        )
        self._intake = Intake(self.settings, self.engines, self.dispatcher)
        self._decode_rule = LeastOccupied(self.gate, self.settings)
        self._flights: dict[str, Flight] = {}
        self._view = None if not pool.roster.instances else pool.view
        self._wake_at: float | None = None
        self._reseat()

    def __repr__(self) -> str:
        running = len(self._flights) - len(self.queue)
        return f"<LateBinding {len(self.queue)} waiting, {running} in flight, {self.pool!r}>"

    def submit(self, request: Request, now: float) -> list[Action]:
        """Take a new request; one that is known already is ignored."""
        request_id = request.request_id
        if request_id in self._flights:
            return []
        if not self.engines.usable:
            return [Reject(request_id, self.pool.view.why_no_prefill())]
        if request.excluded and not self._has_engines(request):
            return [Reject(request_id, RejectReason.RETRIES_EXHAUSTED)]
        if self.queue.size >= self.settings.queue_limit:
            return [Reject(request_id, RejectReason.QUEUE_FULL)]
        flight = self._flights[request_id] = Flight(request)
        self._wait(flight, now)
        return self._dispatch(now)

    def adopt(
        self, request: Request, prefill_id: str, decode_id: str, generated_tokens: int, now: float
    ) -> None:
        """Keep account of a request that another scheduler has placed and that is under way."""
        flight = Flight(request)
        line, decoder = self.engines.lines.get(prefill_id), self.engines.decoders.get(decode_id)
        if request.request_id in self._flights or (line is None and decoder is None):
            return
        self._flights[request.request_id] = flight
        if line is not None:
            flight.line, flight.batch = line, line.send(now, now, None, request.prompt_tokens)
            flight.batch.clean = False
            self.pool.charge_prefill(request, prefill_id)
            self.engines.ready.update(line)
        if decoder is not None:
            self._start_decode(flight, decoder, now)
            self.pool.streamed(request.request_id, generated_tokens)
            flight.last_token_at = now if generated_tokens else None
            flight.decode_sent_at = None

    def observe(self, event: Event, now: float) -> list[Action]:
        """Move a request on, or take in the cluster's state."""
        match event:
            case TokensStreamed():
                return self._streamed(event, now)
            case PrefillDone():
                return self._prefilled(event, now)
            case Finished() | Cancelled():
                return self._ended(event.request_id, now)
            case Failed():
                return self._failed(event, now)
            case SnapshotArrived():
                return self._snapshot(event, now)
            case Tick():
                self._wake_at = None
                return self._dispatch(now)

    def preview(self, now: float) -> Preview:
        """Return what would be done with a request at that time, in the form of a policy."""
        idle = len(self._flights) == len(self.queue)
        parts = (self.engines, self.dispatcher, self._decode_rule, self.gate, self._intake)
        return Preview(*parts, self.queue, self.settings, now, idle)

    def _has_engines(self, request: Request) -> bool:
        """Tell whether a pair is left on which a request has not failed."""
        return bool(self.pool.view.side("prefill", "", request.excluded).slots)

    def _wait(self, flight: Flight, now: float) -> None:
        """Queue a request."""
        item = flight.waiting = self._intake.take(flight.request, now)
        if item.doomed:
            self.queue.add_late(item)
        else:
            self.queue.add(item)

    def _dispatch(self, now: float) -> list[Action]:
        """Send what is to be sent now."""
        queue, flights = self.queue, self._flights
        if not queue.size:
            return []
        actions: list[Action] = []
        dispatcher = self.dispatcher
        dispatcher.begin(now)
        while True:
            idle = len(flights) == queue.size
            pick = dispatcher.pick(now, nothing_in_flight=idle)
            if pick is None:
                break
            actions.append(self._send(pick, now))
        wake_at = dispatcher.end()
        if wake_at < float("inf"):
            wake_at = max(wake_at, now + _SOONEST_WAKE_SECONDS)
            if self._wake_at is None or wake_at < self._wake_at:
                self._wake_at = wake_at
                actions.append(WakeAt(wake_at))
        return actions

    def _send(self, pick: Pick, now: float) -> Action:
        request, line = pick.item.request, pick.line
        flight = self._flights[request.request_id]
        instance_id = line.instance.instance_id
        self.queue.remove(pick.item)
        flight.waiting = None
        joined = None if pick.forming is None else pick.forming.batch
        arrives_at = now + self.trip.seconds / 2.0
        flight.line = line
        flight.batch = line.send(now, arrives_at, joined, request.prompt_tokens)
        self.pool.charge_prefill(request, instance_id)
        self.dispatcher.sent(pick, flight.batch)
        self.engines.ready.update(line)
        decoder = self.engines.decoders.get(instance_id)
        if decoder is None:
            if pick.decode_slot >= 0:
                flight.booked = self.gate.decoders[pick.decode_slot]
                self.gate.book(flight.booked, request.prompt_tokens)
            return StartPrefill(request.request_id, instance_id)
        self._start_decode(flight, decoder, now)
        return StartDecode(request.request_id, instance_id)

    def _prefilled(self, event: PrefillDone, now: float) -> list[Action]:
        flight = self._flights.get(event.request_id)
        if flight is None or flight.line is None:
            return []
        line = flight.line
        if flight.batch is not None:
            self._learn_trip(flight.batch.sent_at, event.engine_seconds, now)
        if flight.decoder is not None:
            # Another scheduler bound both sides: only the line is to be freed.
            self._leave_line(flight, now)
            return self._dispatch(now)
        self._leave_line(flight, now, cached_tokens=event.cached_prompt_tokens)
        instance = self.pool.instance(line.instance.instance_id)
        if instance is None or instance.epoch != line.instance.epoch:
            # The boot that holds the KV is gone.
            return self._again(flight, line.instance.instance_id, now)
        side = self.pool.view.side("decode", instance.pairing_key, flight.request.excluded)
        if not side.slots:
            return self._reject(flight, RejectReason.NO_DECODE_INSTANCE, now)
        decoder = self.engines.decoders[self._cheapest(flight.request, side)]
        self._start_decode(flight, decoder, now)
        start = StartDecode(event.request_id, decoder.instance.instance_id)
        return [start, *self._dispatch(now)]

    def _cheapest(self, request: Request, side: Side) -> str:
        costs = self._decode_rule.costs(request, side)
        return side.instances[least(costs, request, shift=DECODE_BITS)].instance_id

    def _start_decode(self, flight: Flight, decoder: Decoder, now: float) -> None:
        self.pool.charge_decode(flight.request, decoder.instance.instance_id)
        self.gate.join(decoder, flight.request.targets.tpot_seconds)
        flight.decoder, flight.counted, flight.decode_sent_at = decoder, True, now

    def _streamed(self, event: TokensStreamed, now: float) -> list[Action]:
        self.pool.streamed(event.request_id, event.count)
        flight = self._flights.get(event.request_id)
        if flight is None or flight.decoder is None:
            return []
        last, flight.last_token_at = flight.last_token_at, now
        if last is not None:
            if now >= flight.decoder.sample_at:
                self._sample_step(flight.decoder, now, (now - last) / event.count)
            return []
        if now - flight.request.arrived_at > flight.request.targets.ttft_seconds:
            self._uncount(flight)
        if flight.line is not None:
            # A MIXED engine: its first token says that the prompt is done.
            self._leave_line(flight, now)
            return self._dispatch(now)
        if self.settings.learn_handoff and flight.decode_sent_at is not None:
            pull = self.engines.transfer.seconds(flight.request.prompt_tokens)
            self.handoff.observe(now - flight.decode_sent_at - pull)
        return []

    def _sample_step(self, decoder: Decoder, now: float, gap_seconds: float) -> None:
        """Compare a gap between tokens with the step that was expected; one sample a step."""
        slot = decoder.slot
        if slot < 0 or not self.settings.learn_constants:
            return
        view = self.pool.view
        requests = view.own.decode_requests[slot] + view.measured.other_decode_requests[slot]
        kv = view.own.decode_kv_tokens[slot] + view.measured.other_decode_kv_tokens[slot]
        step = decode_step_seconds(decoder.constants, requests, kv) * decoder.multiplier.value
        decoder.multiplier.observe(gap_seconds, step)
        decoder.sample_at = now + _SAMPLE_SHARE * gap_seconds
        self.gate.learn(decoder)

    def _ended(self, request_id: str, now: float) -> list[Action]:
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return []
        self._release(flight, now)
        return self._dispatch(now)

    def _failed(self, event: Failed, now: float) -> list[Action]:
        flight = self._flights.get(event.request_id)
        if flight is None or flight.waiting is not None:
            return []
        if self.pool.generated_tokens(event.request_id) > 0:
            return self._reject(flight, RejectReason.STREAM_BROKEN, now)
        if not event.retryable:
            return self._reject(flight, RejectReason.RETRIES_EXHAUSTED, now)
        if not event.at_fault:
            return self._again(flight, "", now)
        decoder, line = flight.decoder, flight.line
        if decoder is not None and (event.leg is Leg.DECODE or line is None):
            return self._again(flight, decoder.instance.instance_id, now)
        return self._again(flight, "" if line is None else line.instance.instance_id, now)

    def _again(self, flight: Flight, bad_id: str, now: float) -> list[Action]:
        """Queue a request once more, away from the instance on which it failed."""
        self._release(flight, now)
        if flight.attempts >= self.settings.max_attempts:
            return self._reject(flight, RejectReason.RETRIES_EXHAUSTED, now)
        excluded = flight.request.excluded | ({bad_id} - {""})
        request = replace(flight.request, excluded=excluded)
        if not self._has_engines(request):
            return self._reject(flight, RejectReason.RETRIES_EXHAUSTED, now)
        again = Flight(request, flight.attempts + 1)
        self._flights[request.request_id] = again
        self._wait(again, now)
        return self._dispatch(now)

    def _reject(self, flight: Flight, reason: RejectReason, now: float) -> list[Action]:
        request_id = flight.request.request_id
        return [Reject(request_id, reason), *self._ended(request_id, now)]

    def _release(self, flight: Flight, now: float) -> None:
        """Free what a request holds, wherever it is."""
        if flight.waiting is not None:
            self.queue.remove(flight.waiting)
            flight.waiting = None
        if flight.line is not None:
            self._leave_line(flight, now, done=False)
        self._uncount(flight)
        flight.decoder = None
        self.pool.close(flight.request.request_id)

    def _uncount(self, flight: Flight) -> None:
        if flight.counted and flight.decoder is not None:
            self.gate.leave(flight.decoder, flight.request.targets.tpot_seconds)
            flight.counted = False

    def _leave_line(
        self, flight: Flight, now: float, *, done: bool = True, cached_tokens: int = 0
    ) -> None:
        """Take a prompt off its line, because it is done or because it is given up."""
        line, batch = flight.line, flight.batch
        flight.line = flight.batch = None
        if line is None or batch is None:
            return
        tokens = flight.request.prompt_tokens
        if flight.booked is not None:
            self.gate.book(flight.booked, tokens, -1)
            flight.booked = None
        self.pool.ledger.finish_prefill(flight.request.request_id)
        if done:
            batch.clean = batch.clean and not cached_tokens
            half = self.trip.seconds / 2.0
            taken = line.done(batch, now - half, half)
            if taken is not None and self.settings.learn_constants:
                line.learn(taken, batch.seconds)
                self.engines.learned(line)
        else:
            line.leave(batch, tokens)
        self.engines.ready.update(line)

    def _snapshot(self, event: SnapshotArrived, now: float) -> list[Action]:
        self.pool.refresh(event.snapshot)
        actions: list[Action] = []
        if self.pool.view is not self._view:
            self._reseat()
            actions = self._reject_stranded(now)
        self._refresh_others()
        return actions + self._dispatch(now)

    def _reseat(self) -> None:
        """Take over a new roster."""
        self._view = self.pool.view
        self.engines.reseat(self._view)
        self.gate.reseat(self._view, self.engines.decoders)
        for flight in self._flights.values():
            self.gate.book(flight.booked, flight.request.prompt_tokens)
        targets = self.pool.roster.slo.classes.values()
        self.dispatcher.loosest_tpot_seconds = max(
            (t.tpot_seconds for t in targets), default=float("inf")
        )
        self._renew_handoff()

    def _renew_handoff(self) -> None:
        steps = self.settings.handoff_steps * self.engines.fastest_step_seconds()
        self.handoff.set_default(self.trip.seconds + steps)

    def _learn_trip(self, sent_at: float, engine_seconds: float, now: float) -> None:
        if engine_seconds <= 0.0 or not self.settings.learn_round_trip:
            return
        if self.trip.observe(now - sent_at - engine_seconds):
            self.engines.send_ahead(self.trip.seconds)
            self._renew_handoff()

    def _reject_stranded(self, now: float) -> list[Action]:
        """Reject those waiting for whom no instance is left."""
        view, reason = self.pool.view, RejectReason.RETRIES_EXHAUSTED
        if not self.engines.usable:
            stranded, reason = list(self.queue.items()), view.why_no_prefill()
        else:
            stranded = [
                item
                for item in self.queue.items()
                if item.request.excluded and not self._has_engines(item.request)
            ]
        for item in stranded:
            self._release(self._flights.pop(item.request.request_id), now)
        return [Reject(item.request.request_id, reason) for item in stranded]

    def _refresh_others(self) -> None:
        """Take over what other routers have in prefill."""
        measured = self.pool.view.measured
        for line in self.engines.usable:
            slot = self.pool.slot(line.instance.instance_id)
            if slot is None:
                continue
            seconds = (
                line.pace.linear * measured.other_prefill_tokens[slot]
                + 0.5 * line.pace.fixed_seconds * measured.other_prefill_requests[slot]
            )
            if seconds != line.other_seconds:
                line.other_seconds = seconds
                self.engines.ready.update(line)
