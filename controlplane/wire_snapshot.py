"""Snapshots as the protocol has them, built for speed: columns go over in one go each."""

from collections.abc import Mapping, Sequence

from steelyard.v1 import types_pb2

from controlplane.core.lengths import BUCKET_EDGES, LengthTable
from controlplane.core.liveness import State
from controlplane.core.snapshot import Columns
from controlplane.core.values import Constants, Member, Slo
from controlplane.wire import constants_to, engine_to, slo_to
from servicekit.enums import number_of, short_name
from servicekit.times import timestamp


def roster_bytes(members: Sequence[Member], constants: Mapping[str, Constants], slo: Slo) -> bytes:
    """Serialize a Roster; equal contents give equal bytes.

    Args:
        members: those that are not GONE, by id.
        constants: current ones of every profile that appears, by profile.
        slo: targets in force.
    """
    roster = types_pb2.Roster(
        instances=[
            types_pb2.Instance(
                engine=engine_to(member.engine),
                state=number_of(types_pb2.InstanceState, member.liveness.state),
                scale=_scale(member, constants),
            )
            for member in members
        ],
        constants=[constants_to(constants[profile]) for profile in sorted(constants)],
        slo=slo_to(slo),
    )
    return roster.SerializeToString(deterministic=True)


def _scale(member: Member, constants: Mapping[str, Constants]) -> float:
    known = constants.get(member.engine.profile)
    return known.instance_scale.get(member.engine.instance_id, 1.0) if known else 1.0


def lengths_bytes(table: LengthTable) -> bytes:
    """Serialize a LengthTable to the precision it is stored with, so that replicas agree."""
    return types_pb2.LengthTable(
        lengths=[
            types_pb2.LengthStatistics(
                key=key,
                bucket_tokens=BUCKET_EDGES,
                weights=[round(weight, 6) for weight in table.weights[key]],
            )
            for key in sorted(table.weights)
        ]
    ).SerializeToString(deterministic=True)


def snapshot_bytes(
    *,
    sequence: int,
    now_unix_seconds: float,
    roster_version: int,
    roster: bytes,
    columns: Columns,
    lengths_version: int,
    lengths: bytes,
) -> bytes:
    """Serialize a ClusterSnapshot."""
    loads = columns.loads
    return types_pb2.ClusterSnapshot(
        sequence=sequence,
        time=timestamp(now_unix_seconds),
        roster_version=roster_version,
        roster=roster,
        loads=types_pb2.LoadColumns(
            running=loads.running,
            waiting=loads.waiting,
            kv_used_tokens=loads.kv_used_tokens,
            queued_prefill_tokens=loads.queued_prefill_tokens,
            step_seconds=loads.step_seconds,
            age_seconds=loads.age_seconds,
        ),
        by_router=[
            types_pb2.RouterColumns(
                router_id=router_id,
                prefill_requests=table.prefill_requests,
                prefill_tokens=table.prefill_tokens,
                decode_requests=table.decode_requests,
                decode_kv_tokens=table.decode_kv_tokens,
                held_kv_tokens=table.held_kv_tokens,
            )
            for router_id, table in columns.by_router.items()
        ],
        lengths_version=lengths_version,
        lengths=lengths,
    ).SerializeToString()


def states_of(roster: bytes) -> dict[str, State]:
    """Read who is in a roster, and in which state."""
    return {
        instance.engine.instance_id: State(short_name(types_pb2.InstanceState, instance.state))
        for instance in types_pb2.Roster.FromString(roster).instances
    }
