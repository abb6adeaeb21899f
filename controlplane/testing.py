"""Test doubles and makers of values, for tests of the control plane and of what talks to it."""

from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CollectorRegistry

from controlplane.core.liveness import Timing
from controlplane.core.values import Engine, Load, Report, Role
from controlplane.lengths import LengthsFolder
from controlplane.metrics import ControlMetrics
from controlplane.publisher import Publisher, PublisherOptions
from controlplane.store_memory import MemoryStore
from servicekit.clock import Clock
from servicekit.errors import RedisUnavailable


class FlakyStore(MemoryStore):
    """A memory store whose every method fails while `away`."""

    away = False

    def __getattribute__(self, name: str) -> Any:
        """Guard every method but `snapshots`, which guards itself."""
        found = super().__getattribute__(name)
        if name.startswith("_") or name in ("away", "snapshots") or not callable(found):
            return found

        async def guarded(*arguments: Any, **named: Any) -> Any:
            if self.away:
                raise RedisUnavailable("away")
            return await found(*arguments, **named)

        return guarded

    async def snapshots(self) -> AsyncIterator[bytes]:
        """Follow the snapshots until one comes while `away`."""
        async for snapshot in super().snapshots():
            if self.away:
                raise RedisUnavailable("away")
            yield snapshot


def make_metrics() -> ControlMetrics:
    """Make metrics in a registry of their own."""
    return ControlMetrics(CollectorRegistry())


def make_publisher(store: MemoryStore, clock: Clock, replica_id: str = "a") -> Publisher:
    """Make a publisher with the default timing."""
    return Publisher(
        store,
        clock,
        make_metrics(),
        LengthsFolder(store, half_life_seconds=1_800.0),
        replica_id=replica_id,
        timing=Timing(),
        options=PublisherOptions(),
    )


def make_engine(instance_id: str = "d0", epoch: str = "e1", **fields: Any) -> Engine:
    """Make a decode engine of profile `p`; `fields` win."""
    made: dict[str, Any] = {"role": Role.DECODE, "model": "m", "address": "h:1", "profile": "p"}
    return Engine(instance_id=instance_id, epoch=epoch, **(made | fields))


def make_report(
    instance_id: str = "d0", epoch: str = "e1", *, leaving: bool = False, **load: Any
) -> Report:
    """Make a report with these fields of its load."""
    return Report(instance_id, epoch, Load(**load), leaving)
