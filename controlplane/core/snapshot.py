"""The cluster at one moment, as columns in the order of the roster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.core.registry import Sighting
from controlplane.core.values import Load, Member


@dataclass(slots=True)
class LoadTable:
    """One entry an instance in each list."""

    running: list[int]
    waiting: list[int]
    kv_used_tokens: list[int]
    queued_prefill_tokens: list[int]
    step_seconds: list[float]
    age_seconds: list[float]


@dataclass(slots=True)
class RouterTable:
    """What one router has in flight, one entry an instance in each list."""

    prefill_requests: list[int]
    prefill_tokens: list[int]
    decode_requests: list[int]
    decode_kv_tokens: list[int]
    held_kv_tokens: list[int]


@dataclass(slots=True)
class Columns:
    """All of a snapshot that changes with every report."""

    loads: LoadTable
    by_router: dict[str, RouterTable] = field(default_factory=dict)


_NO_LOAD = Load()


def columns(
    members: Sequence[Member], sightings: Mapping[str, Sighting], now_unix_seconds: float
) -> Columns:
    """Lay the last reports out in columns.

    Args:
        members: in the order of the roster.
        sightings: by instance id. An instance without a report of its epoch counts as empty.
        now_unix_seconds: by the store's clock; ages are counted from it, never below 0.

    Returns:
        Lists of the members' length.
    """
    loads: list[Load] = []
    ages: list[float] = []
    for member in members:
        sighting = sightings.get(member.engine.instance_id)
        report = sighting.report if sighting else None
        own = report is not None and report.epoch == member.engine.epoch
        loads.append(report.load if report is not None and own else _NO_LOAD)
        seen = sighting.seen_unix_seconds if sighting else member.registered_unix_seconds
        ages.append(max(0.0, now_unix_seconds - seen))
    table = LoadTable(
        running=[load.running for load in loads],
        waiting=[load.waiting for load in loads],
        kv_used_tokens=[load.kv_used_tokens for load in loads],
        queued_prefill_tokens=[load.queued_prefill_tokens for load in loads],
        step_seconds=[load.step_seconds for load in loads],
        age_seconds=ages,
    )
    return Columns(table, _router_tables(loads))


def _router_tables(loads: Sequence[Load]) -> dict[str, RouterTable]:
    count = len(loads)
    tables: dict[str, RouterTable] = {}
    for row, load in enumerate(loads):
        for share in load.by_router:
            table = tables.get(share.router_id)
            if table is None:
                table = tables[share.router_id] = RouterTable(*([0] * count for _ in range(5)))
            table.prefill_requests[row] += share.prefill_requests
            table.prefill_tokens[row] += share.prefill_tokens
            table.decode_requests[row] += share.decode_requests
            table.decode_kv_tokens[row] += share.decode_kv_tokens
            table.held_kv_tokens[row] += share.held_kv_tokens
    return tables
