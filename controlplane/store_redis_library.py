"""Constants by version and targets, in Redis."""

from dataclasses import replace

from controlplane.core.values import Constants, Slo
from controlplane.errors import ChangedMeanwhile
from controlplane.store_codec import (
    constants_fields,
    constants_from,
    decoded,
    slo_fields,
    slo_from,
)
from controlplane.store_redis_base import RedisBase
from servicekit import redis_keys


class RedisLibrary(RedisBase):
    """See `LibraryStore`."""

    async def publish_constants(self, draft: Constants, expected_version: int) -> Constants:
        """See `LibraryStore`."""
        fields = constants_fields(draft)
        version, published_unix = await self._run(
            "publish_constants",
            draft.profile,
            expected_version,
            *[part for pair in fields.items() for part in pair],
        )
        if not version:
            raise ChangedMeanwhile(
                f"constants of {draft.profile} are not at version {expected_version} any more"
            )
        return replace(draft, version=int(version), published_unix_seconds=float(published_unix))

    async def current_versions(self) -> dict[str, int]:
        """See `LibraryStore`."""
        with self._translated():
            profiles = sorted(await self._redis.smembers(redis_keys.CONSTANTS_PROFILES))
            names = [profile.decode() for profile in profiles]
            versions = [
                await self._redis.hget(redis_keys.constants(name), "version") for name in names
            ]
        return {
            name: int(version)
            for name, version in zip(names, versions, strict=True)
            if version is not None
        }

    async def constants(self, profile: str, version: int) -> Constants | None:
        """See `LibraryStore`."""
        with self._translated():
            stored = await self._redis.hgetall(redis_keys.constants_version(profile, version))
        return constants_from(profile, decoded(stored)) if stored else None

    async def all_constants(self, profile: str) -> list[Constants]:
        """See `LibraryStore`."""
        with self._translated():
            latest = await self._redis.hget(redis_keys.constants(profile), "latest")
        found = [
            await self.constants(profile, version) for version in range(int(latest or 0), 0, -1)
        ]
        return [constants for constants in found if constants is not None]

    async def point_constants(self, profile: str, version: int) -> bool:
        """See `LibraryStore`."""
        return bool(await self._run("point_constants", profile, version))

    async def slo(self) -> Slo | None:
        """See `LibraryStore`."""
        with self._translated():
            stored = await self._redis.hgetall(redis_keys.SLO)
        return slo_from(decoded(stored)) if stored else None

    async def set_slo(self, slo: Slo) -> None:
        """See `LibraryStore`."""
        fields = slo_fields(slo)
        await self._run("set_slo", *[part for pair in fields.items() for part in pair])
