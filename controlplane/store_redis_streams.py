"""Outcomes, events and folded lengths, in Redis."""

from collections.abc import Sequence

from controlplane.core.lengths import LengthTable
from controlplane.core.values import Happening, Outcome
from controlplane.store_codec import OUTCOME, decoded, text, weights_from, weights_text
from controlplane.store_redis_base import RedisBase
from servicekit import redis_keys


class RedisStreams(RedisBase):
    """See `StreamStore`."""

    async def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """See `StreamStore`."""
        if not outcomes:
            return
        with self._translated():
            pipeline = self._redis.pipeline(transaction=False)
            for outcome in outcomes:
                pipeline.xadd(
                    redis_keys.OUTCOMES,
                    OUTCOME.to_fields(outcome),
                    maxlen=self._max_outcomes,
                    approximate=True,
                )
            await pipeline.execute()

    async def outcomes_after(self, cursor: str, count: int) -> tuple[str, list[Outcome]]:
        """See `StreamStore`."""
        start = f"({cursor}" if cursor else "-"
        with self._translated():
            rows = await self._redis.xrange(redis_keys.OUTCOMES, min=start, count=count)
        outcomes = [OUTCOME.from_fields(decoded(fields)) for _, fields in rows]
        return (rows[-1][0].decode() if rows else cursor), outcomes

    async def outcomes_end(self) -> str:
        """See `StreamStore`."""
        with self._translated():
            rows = await self._redis.xrevrange(redis_keys.OUTCOMES, count=1)
        return rows[0][0].decode() if rows else ""

    async def recent_outcomes(self, count: int) -> list[tuple[float, Outcome]]:
        """See `StreamStore`."""
        with self._translated():
            rows = await self._redis.xrevrange(redis_keys.OUTCOMES, count=count)
        return [(_stored(row_id), OUTCOME.from_fields(decoded(fields))) for row_id, fields in rows]

    async def add_event(self, happening: Happening) -> None:
        """See `StreamStore`."""
        row = {"kind": happening.kind, "subject": happening.subject, "detail": happening.detail}
        with self._translated():
            await self._redis.xadd(
                redis_keys.EVENTS, dict(row), maxlen=self._max_events, approximate=True
            )

    async def recent_events(self, count: int) -> list[Happening]:
        """See `StreamStore`."""
        with self._translated():
            rows = await self._redis.xrevrange(redis_keys.EVENTS, count=count)
        found = []
        for row_id, raw in rows:
            row = decoded(raw)
            found.append(
                Happening(row["kind"], row["subject"], row.get("detail", ""), _stored(row_id))
            )
        return found

    async def lengths(self, half_life_seconds: float) -> tuple[str, int, LengthTable]:
        """See `StreamStore`."""
        with self._translated():
            state = decoded(await self._redis.hgetall(redis_keys.LENGTHS_STATE))
            if not state:
                return "", 0, LengthTable(half_life_seconds)
            weights: dict[str, list[float]] = {}
            for model in state["models"].split("\n") if state["models"] else ():
                stored = await self._redis.hgetall(redis_keys.lengths(model))
                weights |= {key: weights_from(row) for key, row in decoded(stored).items()}
        table = LengthTable(half_life_seconds, float(state["counted_unix"]), weights)
        return state["cursor"], int(state["version"]), table

    async def write_lengths(
        self, replica_id: str, cursor: str, version: int, table: LengthTable
    ) -> bool:
        """See `StreamStore`."""
        models = table.by_model()
        arguments: list[str | int] = [
            replica_id,
            cursor,
            version,
            text(table.counted_unix_seconds),
            len(models),
        ]
        for model, keys in models.items():
            arguments += [model, len(keys)]
            for key, weights in keys.items():
                arguments += [key, weights_text(weights)]
        return bool(await self._run("write_lengths", *arguments))


def _stored(row_id: bytes) -> float:
    """When a row was stored, seconds since 1970 by Redis's clock."""
    return int(row_id.partition(b"-")[0]) / 1000
