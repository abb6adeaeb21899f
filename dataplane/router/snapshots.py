"""From serialized snapshots to what the scheduler core reads."""

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from steelyard.v1 import types_pb2

from dataplane.core.cluster import (
    Instance,
    Measurements,
    PricedConstants,
    Role,
    Roster,
    SloPolicy,
    Snapshot,
    State,
)
from dataplane.core.request import Targets
from dataplane.core.slo import DEFAULT_SLO
from enginemodel.model import EngineConstants

_ROLES = {
    types_pb2.ROLE_PREFILL: Role.PREFILL,
    types_pb2.ROLE_DECODE: Role.DECODE,
    types_pb2.ROLE_MIXED: Role.MIXED,
}
_STATES = {
    types_pb2.INSTANCE_STATE_JOINING: State.JOINING,
    types_pb2.INSTANCE_STATE_READY: State.READY,
    types_pb2.INSTANCE_STATE_DRAINING: State.DRAINING,
    types_pb2.INSTANCE_STATE_STALE: State.STALE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """One snapshot, split by pool.

    Attributes:
        pools: Each pool's own snapshot, by pool name (model, with its revision where known).
        lengths: Decayed bucket weights of output lengths by key; None where unchanged.
        leaving_out: Gives the pools with the load of these routers left out as well as this one's:
            what a dispatcher sees that keeps account of their requests itself.
    """

    sequence: int
    roster_version: int
    pools: Mapping[str, Snapshot]
    lengths: Mapping[str, Sequence[float]] | None
    leaving_out: Callable[[Collection[str]], Mapping[str, Snapshot]]

    def aged(self) -> "ClusterState":
        """Return the same state, with its measurements not to be believed any more."""
        pools = {name: replace(snapshot, stale=True) for name, snapshot in self.pools.items()}
        return replace(self, pools=MappingProxyType(pools), lengths=None)


@dataclass(frozen=True, slots=True)
class _PoolSeats:
    roster: Roster
    seats: npt.NDArray[np.intp]


class SnapshotReader:
    """Reads snapshots for one router; parses roster and lengths only when their version is new."""

    def __init__(self, router_id: str) -> None:
        self._router_id = router_id
        self._roster_version = -1
        self._lengths_version = 0
        self._pools: dict[str, _PoolSeats] = {}
        self._count = 0

    def read(self, blob: bytes) -> ClusterState:
        """Return the state in a serialized ClusterSnapshot.

        Raises:
            google.protobuf.message.DecodeError: The bytes are no snapshot.
        """
        message = types_pb2.ClusterSnapshot.FromString(blob)
        if message.roster_version != self._roster_version:
            self._read_roster(message)
        lengths = None
        if message.lengths_version != self._lengths_version:
            table = types_pb2.LengthTable.FromString(message.lengths)
            self._lengths_version = message.lengths_version
            lengths = {row.key: tuple(row.weights) for row in table.lengths}
        return ClusterState(
            sequence=message.sequence,
            roster_version=message.roster_version,
            pools=self._split(message, ()),
            lengths=lengths,
            leaving_out=partial(self._split, message),
        )

    def _split(
        self, message: types_pb2.ClusterSnapshot, left_out: Collection[str]
    ) -> Mapping[str, Snapshot]:
        columns = self._columns(message, left_out)
        pools = {
            name: Snapshot(
                sequence=message.sequence,
                roster=pool.roster,
                measurements=Measurements(
                    **{field: _seated(column, pool.seats) for field, column in columns.items()}
                ),
            )
            for name, pool in self._pools.items()
        }
        return MappingProxyType(pools)

    def _read_roster(self, message: types_pb2.ClusterSnapshot) -> None:
        roster = types_pb2.Roster.FromString(message.roster)
        constants = {row.profile: _constants(row) for row in roster.constants}
        slo = _slo(roster.slo)
        by_pool: dict[str, list[int]] = {}
        instances = [_instance(row) for row in roster.instances]
        for seat, instance in enumerate(instances):
            by_pool.setdefault(instance.pool, []).append(seat)
        self._pools = {
            name: _PoolSeats(
                Roster(
                    version=message.roster_version,
                    instances=tuple(instances[seat] for seat in seats),
                    constants=constants,
                    slo=slo,
                ),
                np.array(seats, dtype=np.intp),
            )
            for name, seats in by_pool.items()
        }
        self._count = len(instances)
        self._roster_version = message.roster_version

    def _columns(
        self, message: types_pb2.ClusterSnapshot, left_out: Collection[str]
    ) -> dict[str, npt.NDArray[np.float64]]:
        loads = message.loads
        count = self._count
        columns = {
            "step_seconds": _column(loads.step_seconds, count),
            "age_seconds": _column(loads.age_seconds, count),
            "kv_used_tokens": _column(loads.kv_used_tokens, count),
            "other_prefill_requests": np.zeros(count),
            "other_prefill_tokens": np.zeros(count),
            "other_decode_requests": np.zeros(count),
            "other_decode_kv_tokens": np.zeros(count),
        }
        for row in message.by_router:
            if row.router_id == self._router_id or row.router_id in left_out:
                continue
            columns["other_prefill_requests"] += _column(row.prefill_requests, count)
            columns["other_prefill_tokens"] += _column(row.prefill_tokens, count)
            columns["other_decode_requests"] += _column(row.decode_requests, count)
            columns["other_decode_kv_tokens"] += _column(row.decode_kv_tokens, count)
        return columns


def _column(values: Iterable[float], count: int) -> npt.NDArray[np.float64]:
    column = np.fromiter(values, dtype=np.float64)
    if len(column) == count:
        return column
    # A report that came between roster and loads: what has no entry yet has no load.
    return np.resize(np.concatenate([column, np.zeros(count)]), count)


def _seated(column: npt.NDArray[np.float64], seats: npt.NDArray[np.intp]) -> "array[float]":
    seated: array[float] = array("d")
    seated.frombytes(column[seats].tobytes())
    return seated


def _instance(row: types_pb2.Instance) -> Instance:
    engine = row.engine
    revision = f"@{engine.model_revision}" if engine.model_revision else ""
    return Instance(
        instance_id=engine.instance_id,
        epoch=engine.epoch,
        role=_ROLES.get(engine.role, Role.MIXED),
        state=_STATES.get(row.state, State.STALE),
        pool=engine.model + revision,
        address=engine.address,
        pairing_key=engine.pairing_key,
        profile=engine.profile,
        scale=row.scale or 1.0,
        max_model_tokens=engine.max_model_tokens,
        vocab_size=engine.vocab_size,
        block_tokens=engine.block_tokens or 1,
        kv_total_tokens=engine.kv_total_tokens,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        max_num_seqs=engine.max_num_seqs,
        max_batched_tokens=engine.max_batched_tokens,
        handoff_lease_seconds=engine.handoff_lease.ToNanoseconds() / 1e9,
        tokenizer_sha256=engine.tokenizer_sha256,
    )


def _constants(row: types_pb2.ConstantsVersion) -> PricedConstants:
    values = row.constants
    return PricedConstants(
        version=row.version,
        uncalibrated=row.uncalibrated,
        constants=EngineConstants(
            p0_seconds=values.p0_seconds,
            p1_seconds=values.p1_seconds,
            p2_seconds_per_token=values.p2_seconds_per_token,
            p3_seconds_per_token_squared=values.p3_seconds_per_token_squared,
            d0_seconds=values.d0_seconds,
            d1_seconds_per_sequence=values.d1_seconds_per_sequence,
            d2_seconds_per_kv_token=values.d2_seconds_per_kv_token,
            h0_seconds=values.h0_seconds,
            handoff_bytes_per_second=values.handoff_bytes_per_second or 1e12,
        ),
    )


def _slo(message: types_pb2.SloPolicy) -> SloPolicy:
    if not message.classes:
        return DEFAULT_SLO
    return SloPolicy(
        classes={name: targets_from(row) for name, row in message.classes.items()},
        default_class=message.default_class,
    )


def targets_from(message: types_pb2.SloTargets) -> Targets:
    """Return targets in seconds; what is not set, or not above zero, is not aimed for."""
    ttft = message.ttft.ToNanoseconds() / 1e9 if message.HasField("ttft") else 0.0
    tpot = message.tpot.ToNanoseconds() / 1e9 if message.HasField("tpot") else 0.0
    growth = max(message.ttft_per_prompt_token.ToNanoseconds() / 1e9, 0.0)
    return Targets(ttft if ttft > 0 else float("inf"), tpot if tpot > 0 else float("inf"), growth)
