"""The decode gate: prefill starts only for what some decode engine can take in when it is done.

A prompt has room on an engine when, with the prompts booked there and this one added, the decode
step stays within the TPOT targets of all, there is a seat, and the KV fits. All three are bounds
on the prompt's length, so the gate asks how long a prompt an engine would take: one number for
all requests with equal targets. A prompt that is let into prefill is booked on an engine, so that
what is on its way never adds up to more than there is; where it really goes is decided at
hand-off.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np

from dataplane.core.cluster import Instance
from dataplane.core.late_binding.calibration import Multiplier
from dataplane.core.late_binding.settings import LateBindingSettings
from dataplane.core.view import ClusterView, Column, Side
from enginemodel.model import EngineConstants

_SPARE_TOKENS = 32.0
_SEAT = 1e12


@dataclass(slots=True, eq=False)
class Decoder:
    """One engine that decodes.

    Attributes:
        slot: Its place in all columns.
        targets: TPOT targets of those on it that met, or still may meet, their TTFT target: how
            many have each.
        sample_at: From when on the next step time is taken in.
    """

    instance: Instance
    constants: EngineConstants
    multiplier: Multiplier
    slot: int = -1
    targets: dict[float, int] = field(default_factory=dict)
    sample_at: float = 0.0


@dataclass(slots=True, eq=False)
class Group:
    """Decode engines that prompts of one prefill side may go to.

    Attributes:
        best_slot: The engine that was found to have most room when all were last asked.
        longest: By TPOT target and kind of room: the longest prompt with room, and where.
        stamp: Up to when `longest` holds.
    """

    side: Side
    best_slot: int = -1
    longest: dict[tuple[float, bool], tuple[float, int]] = field(default_factory=dict)
    stamp: int = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """Room kept on one engine for a request that waits too long for it."""

    slot: int
    tokens: int


def kv_growth(instance: Instance) -> float:
    """Return KV tokens that a sequence needs beyond those it has: the next one, half a block."""
    return 1.0 + instance.block_tokens / 2.0


def step_bound(
    limit_seconds: float,
    base_seconds: float,
    per_token_seconds: float,
    kv_tokens: float,
) -> float:
    """Return the prompt that fills a decode step up to a limit."""
    return (limit_seconds - base_seconds) / per_token_seconds - kv_tokens


def kv_bound(budget_tokens: float, kv_tokens: float, requests: float, growth: float) -> float:
    """Return the prompt that fills the KV budget; each sequence needs `growth` beyond its own."""
    return budget_tokens - kv_tokens - _SPARE_TOKENS - requests * growth


def seat_bound(seats: float, requests: float) -> float:
    """Return no bound where there is a seat, and a very negative one where there is none."""
    return (seats - requests - 1.0 + 1e-6) * _SEAT


class DecodeGate:
    """Knows how much decode room is left."""

    def __init__(self, settings: LateBindingSettings) -> None:
        self._settings = settings
        self._view: ClusterView | None = None
        self.decoders: tuple[Decoder | None, ...] = ()
        self.factors = array("d")
        self.tightest = array("d")
        self.booked_requests = array("d")
        self.booked_tokens = array("d")
        self.hold: Hold | None = None
        self._stamp = 0

    def forget(self) -> None:
        """Forget what was computed: loads have changed."""
        self._stamp += 1

    def reseat(self, view: ClusterView, decoders: Mapping[str, Decoder]) -> None:
        """Take a new roster."""
        self._view = view
        instances = view.roster.instances
        self.decoders = tuple(decoders.get(i.instance_id) for i in instances)
        self.factors = array("d", [1.0] * len(instances))
        self.tightest = array("d", [inf] * len(instances))
        self.booked_requests = array("d", bytes(8 * len(instances)))
        self.booked_tokens = array("d", bytes(8 * len(instances)))
        for slot, decoder in enumerate(self.decoders):
            if decoder is not None:
                decoder.slot = slot
                self.factors[slot] = decoder.multiplier.value
                self.tightest[slot] = min(decoder.targets, default=inf)
        self.hold = None

    def join(self, decoder: Decoder, tpot_seconds: float) -> None:
        """Count a sequence's TPOT target."""
        decoder.targets[tpot_seconds] = decoder.targets.get(tpot_seconds, 0) + 1
        self.tightest[decoder.slot] = min(self.tightest[decoder.slot], tpot_seconds)

    def leave(self, decoder: Decoder, tpot_seconds: float) -> None:
        """Count it no more."""
        left = decoder.targets[tpot_seconds] - 1
        if left:
            decoder.targets[tpot_seconds] = left
            return
        del decoder.targets[tpot_seconds]
        if decoder.slot < len(self.decoders) and self.decoders[decoder.slot] is decoder:
            self.tightest[decoder.slot] = min(decoder.targets, default=inf)

    def learn(self, decoder: Decoder) -> None:
        """Take over a decoder's multiplier."""
        self.factors[decoder.slot] = decoder.multiplier.value

    def book(self, decoder: Decoder | None, prompt_tokens: int, sign: int = 1) -> None:
        """Book a prompt on an engine, or (-1) take it off; no engine, or one gone, is no matter."""
        if decoder is not None and decoder.slot >= 0:
            self.booked_requests[decoder.slot] += sign
            self.booked_tokens[decoder.slot] += sign * prompt_tokens
            self._stamp += 1

    def find(self, group: Group, prompt_tokens: int, tpot_seconds: float, *, reserved: bool) -> int:
        """Return the slot of an engine of the group that has room; -1 where none has.

        Args:
            group: The engines.
            prompt_tokens: Of the request.
            tpot_seconds: Its target.
            reserved: True where it may only fill what is not kept for on-time requests.
        """
        if group.stamp != self._stamp:
            group.stamp = self._stamp
            group.longest.clear()
        key = (tpot_seconds, reserved)
        found = group.longest.get(key)
        if found is None:
            slot = group.best_slot
            if slot >= 0 and prompt_tokens <= self.longest_on(
                slot, tpot_seconds, reserved=reserved
            ):
                return slot
            found = group.longest[key] = self._longest(group, tpot_seconds, reserved=reserved)
        longest, slot = found
        return slot if prompt_tokens <= longest else -1

    def longest_on(self, slot: int, tpot_seconds: float, *, reserved: bool) -> float:
        """Return the longest prompt that one engine would take."""
        view, settings = self._view, self._settings
        decoder = self.decoders[slot]
        if view is None or decoder is None:
            return -inf
        instance, constants = decoder.instance, decoder.constants
        requests = view.own.decode_requests[slot] + view.measured.other_decode_requests[slot]
        kv = view.own.decode_kv_tokens[slot] + view.measured.other_decode_kv_tokens[slot]
        if self.hold is not None and self.hold.slot == slot:
            requests += 1.0
            kv += self.hold.tokens
        joining = requests + self.booked_requests[slot]
        kv += self.booked_tokens[slot]
        share = settings.doomed_share if reserved else 1.0
        kv_share = min(share, settings.kv_share)
        limit = min(tpot_seconds, self.tightest[slot]) * settings.tpot_margin
        return min(
            step_bound(
                limit / self.factors[slot],
                constants.d0_seconds + constants.d1_seconds_per_sequence * (joining + 1.0),
                max(constants.d2_seconds_per_kv_token, 1e-15),
                kv + settings.growth_tokens,
            ),
            kv_bound(instance.kv_total_tokens * kv_share, kv, requests, kv_growth(instance)),
            seat_bound(instance.max_num_seqs * share, joining),
        )

    def _longest(self, group: Group, tpot_seconds: float, *, reserved: bool) -> tuple[float, int]:
        side = group.side
        best, best_slot = -inf, -1
        if side.vectorised:
            column = np.asarray(self.longest_column(group, tpot_seconds, reserved=reserved))
            position = int(column.argmax())
            best, best_slot = float(column[position]), side.slots[position]
        else:
            for slot in side.slots:
                longest = self.longest_on(slot, tpot_seconds, reserved=reserved)
                if longest > best:
                    best, best_slot = longest, slot
        group.best_slot = best_slot
        return best, best_slot

    def longest_column(self, group: Group, tpot_seconds: float, *, reserved: bool) -> Column:
        """Return `longest_on` of every engine of a group, in the order of its side."""
        side, settings = group.side, self._settings
        requests, kv = side.decode_requests(), side.decode_kv_tokens()
        if self.hold is not None and self.hold.slot in side.slots:
            position = side.slots.index(self.hold.slot)
            requests[position] += 1.0
            kv[position] += self.hold.tokens
        booked, booked_tokens = side.take(self.booked_requests), side.take(self.booked_tokens)
        joining = side.map(lambda requests, booked: requests + booked, requests, booked)
        kv = side.map(lambda kv, booked: kv + booked, kv, booked_tokens)
        share = settings.doomed_share if reserved else 1.0
        kv_share = min(share, settings.kv_share)
        margin = settings.tpot_margin
        own_limit = side.fixed_column([tpot_seconds] * len(side))
        by_step = side.map(
            lambda limit, factor, d0, d1, d2, joining, kv: step_bound(
                limit * margin / factor,
                d0 + d1 * (joining + 1.0),
                d2,
                kv + settings.growth_tokens,
            ),
            side.lesser(own_limit, side.take(self.tightest)),
            side.take(self.factors),
            side.fixed("d0", lambda _, c: c.d0_seconds),
            side.fixed("d1", lambda _, c: c.d1_seconds_per_sequence),
            side.fixed("d2_positive", lambda _, c: max(c.d2_seconds_per_kv_token, 1e-15)),
            joining,
            kv,
        )
        by_kv = side.map(
            lambda budget, requests, kv, growth: kv_bound(budget * kv_share, kv, requests, growth),
            side.fixed("kv_budget", lambda i, _: float(i.kv_total_tokens)),
            requests,
            kv,
            side.fixed("kv_growth", lambda i, _: kv_growth(i)),
        )
        by_seat = side.map(
            lambda seats, joining: seat_bound(seats * share, joining),
            side.fixed("seats_float", lambda i, _: float(i.max_num_seqs)),
            joining,
        )
        return side.lesser(side.lesser(by_step, by_kv), by_seat)
