"""What a policy sees of one pool: the last snapshot corrected by this router's own ledger.

A policy sees nothing here that a deployed router could not see. Quantities come as columns over
candidates: plain lists up to `VECTOR_FROM` candidates, where a Python loop is fastest, numpy
arrays above. `Side.map` applies one formula to either.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dataplane.core.cluster import Instance, Measurements, Role, Roster, State
from dataplane.core.errors import NoCandidateError, RejectReason
from dataplane.core.ledger import Columns
from dataplane.core.request import Request
from enginemodel.model import EngineConstants
from enginemodel.profiles import REFERENCE

VECTOR_FROM = 32
FloatArray: TypeAlias = npt.NDArray[np.float64]
Column: TypeAlias = list[float] | FloatArray
SideKind: TypeAlias = Literal["prefill", "decode", "mixed"]
_USABLE = frozenset({State.READY, State.STALE})


class Side:
    """Candidates of one role, and what is known of them, aligned with `instances`."""

    __slots__ = (
        "_fixed",
        "_index",
        "_view",
        "blind",
        "constants",
        "instances",
        "slots",
        "vectorised",
    )

    def __init__(
        self, view: "ClusterView", slots: Sequence[int], *, blind: bool, vector_from: int
    ) -> None:
        self._view = view
        self.slots = tuple(slots)
        self.instances = tuple(view.roster.instances[slot] for slot in self.slots)
        self.constants = tuple(view.constants_of(instance) for instance in self.instances)
        self.blind = blind
        self.vectorised = len(self.slots) > vector_from
        self._index = np.array(self.slots, dtype=np.intp) if self.vectorised else None
        self._fixed: dict[str, Column] = {}

    def __len__(self) -> int:
        return len(self.slots)

    def prefill_requests(self) -> Column:
        """Return requests waiting for or in prefill, by whichever router."""
        return self._sum(
            self._view.own.prefill_requests, self._view.measured.other_prefill_requests
        )

    def prefill_tokens(self) -> Column:
        """Return prompt tokens waiting for or in prefill, by whichever router."""
        return self._sum(self._view.own.prefill_tokens, self._view.measured.other_prefill_tokens)

    def decode_requests(self) -> Column:
        """Return sequences generating or waiting to, by whichever router."""
        return self._sum(self._view.own.decode_requests, self._view.measured.other_decode_requests)

    def decode_kv_tokens(self) -> Column:
        """Return KV tokens committed: prompts plus tokens generated so far."""
        return self._sum(
            self._view.own.decode_kv_tokens, self._view.measured.other_decode_kv_tokens
        )

    def kv_used_tokens(self) -> Column:
        """Return KV tokens in use as last measured, by whomever; up to a report old."""
        return self.take(self._view.measured.kv_used_tokens)

    def cached_tokens(self, request: Request) -> Column:
        """Return how many of a request's prompt tokens each candidate has cached."""
        if not self._view.tracks_prefixes:
            return self.once("nothing_cached", lambda: [0.0] * len(self.slots))
        return self.fixed_column(
            [float(self._view.cached_prefix_tokens(request, i)) for i in self.instances]
        )

    def decode_remaining_tokens(self) -> Column:
        """Return tokens still to be generated: estimated for own, typical for others'."""
        typical = self._view.typical_remaining_tokens
        own = self._view.own.decode_remaining_tokens
        other = self._view.measured.other_decode_requests
        if self._index is not None:
            return np.asarray(
                np.frombuffer(own)[self._index] + typical * np.frombuffer(other)[self._index]
            )
        return [own[slot] + typical * other[slot] for slot in self.slots]

    def fixed(self, name: str, value: Callable[[Instance, EngineConstants], float]) -> Column:
        """Return a value that depends on what an instance is, not on its load or the request.

        It is computed once under its `name` and kept for as long as the roster stays.
        """
        return self.once(
            name, lambda: [value(i, c) for i, c in zip(self.instances, self.constants, strict=True)]
        )

    def once(self, name: str, values: Callable[[], list[float]]) -> Column:
        """Return values of all candidates that stay as long as the roster, computed once."""
        column = self._fixed.get(name)
        if column is None:
            column = self._fixed[name] = self.fixed_column(values())
        return column

    def position(self) -> Column:
        """Return each candidate's place in the order of ids, from 0."""
        return self.once("position", lambda: [float(i) for i in range(len(self.slots))])

    def fixed_column(self, values: list[float]) -> Column:
        """Return values given candidate by candidate as a column of this side's kind."""
        return np.array(values) if self.vectorised else values

    def map(self, formula: Callable[..., float], *columns: Column) -> Column:
        """Apply a formula of plain arithmetic to columns, candidate by candidate."""
        if self.vectorised:
            return np.asarray(formula(*columns))
        return [formula(*row) for row in zip(*columns, strict=True)]

    def positive(self, column: Column) -> Column:
        """Return the positive part, candidate by candidate."""
        if self.vectorised:
            return np.maximum(column, 0.0)
        return [max(0.0, value) for value in column]

    def lesser(self, left: Column, right: Column) -> Column:
        """Return the lesser of two columns, candidate by candidate."""
        if self.vectorised:
            return np.minimum(left, right)
        return [min(pair) for pair in zip(left, right, strict=True)]

    def take(self, values: "array[float]") -> Column:
        """Return a column over this side's candidates from one over all instances."""
        if self._index is not None:
            return np.asarray(np.frombuffer(values)[self._index])
        return [values[slot] for slot in self.slots]

    def _sum(self, own: "array[float]", other: "array[float]") -> Column:
        if self._index is not None:
            return np.asarray(np.frombuffer(own)[self._index] + np.frombuffer(other)[self._index])
        return [own[slot] + other[slot] for slot in self.slots]


