"""Drift and proposals, in Redis."""

from collections.abc import Sequence
from typing import Any, get_args

from controlplane.core.drift import Drift, Part
from controlplane.core.values import Constants
from controlplane.store_codec import constants_fields, constants_from, decoded, text
from controlplane.store_redis_base import RedisBase
from servicekit import redis_keys

_UNPUBLISHED = {"version": "0", "published_unix": "0"}


class RedisDrift(RedisBase):
    """See `DriftStore`."""

    async def write_drift(self, drifting: Sequence[Drift], proposals: Sequence[Constants]) -> None:
        """See `DriftStore`."""
        rows = {
            f"{drift.part}:{drift.instance_id}": (
                f"{text(round(drift.ratio, 4))} {text(drift.since_unix_seconds)} {drift.profile}"
            )
            for drift in drifting
        }
        with self._translated():
            before = await self._redis.smembers(redis_keys.DRIFT_PROPOSED)
            pipeline = self._redis.pipeline(transaction=True)
            pipeline.delete(redis_keys.DRIFT, redis_keys.DRIFT_PROPOSED)
            for profile in before:
                pipeline.delete(redis_keys.constants_proposed(profile.decode()))
            if rows:
                pipeline.hset(redis_keys.DRIFT, mapping=dict[Any, Any](rows))
            for proposal in proposals:
                fields = dict[Any, Any](constants_fields(proposal) | _UNPUBLISHED)
                pipeline.hset(redis_keys.constants_proposed(proposal.profile), mapping=fields)
                pipeline.sadd(redis_keys.DRIFT_PROPOSED, proposal.profile)
            await pipeline.execute()

    async def drift(self) -> tuple[list[Drift], dict[str, Constants]]:
        """See `DriftStore`."""
        with self._translated():
            rows = decoded(await self._redis.hgetall(redis_keys.DRIFT))
            profiles = sorted(await self._redis.smembers(redis_keys.DRIFT_PROPOSED))
            stored = {
                name.decode(): decoded(
                    await self._redis.hgetall(redis_keys.constants_proposed(name.decode()))
                )
                for name in profiles
            }
        drifting = [_drift(key, row) for key, row in rows.items()]
        proposed = {name: constants_from(name, row) for name, row in stored.items() if row}
        return sorted(drifting, key=lambda d: (d.instance_id, d.part)), proposed


def _drift(key: str, row: str) -> Drift:
    part_name, _, instance_id = key.partition(":")
    parts: dict[str, Part] = {part: part for part in get_args(Part)}
    ratio, since, profile = row.split(" ", 2)
    return Drift(instance_id, profile, parts[part_name], float(ratio), float(since))
