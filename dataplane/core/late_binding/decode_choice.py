"""Which decode engine takes a prompt that was just prefilled: the least occupied.

    occupancy = ((KV + P) / KV budget + (B + 1) / (seats / 4)) * slowness
    + penalties for KV that overflows now, or is expected to, for missing seats and for TPOT

A quarter of the seats weighs as much as the whole KV: batches far smaller than the limit already
fill the memory. slowness: a typical step here over the same step of the fastest candidate.
Prompts booked on an engine count where they would overfill it, not in how occupied it is: they
may still go elsewhere.
"""

from typing import Any, TypeAlias

import numpy as np

from dataplane.core.cluster import Instance
from dataplane.core.late_binding.gate import DecodeGate, kv_growth
from dataplane.core.late_binding.settings import LateBindingSettings
from dataplane.core.policies.base import Terms
from dataplane.core.request import Request
from dataplane.core.view import Column, Side
from enginemodel.model import EngineConstants, decode_step_seconds

TERMS = ("occupancy", "overflow", "peak", "seats", "tpot")
_FLAT_OUTPUT_TOKENS = 250.0
_TYPICAL_BATCH = 16
_TYPICAL_KV_TOKENS = 8192
_PENALTY = 5.0
_WALL = 100.0
_MOST_SIDES = 64
# A number of one candidate or an array over all: the formula below is plain arithmetic.
Number: TypeAlias = Any


class LeastOccupied:
    """Prices decode candidates at hand-off; all terms without unit."""

    def __init__(self, gate: DecodeGate, settings: LateBindingSettings) -> None:
        self._gate = gate
        self._growth_tokens = settings.growth_tokens
        self._kv_share = settings.kv_share
        self._tpot_margin = settings.tpot_margin
        self._lasting: dict[Side, tuple[Column, ...]] = {}

    def price(self, request: Request, side: Side) -> Terms:
        """Return the terms by name."""
        rows = self._rows(request, side)
        if side.vectorised:
            return dict(zip(TERMS, rows, strict=True))
        return {name: [row[i] for row in rows] for i, name in enumerate(TERMS)}

    def costs(self, request: Request, side: Side) -> Column:
        """Return the sums of the terms."""
        rows = self._rows(request, side)
        if side.vectorised:
            return np.asarray(sum(rows))
        return [sum(row) for row in rows]

    def _rows(self, request: Request, side: Side) -> Number:
        """Return the terms of each candidate; of a vectorised side, each term of the candidates."""
        prompt = request.prompt_tokens
        lasting = self._lasting.get(side)
        if lasting is None:
            if len(self._lasting) >= _MOST_SIDES:
                self._lasting.clear()
            lasting = self._lasting[side] = _lasting_columns(side)
        columns = (
            *lasting,
            side.take(self._gate.factors),
            side.lesser(
                side.fixed_column([request.targets.tpot_seconds] * len(side)),
                side.take(self._gate.tightest),
            ),
            side.take(self._gate.booked_requests),
            side.take(self._gate.booked_tokens),
            side.decode_requests(),
            side.decode_kv_tokens(),
            side.decode_remaining_tokens(),
        )
        if side.vectorised:
            return self._terms(prompt, *columns)
        return [self._terms(prompt, *row) for row in zip(*columns, strict=True)]

    def _terms(  # noqa: PLR0917 - the columns of _rows, in their order
        self,
        prompt: int,
        slowness: Number,
        budget: Number,
        seats: Number,
        growth: Number,
        d0: Number,
        d1: Number,
        d2: Number,
        factor: Number,
        limit: Number,
        booked: Number,
        booked_tokens: Number,
        requests: Number,
        kv: Number,
        rest: Number,
    ) -> tuple[Number, Number, Number, Number, Number]:
        """Return the five terms; plain arithmetic, so that numbers and arrays both do."""
        over = (kv + booked_tokens + prompt + (requests + booked) * growth) / budget - 1.0
        expected = requests * _FLAT_OUTPUT_TOKENS
        grows = rest - (rest - expected) * (rest > expected)
        peak = (kv + prompt + grows + _FLAT_OUTPUT_TOKENS) / budget - self._kv_share
        missing = requests + booked + 1.0 - seats
        step = (d0 + d1 * (requests + 1.0) + d2 * (kv + prompt + self._growth_tokens)) * factor
        overrun = step / limit - self._tpot_margin
        return (
            ((kv + prompt) / budget + 4.0 * (requests + 1.0) / seats) * slowness,
            (over > 0.0) * (_WALL + _PENALTY * over),
            (peak > 0.0) * _PENALTY * peak,
            (missing > 0.0) * (_WALL + _PENALTY * missing),
            (overrun > 0.0) * _PENALTY * overrun,
        )


def _lasting_columns(side: Side) -> tuple[Column, ...]:
    """Return the columns that stay as long as the roster, in the order of `_terms`."""
    return (
        _slowness(side),
        side.fixed("kv_budget", lambda i, _: float(i.kv_total_tokens)),
        side.fixed("seats_float", lambda i, _: float(i.max_num_seqs)),
        side.fixed("kv_growth", lambda i, _: kv_growth(i)),
        side.fixed("d0", lambda _, c: c.d0_seconds),
        side.fixed("d1", lambda _, c: c.d1_seconds_per_sequence),
        side.fixed("d2", lambda _, c: c.d2_seconds_per_kv_token),
    )


def _slowness(side: Side) -> Column:
    """Return each candidate's typical step over that of the fastest."""
    fastest: list[float] = []

    def relative(_: Instance, constants: EngineConstants) -> float:
        if not fastest:
            fastest.append(min(_typical_step_seconds(c) for c in side.constants))
        return _typical_step_seconds(constants) / max(fastest[0], 1e-9)

    return side.fixed("slowness", relative)


def _typical_step_seconds(constants: EngineConstants) -> float:
    return decode_step_seconds(constants, _TYPICAL_BATCH, _TYPICAL_KV_TOKENS)
