"""What this router has in flight, written to Redis for operators: leases, and a row a request.

Writes are gathered and sent in one pipeline several times a second, off every request's way. Each
entry is a lease: should the router die, its entries expire by themselves.
"""

from collections.abc import Mapping

import redis.asyncio
import structlog

from servicekit.clock import Clock
from servicekit.redis_client import REDIS_ERRORS
from servicekit.redis_keys import inflight, request

LEASE_SECONDS = 30.0
FLUSH_SECONDS = 0.05
REQUEST_TTL_SECONDS = 60


class InflightBoard:
    """Leases by instance and boot, and the phase of each request.

    What Redis could not take is not lost: all that is held is written again once it answers.
    """

    def __init__(self, client: redis.asyncio.Redis, *, clock: Clock, router_id: str) -> None:
        self._client = client
        self._clock = clock
        self._router_id = router_id
        self._held: dict[tuple[str, str], float] = {}
        self._added: dict[tuple[str, str], float] = {}
        self._dropped: set[tuple[str, str]] = set()
        self._rows: dict[str, dict[str, str]] = {}
        self._log = structlog.get_logger("dataplane.router.inflight")
        self._lost = False

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, instance_id: str, epoch: str) -> None:
        """Note that a leg runs on one boot of an instance."""
        key = (inflight(instance_id, epoch), request_id)
        expiry = self._clock.unix() + LEASE_SECONDS
        self._held[key] = self._added[key] = expiry
        self._dropped.discard(key)

    def drop(self, request_id: str, instance_id: str, epoch: str) -> None:
        """Note that it does not any more."""
        key = (inflight(instance_id, epoch), request_id)
        if self._held.pop(key, None) is not None:
            self._added.pop(key, None)
            self._dropped.add(key)

    def note(self, request_id: str, fields: Mapping[str, str]) -> None:
        """Set fields of the request's row."""
        self._rows.setdefault(request_id, {"router": self._router_id}).update(fields)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._clock.sleep(FLUSH_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Write what has gathered; what Redis does not take stays for the next time."""
        self._renew()
        if not (self._added or self._dropped or self._rows):
            return
        added, dropped, rows = self._added, self._dropped, self._rows
        self._added, self._dropped, self._rows = {}, set(), {}
        pipe = self._client.pipeline(transaction=False)
        for (key, request_id), expiry in added.items():
            pipe.zadd(key, {request_id: expiry})
            pipe.expire(key, int(LEASE_SECONDS * 2))
        for key, request_id in dropped:
            pipe.zrem(key, request_id)
        for request_id, fields in rows.items():
            for name, value in fields.items():
                pipe.hset(request(request_id), name, value)
            pipe.expire(request(request_id), REQUEST_TTL_SECONDS)
        try:
            await pipe.execute()
        except REDIS_ERRORS as error:
            if not self._lost:
                self._log.warning("inflight_not_written", error=str(error))
            self._lost = True
            self._dropped |= dropped - self._held.keys()
            self._added = dict(self._held)
        else:
            self._lost = False

    def _renew(self) -> None:
        now = self._clock.unix()
        for key, expiry in self._held.items():
            if expiry - now < LEASE_SECONDS / 2:
                self._held[key] = self._added[key] = now + LEASE_SECONDS