class ClusterView:
    """One pool at one moment; sides are cached until the roster changes."""

    tracks_prefixes = False

    def __init__(
        self,
        roster: Roster,
        measured: Measurements,
        own: Columns,
        *,
        vector_from: int = VECTOR_FROM,
    ) -> None:
        self.roster = roster
        self.measured = measured
        self.own = own
        self.typical_remaining_tokens = 100.0
        self._vector_from = vector_from
        self._sides: dict[tuple[SideKind, str], Side] = {}
        # True where some instance does prefill alone, so that hand-offs make sense.
        self.has_prefill = any(i.role is Role.PREFILL for i in roster.instances)

    def frozen(self) -> "ClusterView":
        """Return a copy whose loads stand still: what a decision made now rests on."""
        view = ClusterView(
            self.roster, self.measured, self.own.copied(), vector_from=self._vector_from
        )
        view.typical_remaining_tokens = self.typical_remaining_tokens
        return view

    def cached_prefix_tokens(self, request: Request, instance: Instance) -> int:  # noqa: ARG002
        """Return how many prompt tokens an instance has cached: 0, prefixes are not tracked."""
        return 0

    def constants_of(self, instance: Instance) -> EngineConstants:
        """Return the constants in force for an instance, its own slowness included."""
        priced = self.roster.constants.get(instance.profile)
        constants = REFERENCE.constants if priced is None else priced.constants
        return constants if instance.scale == 1.0 else constants.slowed(instance.scale)

    def prefill_side(self, request: Request) -> Side:
        """Return the instances that could prefill it and have a decode partner.

        Raises:
            NoCandidateError: There is none.
        """
        side = self.side("prefill", "", request.excluded)
        if not side.slots:
            raise NoCandidateError(self.why_no_prefill())
        return side

    def decode_side(self, request: Request, prefill: Instance | None) -> Side:
        """Return the instances that could decode what `prefill` computed; None: MIXED ones.

        Raises:
            NoCandidateError: There is none.
        """
        if prefill is None:
            side = self.side("mixed", "", request.excluded)
        else:
            side = self.side("decode", prefill.pairing_key, request.excluded)
        if not side.slots:
            raise NoCandidateError(RejectReason.NO_DECODE_INSTANCE)
        return side

    def side(
        self, kind: SideKind, pairing_key: str = "", excluded: frozenset[str] = frozenset()
    ) -> Side:
        """Return the candidates of a kind, maybe none; `pairing_key` matters for "decode" alone."""
        key = (kind, pairing_key)
        side = self._sides.get(key)
        if side is None:
            side = self._sides[key] = self._build(kind, pairing_key, frozenset())
        if excluded and any(i.instance_id in excluded for i in side.instances):
            return self._build(kind, pairing_key, excluded)
        return side

    def why_no_prefill(self) -> RejectReason:
        """Return why no instance can prefill."""
        usable = [i for i in self.roster.instances if i.state in _USABLE]
        if not any(i.role is not Role.DECODE for i in usable):
            return RejectReason.NO_PREFILL_INSTANCE
        if not any(i.role is not Role.PREFILL for i in usable):
            return RejectReason.NO_DECODE_INSTANCE
        return RejectReason.NO_PAIR

    def _build(self, kind: SideKind, pairing_key: str, excluded: frozenset[str]) -> Side:
        instances = self.roster.instances
        decoding = {
            i.pairing_key
            for i in instances
            if i.role is not Role.PREFILL and i.state in _USABLE and i.instance_id not in excluded
        }
        slots: list[int] = []
        for state in (State.READY, State.STALE):
            slots = [
                slot
                for slot, instance in enumerate(instances)
                if instance.state is state
                and instance.instance_id not in excluded
                and _fits(instance, kind, pairing_key, decoding)
            ]
            if slots:
                break
        slots.sort(key=lambda slot: instances[slot].instance_id)
        return Side(self, slots, blind=state is State.STALE, vector_from=self._vector_from)


def _fits(instance: Instance, kind: SideKind, pairing_key: str, decoding: set[str]) -> bool:
    if kind == "mixed":
        return instance.role is Role.MIXED
    if kind == "decode":
        return instance.role is not Role.PREFILL and instance.pairing_key == pairing_key
    return instance.role is not Role.DECODE and instance.pairing_key in decoding
