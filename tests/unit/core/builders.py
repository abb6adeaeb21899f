"""Short ways to say what a cluster, its snapshot and a request look like."""

from array import array
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from dataplane.core.cluster import (
    Instance,
    Measurements,
    PricedConstants,
    Role,
    Roster,
    SloPolicy,
    Snapshot,
    State,
)
from dataplane.core.events import Action, SnapshotArrived, StartDecode, StartPrefill, WakeAt
from dataplane.core.pool import Pool
from dataplane.core.predictor import LengthEstimate
from dataplane.core.request import Request, Targets
from dataplane.core.slo import DEFAULT_SLO, urgency
from enginemodel.profiles import PROFILES, REFERENCE


def instance(name: str, role: str = "", **changes: Any) -> Instance:
    """Return an engine; its role goes by the first letter of its name unless it is told."""
    guessed = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}[name[0]]
    profile = REFERENCE
    made = Instance(
        instance_id=name,
        epoch="1",
        role=Role(role) if role else guessed,
        state=State.READY,
        pool="model",
        address="",
        pairing_key="k",
        profile=profile.name,
        scale=1.0,
        max_model_tokens=profile.max_model_tokens,
        vocab_size=1000,
        block_tokens=profile.block_tokens,
        kv_total_tokens=profile.kv_total_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        max_num_seqs=profile.max_num_seqs,
        max_batched_tokens=profile.max_batched_tokens,
        handoff_lease_seconds=30.0,
        tokenizer_sha256="",
    )
    return replace(made, **changes)


def roster(*instances: Instance | str, version: int = 1, slo: SloPolicy = DEFAULT_SLO) -> Roster:
    """Return a roster of engines, given whole or by name."""
    return Roster(
        version=version,
        instances=tuple(i if isinstance(i, Instance) else instance(i) for i in instances),
        constants={
            name: PricedConstants(version=1, constants=profile.constants, uncalibrated=False)
            for name, profile in PROFILES.items()
        },
        slo=slo,
    )


def snapshot(of: Roster, *, stale: bool = False, **columns: Mapping[str, float]) -> Snapshot:
    """Return a snapshot; a column is given as {instance: value}, the rest is 0."""
    measured = {
        field.name: array(
            "d", [columns.get(field.name, {}).get(i.instance_id, 0.0) for i in of.instances]
        )
        for field in fields(Measurements)
    }
    return Snapshot(sequence=1, roster=of, measurements=Measurements(**measured), stale=stale)


def pool(*instances: Instance | str, **options: Any) -> Pool:
    """Return a pool that has seen an idle snapshot of these engines."""
    made = Pool(**options)
    made.refresh(snapshot(roster(*instances)))
    return made


def request(
    name: str = "r",
    *,
    prompt: int = 100,
    output: float = 100.0,
    max_tokens: int = 1000,
    slo_class: str = "loose",
    at: float = 0.0,
    targets: Targets | None = None,
    excluded: frozenset[str] = frozenset(),
) -> Request:
    """Return a request of a default class."""
    held = DEFAULT_SLO.classes[slo_class] if targets is None else targets
    return Request(
        request_id=name,
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        length=LengthEstimate(min(output, float(max_tokens)), (), max_tokens),
        slo_class=slo_class,
        urgency=urgency(DEFAULT_SLO, held),
        targets=held,
        arrived_at=at,
        excluded=excluded,
    )


def arrival(of: Roster, *, stale: bool = False, **columns: Mapping[str, float]) -> SnapshotArrived:
    """Return the event of a snapshot."""
    return SnapshotArrived(snapshot(of, stale=stale, **columns))


def starts(actions: list[Action]) -> list[tuple[str, str]]:
    """Return who was started where, prefill and decode alike."""
    return [
        (action.request_id, action.instance_id)
        for action in actions
        if isinstance(action, StartPrefill | StartDecode)
    ]


def started(actions: list[Action]) -> list[str]:
    """Return who was started."""
    return [name for name, _ in starts(actions)]


def wake_at(actions: list[Action]) -> float | None:
    """Return when the scheduler wants to be woken."""
    return next((action.at for action in actions if isinstance(action, WakeAt)), None)
