"""`steelyard ctl`: look at a cluster and steer it, through the control plane."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from math import isfinite, nan
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import App, Parameter, validators
from steelyard.v1 import control_pb2, control_pb2_grpc, types_pb2

from cli.output import Output, show
from servicekit.channel import open_channel
from servicekit.enums import short_name

DEFAULT_CONTROL_PLANE = "127.0.0.1:7420"
_TIMEOUT_SECONDS = 10.0
T = TypeVar("T")
Stub = control_pb2_grpc.ControlServiceStub
Control = Annotated[
    str, Parameter(env_var="STEELYARD_CONTROL_PLANE", help="host:port of a control plane.")
]
Version = Annotated[int, Parameter(validator=validators.Number(gte=0, lt=1 << 32))]
Format = Annotated[Output, Parameter(name=["-o", "--output"])]

ctl = App(name="ctl", help="Look at a cluster and steer it.")
constants = App(name="constants", help="Cost constants: list, show, diff, rollback.")
ctl.command(constants)


@ctl.command
def get(
    what: Literal["instances", "constants", "slo"],
    *,
    output: Format = "table",
    control_plane: Control = DEFAULT_CONTROL_PLANE,
) -> None:
    """Show instances, current constants or SLO targets."""
    snapshot = _ask(control_plane, _snapshot)
    roster = types_pb2.Roster.FromString(snapshot.roster)
    rows = {"instances": _instances, "constants": _constants, "slo": _slo}[what](roster, snapshot)
    show(rows, output)


@ctl.command
def drain(
    instance_id: str, *, undo: bool = False, control_plane: Control = DEFAULT_CONTROL_PLANE
) -> None:
    """Take an instance out of service once it has finished what it has; --undo takes it back in."""
    request = control_pb2.DrainRequest(instance_id=instance_id, undo=undo)
    answer = _ask(control_plane, lambda stub: stub.Drain(request, timeout=_TIMEOUT_SECONDS))
    print(f"{instance_id}: {state_name(answer.state)}")


@ctl.command(name="set-slo")
def set_slo(
    *targets: Annotated[str, Parameter(help="CLASS:TTFT_MS:TPOT_MS, one a class.")],
    default_class: str = "",
    control_plane: Control = DEFAULT_CONTROL_PLANE,
) -> None:
    """Replace the SLO classes, as in `set-slo tight:175:39.7 loose:525:119.1`."""
    policy = types_pb2.SloPolicy()
    for entry in targets:
        name, ttft_ms, tpot_ms = _slo_parts(entry)
        policy.classes[name].ttft.FromNanoseconds(round(ttft_ms * 1e6))
        policy.classes[name].tpot.FromNanoseconds(round(tpot_ms * 1e6))
    policy.default_class = default_class or next(iter(policy.classes), "")
    request = control_pb2.SetSloRequest(slo=policy)
    answer = _ask(control_plane, lambda stub: stub.SetSlo(request, timeout=_TIMEOUT_SECONDS))
    show(_slo_rows(answer.slo), "table")


@constants.command(name="list")
def list_constants(
    profile: str = "", *, output: Format = "table", control_plane: Control = DEFAULT_CONTROL_PLANE
) -> None:
    """List all versions, newest first; the current one is marked."""
    request = control_pb2.ListConstantsRequest(profile=profile)
    answer = _ask(control_plane, lambda stub: stub.ListConstants(request, timeout=_TIMEOUT_SECONDS))
    rows = [
        {
            "profile": row.profile,
            "version": row.version,
            "current": "*" if answer.current.get(row.profile) == row.version else "",
            "published": _when(row.publish_time.ToSeconds()),
            "heldout_median_error": row.heldout_median_error,
            "samples": row.sample_count,
            "reason": row.reason,
        }
        for row in answer.constants
    ]
    show(rows, output)
    if output == "table":
        for line in _drift_lines(answer):
            print(line)


@constants.command
def accept(profile: str, *, control_plane: Control = DEFAULT_CONTROL_PLANE) -> None:
    """Publish what live traffic proposes for a profile whose instances drift."""
    listed = control_pb2.ListConstantsRequest(profile=profile)
    answer = _ask(control_plane, lambda stub: stub.ListConstants(listed, timeout=_TIMEOUT_SECONDS))
    if profile not in answer.proposed:
        raise SystemExit(f"steelyard: nothing is proposed for {profile}")
    request = control_pb2.PublishConstantsRequest(
        constants=answer.proposed[profile], accept_jump=True
    )
    made = _ask(
        control_plane, lambda stub: stub.PublishConstants(request, timeout=_TIMEOUT_SECONDS)
    )
    print(f"{profile}: version {made.constants.version} is current")


@constants.command(name="show")
def show_constants(
    profile: str,
    version: Version = 0,
    *,
    output: Format = "table",
    control_plane: Control = DEFAULT_CONTROL_PLANE,
) -> None:
    """Show one version's values and errors; 0 is the current one."""
    row = _ask(control_plane, lambda stub: _one(stub, profile, version))
    print(f"{row.profile} version {row.version}{' (not calibrated)' if row.uncalibrated else ''}")
    rows = [
        {"constant": name, "value": value, "stderr": error if error >= 0 else None}
        for name, value, error in _values(row)
    ]
    show(rows, output)


