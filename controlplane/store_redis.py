"""The store in Redis. Whatever must hold at once is a script below `lua/`, run by one Redis.

Keys are those of `servicekit.redis_keys`; scripts build them from its prefix, so this needs a
single Redis (or a primary with replicas), not a Redis Cluster.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from controlplane.core.liveness import Liveness, Signal, State
from controlplane.core.registry import Change, Sighting
from controlplane.core.values import Engine, Member, Report
from controlplane.errors import EpochReplaced
from controlplane.store import Registration, SnapshotState, Tick
from controlplane.store_codec import ENGINE, decoded, text
from controlplane.store_redis_base import RedisBase
from controlplane.store_redis_drift import RedisDrift
from controlplane.store_redis_library import RedisLibrary
from controlplane.store_redis_streams import RedisStreams
from servicekit import redis_keys

_SUBSCRIPTION_WAIT_SECONDS = 0.5
_MOST_SILENT_TIMES = 4


class RedisMembers(RedisBase):
    """See `MemberStore`."""

    async def register(self, engine: Engine) -> Registration:
        """See `MemberStore`."""
        fields = ENGINE.to_fields(engine)
        kind, before = await self._run(
            "register", engine.instance_id, engine.epoch, self.shown_ms, *_flattened(fields)
        )
        match kind.decode():
            case "new":
                return Registration("new")
            case "renewed":
                return Registration("renewed")
            case "replaced":
                return Registration("replaced", before.decode())
            case _:
                raise EpochReplaced(
                    f"{engine.instance_id} has booted again since epoch {engine.epoch}; "
                    "two agents share its id, or one outlived its engine"
                )

    async def member(self, instance_id: str) -> Member | None:
        """See `MemberStore`."""
        with self._translated():
            stored = await self._redis.hgetall(redis_keys.member(instance_id))
        return _member(decoded(stored)) if stored else None

    async def members(self) -> list[Member]:
        """See `MemberStore`."""
        with self._translated():
            ids = sorted(await self._redis.smembers(redis_keys.INSTANCES))
            pipeline = self._redis.pipeline(transaction=False)
            for instance_id in ids:
                pipeline.hgetall(redis_keys.member(instance_id.decode()))
            stored = await pipeline.execute() if ids else []
        return [_member(decoded(fields)) for fields in stored if fields]

    async def change(self, change: Change) -> bool:
        """See `MemberStore`."""
        member, after = change.member, change.after
        by_silence = change.signal in (Signal.SILENT, Signal.LOST)
        done = await self._run(
            "change",
            member.engine.instance_id,
            member.engine.epoch,
            member.liveness.state.value,
            text(member.liveness.drained),
            after.state.value,
            text(after.drained),
            f"{change.seen_unix_seconds * 1000:.0f}" if by_silence else "",
            self.gone_ms,
        )
        return bool(done)

    async def write_reports(self, reports: Sequence[Report]) -> set[tuple[str, str]]:
        """See `MemberStore`."""
        if not reports:
            return set()
        arguments: list[str | bytes | int] = [self.shown_ms, len(reports)]
        for report in reports:
            shown = _shown_fields(report)
            arguments += [report.instance_id, report.epoch, _REPORTS.encode(report), len(shown)]
            arguments += _flattened(shown)
        rejected = await self._run("write_reports", *arguments)
        return {(reports[number].instance_id, reports[number].epoch) for number in rejected}


class RedisSnapshots(RedisBase):
    """See `SnapshotStore`."""

    _last_loads: Mapping[bytes, bytes] = MappingProxyType({})
    _last_reports: Mapping[bytes, Report] = MappingProxyType({})

    async def tick(self, replica_id: str, lease_seconds: float) -> Tick:
        """See `SnapshotStore`."""
        answer = await self._run("tick", replica_id, round(lease_seconds * 1000))
        now = int(answer[0]) + int(answer[1]) / 1e6
        if not answer[2]:
            return Tick(now, holder=False)
        state, generation, loads, seen = answer[3:]
        reports = self._decoded_reports(dict(_pairs(loads)))
        sightings = {
            instance_id.decode(): Sighting(float(ms) / 1000, reports.get(instance_id))
            for instance_id, ms in _pairs(seen)
        }
        return Tick(
            now,
            holder=True,
            state=_state(dict(_pairs(state))),
            generation=int(generation),
            sightings=sightings,
        )

    def _decoded_reports(self, loads: dict[bytes, bytes]) -> dict[bytes, Report]:
        """Read the reports; those that have not changed since the last tick are not read again."""
        before, known = self._last_loads, self._last_reports
        reports = {
            instance_id: known[instance_id]
            if before.get(instance_id) == raw
            else _READER.decode(raw)
            for instance_id, raw in loads.items()
        }
        self._last_loads, self._last_reports = loads, reports
        return reports

    async def publish(self, replica_id: str, state: SnapshotState, snapshot: bytes) -> bool:
        """See `SnapshotStore`."""
        done = await self._run(
            "publish",
            replica_id,
            snapshot,
            state.sequence,
            state.roster_version,
            state.roster_digest,
        )
        return bool(done)

    async def release(self, replica_id: str) -> None:
        """See `SnapshotStore`."""
        await self._run("release", "snapshot:publisher", replica_id)

    async def snapshots(self) -> AsyncIterator[bytes]:
        """See `SnapshotStore`.

        A connection whose other end vanished says nothing, as does a quiet channel: after a while
        of silence the channel is subscribed to anew.
        """
        while True:
            async for snapshot in self._until_silent():
                yield snapshot

    async def _until_silent(self) -> AsyncIterator[bytes]:
        """Yield the current snapshot, then each new one until none comes."""
        async with self._redis.pubsub(ignore_subscribe_messages=True) as subscription:
            with self._translated():
                await subscription.subscribe(redis_keys.SNAPSHOTS_CHANNEL)
                current = await self._redis.get(redis_keys.SNAPSHOT)
            if current:
                yield current
            silent_times = 0
            while silent_times < _MOST_SILENT_TIMES:
                with self._translated():
                    message = await subscription.get_message(timeout=_SUBSCRIPTION_WAIT_SECONDS)
                silent_times += 1
                if message is not None:
                    silent_times = 0
                    yield message["data"]


class RedisLocks(RedisBase):
    """See `LockStore`."""

    async def hold_calibration(self, holder: str, lease_seconds: float) -> str:
        """See `LockStore`."""
        owner = await self._run("hold_calibration", holder, round(lease_seconds * 1000))
        return str(owner.decode())

    async def release_calibration(self, holder: str) -> None:
        """See `LockStore`."""
        await self._run("release", "calibration", holder)


class RedisStore(RedisMembers, RedisSnapshots, RedisLibrary, RedisStreams, RedisDrift, RedisLocks):
    """All of `Store`."""

    async def ping(self) -> None:
        """See `Store`."""
        with self._translated():
            await self._redis.ping()

    async def close(self) -> None:
        """See `Store`."""
        await self._redis.aclose()


_REPORTS = msgspec.json.Encoder()
_READER = msgspec.json.Decoder(Report)


def _flattened(fields: Mapping[str, str]) -> list[str]:
    return [part for pair in fields.items() for part in pair]


def _pairs(flat: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _shown_fields(report: Report) -> dict[str, str]:
    """What an operator reads of a report, measured apart from estimated."""
    load = report.load
    return {
        "measured.running": str(load.running),
        "measured.waiting": str(load.waiting),
        "measured.kv_used_tokens": str(load.kv_used_tokens),
        "measured.preemptions": str(load.preemptions),
        "measured.engine_healthy": str(int(load.engine_healthy)),
        "estimated.queued_prefill_tokens": str(load.queued_prefill_tokens),
        "estimated.step_seconds": f"{load.step_seconds:.6f}",
    }


def _member(stored: Mapping[str, str]) -> Member:
    return Member(
        ENGINE.from_fields(stored),
        Liveness(State(stored["state"]), stored["drained"] == "1"),
        float(stored["registered_unix"]),
    )


def _state(stored: Mapping[bytes, bytes]) -> SnapshotState:
    if not stored:
        return SnapshotState()
    return SnapshotState(
        sequence=int(stored[b"sequence"]),
        published_unix_seconds=float(stored[b"published_unix"]),
        roster_version=int(stored[b"roster_version"]),
        roster_digest=stored[b"roster_digest"].decode(),
    )
