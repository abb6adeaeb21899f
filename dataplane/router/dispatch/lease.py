"""Who decides for a pool: a lease in Redis with a fencing token that only grows."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import redis.asyncio
import structlog

from servicekit.clock import Clock
from servicekit.redis_client import REDIS_ERRORS
from servicekit.redis_keys import dispatcher, dispatcher_fence

LEASE_SECONDS = 1.0
RENEW_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a pool's lease.

    Attributes:
        token: Grows with every change of holder.
        address: host:port of its gRPC server.
    """

    token: int
    router_id: str
    address: str

    def encode(self) -> str:
        """Return it as it stands in Redis: readable, in three words."""
        return f"{self.token} {self.router_id} {self.address}"

    @classmethod
    def decode(cls, value: bytes) -> "Holder | None":
        """Read what stands in Redis; None where it is nothing that we write."""
        parts = value.decode(errors="replace").split(" ")
        if len(parts) != 3 or not parts[0].isdigit():
            return None
        return cls(int(parts[0]), parts[1], parts[2])


class Lease:
    """One pool's lease, as one router sees it: takes it when it is free, renews it, follows it.

    The holder's own belief ends by its own clock, before Redis lets the key expire: a process that
    was frozen finds its belief ended when it wakes.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        pool: str,
        *,
        router_id: str,
        address: str,
        clock: Clock,
        on_change: Callable[[Holder | None], None],
    ) -> None:
        self._client = client
        self._pool = pool
        self._router_id = router_id
        self._address = address
        self._clock = clock
        self._on_change = on_change
        self._holder: Holder | None = None
        self._held_until = -float("inf")
        scripts = resources.files("dataplane.router.dispatch")
        self._renew = client.register_script((scripts / "renew.lua").read_text())
        self._release = client.register_script((scripts / "release.lua").read_text())
        self._log = structlog.get_logger("dataplane.router.dispatch")

    @property
    def holder(self) -> Holder | None:
        """Who holds it, as last seen; None where nobody does or nobody knows."""
        return self._holder

    @property
    def is_mine(self) -> bool:
        """Whether this router holds it, for certain, now."""
        return self._clock.monotonic() < self._held_until

    async def run(self) -> None:
        """Follow the lease until cancelled; gives it up on the way out."""
        try:
            while True:
                await self.step()
                await self._clock.sleep(RENEW_SECONDS)
        finally:
            if self.is_mine and self._holder is not None:
                self._held_until = -float("inf")
                with contextlib.suppress(*REDIS_ERRORS):
                    await self._release(keys=[dispatcher(self._pool)], args=[self._holder.encode()])

    async def step(self) -> None:
        """Renew, take or look, once."""
        asked_at = self._clock.monotonic()
        try:
            holder = await self._ask()
        except REDIS_ERRORS as error:
            self._log.debug("lease_unknown", pool=self._pool, error=str(error))
            # A lease that others hold may have changed hands; our own lasts until its time.
            holder = self._holder if self.is_mine else None
            self._see(holder)
            return
        mine = holder is not None and holder.router_id == self._router_id
        self._held_until = asked_at + LEASE_SECONDS if mine else -float("inf")
        self._see(holder)

    async def _ask(self) -> Holder | None:
        key, milliseconds = dispatcher(self._pool), int(LEASE_SECONDS * 1000)
        if self.is_mine and self._holder is not None:
            if await self._renew(keys=[key], args=[self._holder.encode(), milliseconds]):
                return self._holder
            self._held_until = -float("inf")
        value = await self._client.get(key)
        if isinstance(value, bytes):
            found = Holder.decode(value)
            # What a former life of ours left behind runs out by itself: we do not hold it.
            stale = found is not None and found.router_id == self._router_id
            return None if stale else found
        token = int(await self._client.incr(dispatcher_fence(self._pool)))
        mine = Holder(token, self._router_id, self._address)
        taken = await self._client.set(key, mine.encode(), nx=True, px=milliseconds)
        return mine if taken else None

    def _see(self, holder: Holder | None) -> None:
        if holder == self._holder:
            return
        self._holder = holder
        self._log.info(
            "dispatcher_changed",
            pool=self._pool,
            dispatcher=holder.router_id if holder else "",
            token=holder.token if holder else 0,
        )
        self._on_change(holder)