@constants.command
def diff(
    profile: str, old: Version, new: Version = 0, *, control_plane: Control = DEFAULT_CONTROL_PLANE
) -> None:
    """Show what changed between two versions of a profile's constants."""
    before = _ask(control_plane, lambda stub: _one(stub, profile, old))
    after = _ask(control_plane, lambda stub: _one(stub, profile, new))
    rows = [
        {
            "constant": name,
            f"v{before.version}": a,
            f"v{after.version}": b,
            "ratio": b / a if a else None,
        }
        for (name, a, _), (_, b, _) in zip(_values(before), _values(after), strict=True)
    ]
    show(rows, "table")


@constants.command
def rollback(
    profile: str, version: Version, *, control_plane: Control = DEFAULT_CONTROL_PLANE
) -> None:
    """Make an earlier version current; routers follow within a second, nothing is deleted."""
    request = control_pb2.RollbackConstantsRequest(profile=profile, version=version)
    answer = _ask(
        control_plane, lambda stub: stub.RollbackConstants(request, timeout=_TIMEOUT_SECONDS)
    )
    print(f"{answer.constants.profile}: version {answer.constants.version} is current")


def _drift_lines(answer: control_pb2.ListConstantsResponse) -> list[str]:
    """Say who left the pace of its constants, and what is proposed."""
    lines = [
        f"DRIFT {drift.instance_id}: {drift.part} at {drift.ratio:.2f} times its constants "
        f"({drift.profile}) since {_when(drift.since_time.ToSeconds())}"
        for drift in answer.drifting
    ]
    lines += [
        f"PROPOSED for {name}: {proposed.reason}; `steelyard ctl constants accept {name}`"
        for name, proposed in sorted(answer.proposed.items())
    ]
    return lines


def _ask(address: str, call: Callable[[Stub], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with open_channel(address) as channel:
            return await call(control_pb2_grpc.ControlServiceStub(channel))

    return asyncio.run(ask())


async def _snapshot(stub: Stub) -> types_pb2.ClusterSnapshot:
    stream = stub.WatchCluster(control_pb2.WatchClusterRequest(), timeout=_TIMEOUT_SECONDS)
    async for message in stream:
        stream.cancel()
        return message.snapshot
    return types_pb2.ClusterSnapshot()


async def _one(stub: Stub, profile: str, version: int) -> types_pb2.ConstantsVersion:
    request = control_pb2.GetConstantsRequest(profile=profile, version=version)
    return (await stub.GetConstants(request, timeout=_TIMEOUT_SECONDS)).constants


def _instances(
    roster: types_pb2.Roster, snapshot: types_pb2.ClusterSnapshot
) -> list[dict[str, Any]]:
    loads = snapshot.loads
    return [
        {
            "instance": row.engine.instance_id,
            "role": short_name(types_pb2.Role, row.engine.role).lower(),
            "state": state_name(row.state),
            "model": row.engine.model,
            "running": _at(loads.running, i),
            "waiting": _at(loads.waiting, i),
            "kv_used_tokens": _at(loads.kv_used_tokens, i),
            "kv_total_tokens": row.engine.kv_total_tokens,
            "queued_prefill_tokens": _at(loads.queued_prefill_tokens, i),
            "step_ms": round(1e3 * float(_at(loads.step_seconds, i)), 2),
            "age_ms": round(1e3 * float(_at(loads.age_seconds, i))),
            "scale": row.scale or 1.0,
            "epoch": row.engine.epoch[:8],
            "address": row.engine.address,
        }
        for i, row in enumerate(roster.instances)
    ]


def _constants(
    roster: types_pb2.Roster,
    snapshot: types_pb2.ClusterSnapshot,  # noqa: ARG001  one signature for all tables
) -> list[dict[str, Any]]:
    return [
        {
            "profile": row.profile,
            "version": row.version,
            "calibrated": "no" if row.uncalibrated else "yes",
            **{name: value for name, value, _ in _values(row)},
        }
        for row in roster.constants
    ]


def _slo(
    roster: types_pb2.Roster,
    snapshot: types_pb2.ClusterSnapshot,  # noqa: ARG001  one signature for all tables
) -> list[dict[str, Any]]:
    return _slo_rows(roster.slo)


def _slo_rows(policy: types_pb2.SloPolicy) -> list[dict[str, Any]]:
    return [
        {
            "class": name,
            "ttft_ms": row.ttft.ToNanoseconds() / 1e6,
            "tpot_ms": row.tpot.ToNanoseconds() / 1e6,
            "default": "*" if name == policy.default_class else "",
        }
        for name, row in sorted(policy.classes.items())
    ]


def _slo_parts(entry: str) -> tuple[str, float, float]:
    parts = entry.split(":")
    try:
        name, ttft_ms, tpot_ms = parts[0], *map(float, parts[1:])
    except ValueError:
        name, ttft_ms, tpot_ms = "", nan, nan
    if not (name and isfinite(ttft_ms) and isfinite(tpot_ms)):
        raise SystemExit(f"steelyard: {entry!r} is not CLASS:TTFT_MS:TPOT_MS")
    return name, ttft_ms, tpot_ms


def _values(row: types_pb2.ConstantsVersion) -> list[tuple[str, float, float]]:
    names = [field.name for field in row.constants.DESCRIPTOR.fields]
    return [(n, getattr(row.constants, n), getattr(row.standard_error, n)) for n in names]


def state_name(state: int) -> str:
    """Return a state as people write it."""
    values = types_pb2.InstanceState.DESCRIPTOR.values_by_number
    return values[state].name.removeprefix("INSTANCE_STATE_")


def _at(column: Any, index: int) -> float:
    return column[index] if index < len(column) else 0


def _when(unix_seconds: int) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="seconds")
