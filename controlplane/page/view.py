"""What the page shows, computed from a snapshot and the recent past."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from steelyard.v1 import types_pb2

from controlplane.core.values import Outcome
from servicekit.enums import short_name

WINDOW_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance."""

    instance_id: str
    role: str
    state: str
    model: str
    engine: str
    address: str
    epoch: str
    running: int
    waiting: int
    queued_prefill_tokens: int
    kv_used_tokens: int
    kv_total_tokens: int
    kv_share: float
    """KV in use, 0 to 1; 0 where the total is unknown."""
    step_milliseconds: float
    age_milliseconds: float
    scale: float


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """Requests of one class and policy in the window."""

    slo_class: str
    policy: str
    requests: int
    failed: int
    goodput: float
    """Share that met its targets, 0 to 1."""
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    tpot_p99_seconds: float | None
    prompt_tokens: int
    completion_tokens: int


def instance_rows(
    snapshot: types_pb2.ClusterSnapshot, roster: types_pb2.Roster
) -> list[InstanceRow]:
    """Join the roster with the columns; empty where they are of different rosters."""
    loads = snapshot.loads
    if len(loads.running) != len(roster.instances):
        return []
    rows = []
    for number, instance in enumerate(roster.instances):
        engine = instance.engine
        total, used = engine.kv_total_tokens, loads.kv_used_tokens[number]
        rows.append(
            InstanceRow(
                instance_id=engine.instance_id,
                role=short_name(types_pb2.Role, engine.role).lower(),
                state=short_name(types_pb2.InstanceState, instance.state),
                model=engine.model,
                engine=f"{engine.engine_kind} {engine.engine_version}".strip(),
                address=engine.address,
                epoch=engine.epoch,
                running=loads.running[number],
                waiting=loads.waiting[number],
                queued_prefill_tokens=loads.queued_prefill_tokens[number],
                kv_used_tokens=used,
                kv_total_tokens=total,
                kv_share=min(1.0, used / total) if total else 0.0,
                step_milliseconds=loads.step_seconds[number] * 1000,
                age_milliseconds=loads.age_seconds[number] * 1000,
                scale=instance.scale,
            )
        )
    order = {"prefill": 0, "decode": 1, "mixed": 2}
    return sorted(rows, key=lambda row: (row.model, order.get(row.role, 3), row.instance_id))


def outcome_rows(
    stored: Iterable[tuple[float, Outcome]], now_unix_seconds: float
) -> list[OutcomeRow]:
    """Summarise what ended within the last `WINDOW_SECONDS`, by class and policy."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for stored_unix_seconds, outcome in stored:
        if now_unix_seconds - stored_unix_seconds <= WINDOW_SECONDS:
            groups.setdefault((outcome.slo_class, outcome.policy), []).append(outcome)
    return [_summary(*key, groups[key]) for key in sorted(groups)]


def _summary(slo_class: str, policy: str, outcomes: Sequence[Outcome]) -> OutcomeRow:
    ttfts = [o.ttft_seconds for o in outcomes if o.ttft_seconds is not None]
    tpots = [o.tpot_seconds for o in outcomes if o.tpot_seconds is not None]
    return OutcomeRow(
        slo_class=slo_class or "(none)",
        policy=policy or "(none)",
        requests=len(outcomes),
        failed=sum(o.status != "ok" for o in outcomes),
        goodput=sum(o.slo_met for o in outcomes) / len(outcomes),
        ttft_p50_seconds=percentile(ttfts, 0.5),
        ttft_p99_seconds=percentile(ttfts, 0.99),
        tpot_p99_seconds=percentile(tpots, 0.99),
        prompt_tokens=sum(o.prompt_tokens for o in outcomes),
        completion_tokens=sum(o.completion_tokens for o in outcomes),
    )


def percentile(values: Iterable[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
