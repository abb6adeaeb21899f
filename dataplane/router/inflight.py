"""What this router has in flight, written to Redis for operators: leases, and a row a request.

Writes are gathered and sent in one pipeline several times a second, off every request's way. Each
entry is a lease: should the router die, its entries expire by themselves.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
import redis.asyncio
import structlog

from servicekit.clock import Clock
from servicekit.redis_client import REDIS_ERRORS
from servicekit.redis_keys import inflight, request

LEASE_SECONDS = 30.0
FLUSH_SECONDS = 0.05
REQUEST_TTL_SECONDS = 60
ENDED = "ended"
"""Phase of the last note of a request."""

_WRITE = """
local changes = cmsgpack.unpack(ARGV[1])
for key, leases in pairs(changes.added) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', ARGV[2])
  for id, expiry in pairs(leases) do redis.call('ZADD', key, expiry, id) end
  redis.call('EXPIRE', key, ARGV[3])
end
for key, leases in pairs(changes.dropped) do
  for id, _ in pairs(leases) do redis.call('ZREM', key, id) end
end
for _, row in ipairs(changes.rows) do
  redis.call('HSET', unpack(row))
  redis.call('EXPIRE', row[1], ARGV[4])
end
"""
"""All is written by one command: packing commands is most of what they cost. ARGV: as MessagePack
`added` and `dropped`, expiry by request id by key, and `rows`, each its key, then fields and values
in turn; the time now; seconds that leases and rows are kept. Whoever writes a lease sweeps what
routers that died have left."""


@dataclass(slots=True)
class _Changes:
    """What is to be written: leases by (key, request id) with their expiry, and rows."""

    added: dict[tuple[str, str], float] = field(default_factory=dict)
    dropped: dict[tuple[str, str], float] = field(default_factory=dict)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.dropped or self.rows)


class InflightBoard:
    """Leases by instance and boot, and the phase of each request.

    What Redis could not take is not lost: all that is held is written again once it answers.
    """

    def __init__(self, client: redis.asyncio.Redis, *, clock: Clock, router_id: str) -> None:
        self._client = client
        self._clock = clock
        self._router_id = router_id
        self._held: dict[tuple[str, str], float] = {}
        self._changes = _Changes()
        self._rows_written: set[str] = set()
        self._writing = asyncio.Lock()
        self._log = structlog.get_logger("dataplane.router.inflight")
        self._lost = False

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, instance_id: str, epoch: str) -> None:
        """Note that a leg runs on one boot of an instance."""
        key = (inflight(instance_id, epoch), request_id)
        expiry = self._clock.unix() + LEASE_SECONDS
        self._held[key] = self._changes.added[key] = expiry
        self._changes.dropped.pop(key, None)

    def drop(self, request_id: str, instance_id: str, epoch: str) -> None:
        """Note that it does not any more."""
        key = (inflight(instance_id, epoch), request_id)
        expiry = self._held.pop(key, None)
        if expiry is not None:
            self._changes.added.pop(key, None)
            self._changes.dropped[key] = expiry

    def note(self, request_id: str, fields: Mapping[str, str]) -> None:
        """Set fields of the request's row."""
        self._changes.rows.setdefault(request_id, {"router": self._router_id}).update(fields)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._clock.sleep(FLUSH_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Write what has gathered; what Redis does not take stays for the next time.

        One write at a time: a lease that was added and dropped must arrive in that order.
        """
        async with self._writing:
            self._renew()
            if not self._changes:
                return
            changes, self._changes = self._changes, _Changes()
            try:
                await self._write(changes)
            except REDIS_ERRORS as error:
                if not self._lost:
                    self._log.warning("inflight_not_written", error=str(error))
                self._lost = True
                self._keep(changes)
            except asyncio.CancelledError:
                self._keep(changes)
                raise
            else:
                self._lost = False

    async def _write(self, changes: _Changes) -> None:
        rows: list[list[str]] = []
        for request_id, fields in changes.rows.items():
            if fields.get("phase") == ENDED:
                if request_id not in self._rows_written:
                    continue  # it began and ended between two writes: nobody could have looked
                self._rows_written.discard(request_id)
            else:
                self._rows_written.add(request_id)
            rows.append([request(request_id), *chain.from_iterable(fields.items())])
        leases = {"added": _by_key(changes.added), "dropped": _by_key(changes.dropped)}
        packed: Any = msgspec.msgpack.encode({**leases, "rows": rows})
        now = repr(self._clock.unix())
        kept = str(int(LEASE_SECONDS * 2)), str(REQUEST_TTL_SECONDS)
        result: Any = self._client.eval(_WRITE, 0, packed, now, *kept)
        await result

    def _keep(self, changes: _Changes) -> None:
        """Have everything written again that still matters; a lease that is over does not."""
        now = self._clock.unix()
        changes.dropped.update(self._changes.dropped)
        self._changes.dropped = {
            key: expiry
            for key, expiry in changes.dropped.items()
            if expiry > now and key not in self._held
        }
        self._changes.added = dict(self._held)

    def _renew(self) -> None:
        now = self._clock.unix()
        for key, expiry in self._held.items():
            if expiry - now < LEASE_SECONDS / 2:
                self._held[key] = self._changes.added[key] = now + LEASE_SECONDS


def _by_key(leases: Mapping[tuple[str, str], float]) -> dict[str, dict[str, str]]:
    """Return expiries, as Redis reads them, by request id, by key."""
    found: dict[str, dict[str, str]] = {}
    for (key, request_id), expiry in leases.items():
        found.setdefault(key, {})[request_id] = repr(expiry)
    return found
