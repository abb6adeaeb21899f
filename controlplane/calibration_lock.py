"""One calibration at a time: two would load the engines that each of them measures."""

import asyncio
import secrets
from collections.abc import AsyncGenerator

import structlog

from controlplane.errors import CalibrationLockLost, CalibrationRunning
from controlplane.store import LockStore
from servicekit.clock import Clock
from servicekit.errors import RedisUnavailable

LEASE_SECONDS = 6.0


class CalibrationLock:
    """Held for as long as somebody iterates over `hold`, by any replica."""

    def __init__(self, store: LockStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._log = structlog.get_logger("controlplane.calibration")

    async def hold(self, holder: str, stopping: asyncio.Event) -> AsyncGenerator[float, None]:
        """Yield the lease in seconds when the lock is taken and each time it is renewed.

        Ends when `stopping` is set; whoever stops iterating frees the lock.

        Raises:
            CalibrationRunning: somebody else holds it.
            CalibrationLockLost: it ran out, or Redis forgot it, and somebody else has it.
            RedisUnavailable: it cannot be renewed; it runs out by itself.
        """
        # Two streams of one name are two holders.
        token = f"{holder}#{secrets.token_hex(4)}"
        owner = await self._store.hold_calibration(token, LEASE_SECONDS)
        if owner != token:
            name = owner.rpartition("#")[0]
            raise CalibrationRunning(f"{name} calibrates already", metadata={"holder": name})
        self._log.info("calibration_lock_taken", holder=holder)
        try:
            while owner == token and not stopping.is_set():
                yield LEASE_SECONDS
                await self._clock.sleep(LEASE_SECONDS / 3)
                owner = await self._store.hold_calibration(token, LEASE_SECONDS)
            if owner != token:
                raise CalibrationLockLost(f"{owner.rpartition('#')[0]} has the lock now")
        finally:
            await self._free(token)

    async def _free(self, token: str) -> None:
        try:
            await self._store.release_calibration(token)
        except RedisUnavailable as error:
            self._log.warning("calibration_lock_not_freed", reason=error.message)
        self._log.info("calibration_lock_freed", holder=token.rpartition("#")[0])
