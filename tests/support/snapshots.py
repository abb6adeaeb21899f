"""Cluster snapshots as a control plane would publish them, written by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import redis.asyncio
from steelyard.v1 import types_pb2

from servicekit.redis_keys import SNAPSHOT, SNAPSHOTS_CHANNEL

ROLES = {
    "p": types_pb2.ROLE_PREFILL,
    "d": types_pb2.ROLE_DECODE,
    "m": types_pb2.ROLE_MIXED,
}


def engine(name: str, **changes: Any) -> types_pb2.EngineInfo:
    """Return an engine whose role goes by the first letter of its name."""
    values: dict[str, Any] = {
        "instance_id": name,
        "epoch": "boot-1",
        "role": ROLES[name[0]],
        "model": "tiny",
        "address": f"{name}.invalid:1",
        "dtype": "bfloat16",
        "max_model_tokens": 4096,
        "vocab_size": 384,
        "block_tokens": 16,
        "kv_total_tokens": 60_000,
        "kv_bytes_per_token": 36_864,
        "max_num_seqs": 64,
        "max_batched_tokens": 2048,
        "pairing_key": "pair",
        "profile": "a40-qwen2.5-3b",
        "engine_kind": "scripted",
    }
    info = types_pb2.EngineInfo(**values | changes)
    if not info.HasField("handoff_lease"):
        info.handoff_lease.FromSeconds(30)
    return info


def roster(
    *engines: types_pb2.EngineInfo | str, states: Mapping[str, int] | None = None
) -> types_pb2.Roster:
    """Return a roster of engines, given whole or by name; READY unless `states` says otherwise."""
    message = types_pb2.Roster()
    for given in engines:
        info = engine(given) if isinstance(given, str) else given
        state = (states or {}).get(info.instance_id, types_pb2.INSTANCE_STATE_READY)
        message.instances.add(engine=info, state=state, scale=1.0)
    return message


def snapshot(
    members: types_pb2.Roster,
    *,
    sequence: int = 1,
    version: int = 1,
    by_router: Sequence[types_pb2.RouterColumns] = (),
    loads: types_pb2.LoadColumns | None = None,
    lengths: types_pb2.LengthTable | None = None,
    lengths_version: int = 0,
) -> types_pb2.ClusterSnapshot:
    """Return a snapshot of a roster."""
    return types_pb2.ClusterSnapshot(
        sequence=sequence,
        roster_version=version,
        roster=members.SerializeToString(),
        loads=loads,
        by_router=by_router,
        lengths_version=lengths_version,
        lengths=b"" if lengths is None else lengths.SerializeToString(),
    )


async def publish(client: redis.asyncio.Redis, message: types_pb2.ClusterSnapshot) -> None:
    """Publish a snapshot: the blob and its channel."""
    blob = message.SerializeToString()
    await client.set(SNAPSHOT, blob)
    await client.publish(SNAPSHOTS_CHANNEL, blob)
