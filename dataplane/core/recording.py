"""A scheduler's whole life as plain rows: what it was told, when, and what it answered.

A scheduler is a function of its events and their times, so a recorded run can be made again: by the
simulator's copy of the same policy, by another policy, by a debugger. Rows hold plain values only,
fit for JSON lines; a roster is written once for each of its versions.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
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
from dataplane.core.events import (
    Action,
    Cancelled,
    Event,
    Failed,
    Finished,
    Leg,
    PrefillDone,
    Reject,
    SnapshotArrived,
    Tick,
    TokensStreamed,
)
from dataplane.core.late_binding import LateBinding
from dataplane.core.late_binding.preview import Preview
from dataplane.core.lengths import LengthHistogram
from dataplane.core.pool import Pool
from dataplane.core.predictor import LengthEstimate
from dataplane.core.request import Request, Targets
from dataplane.core.scheduler import Scheduler
from enginemodel.model import EngineConstants

Row = dict[str, Any]
_PLAIN = {
    cls.__name__: cls for cls in (PrefillDone, TokensStreamed, Finished, Cancelled, Tick, Failed)
}
_NEVER = 1e30
_ADOPTED = "Adopted"


class Recording:
    """A scheduler that writes down what passes through it, and changes nothing."""

    def __init__(self, inner: Scheduler, write: Callable[[Row], None]) -> None:
        self._inner = inner
        self._write = write
        self._roster_version: int | None = None

    def __repr__(self) -> str:
        return f"<Recording {self._inner!r}>"

    def submit(self, request: Request, now: float) -> list[Action]:
        """Pass a request on."""
        actions = self._inner.submit(request, now)
        self.note("Request", now, _request_row(request), actions)
        return actions

    def observe(self, event: Event, now: float) -> list[Action]:
        """Pass an event on."""
        actions = self._inner.observe(event, now)
        name = type(event).__name__
        if isinstance(event, SnapshotArrived):
            self.note(name, now, self._snapshot_row(event.snapshot), actions)
        else:
            values = asdict(event)
            if isinstance(event, Failed):
                values["leg"] = event.leg.value
            self.note(name, now, values, actions)
        return actions

    def note(self, kind: str, now: float, values: Row, actions: list[Action]) -> None:
        """Write one row."""
        self._write(
            {"type": "event", "now": now, "kind": kind, "values": values, "actions": rows(actions)}
        )

    def _snapshot_row(self, snapshot: Snapshot) -> Row:
        row: Row = {
            "sequence": snapshot.sequence,
            "stale": snapshot.stale,
            "roster_version": snapshot.roster.version,
            "columns": {
                field.name: getattr(snapshot.measurements, field.name).tolist()
                for field in fields(Measurements)
            },
        }
        if snapshot.roster.version != self._roster_version:
            self._roster_version = snapshot.roster.version
            row["roster"] = _roster_row(snapshot.roster)
        return row


class RecordingDispatcher(Recording):
    """Late binding, recorded; deciding for several routers, it also hears what is under way."""

    def __init__(self, inner: LateBinding, write: Callable[[Row], None]) -> None:
        super().__init__(inner, write)
        self._late_binding = inner

    def adopt(
        self, request: Request, prefill_id: str, decode_id: str, generated_tokens: int, now: float
    ) -> None:
        """Pass on a request that is under way."""
        self._late_binding.adopt(request, prefill_id, decode_id, generated_tokens, now)
        values = {
            "request": _request_row(request),
            "prefill_id": prefill_id,
            "decode_id": decode_id,
            "generated_tokens": generated_tokens,
        }
        self.note(_ADOPTED, now, values, [])

    def preview(self, now: float) -> Preview:
        """Say what would be done; asking changes nothing and is not recorded."""
        return self._late_binding.preview(now)

    @property
    def pool(self) -> Pool:
        """What it decides on."""
        return self._late_binding.pool


def rows(actions: Iterable[Action]) -> list[Row]:
    """Return actions as plain values, each with its kind."""
    plain = []
    for action in actions:
        values = asdict(action)
        if isinstance(action, Reject):
            values["reason"] = action.reason.value
        plain.append({"kind": type(action).__name__, **values})
    return plain


@dataclass(frozen=True, slots=True)
class Difference:
    """One event at which a replay answered otherwise."""

    index: int
    recorded: list[Row]
    replayed: list[Row]


def replay(recorded: Iterable[Row], scheduler: Scheduler) -> list[Difference]:
    """Tell a fresh scheduler what was recorded and return where it answered otherwise.

    Args:
        recorded: Rows of one pool and policy, and of one term of a dispatcher, in order; rows of
            another type are passed over.
        scheduler: Of the recorded policy and settings, over a fresh pool.

    Raises:
        KeyError: A row is of no kind that is known.
        TypeError: The rows are a dispatcher's, which only late binding can be.
    """
    differences, rosters = [], dict[int, Roster]()
    for index, row in enumerate(recorded):
        if row.get("type") != "event":
            continue
        if row["kind"] == "Request":
            actions = scheduler.submit(_request(row["values"]), row["now"])
        elif row["kind"] == _ADOPTED:
            actions = _adopt(scheduler, row["values"], row["now"])
        else:
            actions = scheduler.observe(_event(row["kind"], row["values"], rosters), row["now"])
        answered = rows(actions)
        if answered != row["actions"]:
            differences.append(Difference(index, row["actions"], answered))
    return differences


def _adopt(scheduler: Scheduler, values: Mapping[str, Any], now: float) -> list[Action]:
    if not isinstance(scheduler, LateBinding | RecordingDispatcher):
        raise TypeError(f"{scheduler!r} takes over no request that another has placed")
    held = (values["prefill_id"], values["decode_id"], values["generated_tokens"])
    scheduler.adopt(_request(values["request"]), *held, now)
    return []


def _event(kind: str, values: Mapping[str, Any], rosters: dict[int, Roster]) -> Event:
    if kind == "SnapshotArrived":
        version = values["roster_version"]
        if "roster" in values:
            rosters[version] = _roster(version, values["roster"])
        columns = {name: array("d", column) for name, column in values["columns"].items()}
        return SnapshotArrived(
            Snapshot(
                sequence=values["sequence"],
                roster=rosters[version],
                measurements=Measurements(**columns),
                stale=values["stale"],
            )
        )
    if kind == "Failed":
        return Failed(**{**values, "leg": Leg(values["leg"])})
    event: Event = _PLAIN[kind](**values)
    return event


def _request_row(request: Request) -> Row:
    length = request.length
    return {
        "request_id": request.request_id,
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "slo_class": request.slo_class,
        "urgency": request.urgency,
        "arrived_at": request.arrived_at,
        "excluded": sorted(request.excluded),
        "targets": [
            min(request.targets.ttft_seconds, _NEVER),
            min(request.targets.tpot_seconds, _NEVER),
        ],
        "length": {
            "mean_tokens": length.mean_tokens,
            "weights": []
            if isinstance(length.histogram, tuple)
            else list(length.histogram.weights),
            "max_tokens": length.max_tokens,
            "factor": length.factor,
        },
    }


def _request(row: Mapping[str, Any]) -> Request:
    length = row["length"]
    estimate = LengthEstimate(
        mean_tokens=length["mean_tokens"],
        histogram=LengthHistogram(length["weights"]) if length["weights"] else (),
        max_tokens=length["max_tokens"],
        factor=length["factor"],
    )
    return Request(
        **{
            **row,
            "excluded": frozenset(row["excluded"]),
            "targets": _targets(row["targets"]),
            "length": estimate,
        }
    )


def _targets(pair: list[float]) -> Targets:
    ttft, tpot = (float("inf") if value >= _NEVER else value for value in pair)
    return Targets(ttft, tpot)


def _roster_row(roster: Roster) -> Row:
    return {
        "instances": [
            {**asdict(i), "role": i.role.value, "state": i.state.value} for i in roster.instances
        ],
        "constants": {
            name: {
                "version": priced.version,
                "uncalibrated": priced.uncalibrated,
                "constants": asdict(priced.constants),
            }
            for name, priced in roster.constants.items()
        },
        "classes": {
            name: [min(t.ttft_seconds, _NEVER), min(t.tpot_seconds, _NEVER)]
            for name, t in roster.slo.classes.items()
        },
        "default_class": roster.slo.default_class,
    }


def _roster(version: int, row: Mapping[str, Any]) -> Roster:
    return Roster(
        version=version,
        instances=tuple(
            Instance(**{**i, "role": Role(i["role"]), "state": State(i["state"])})
            for i in row["instances"]
        ),
        constants={
            name: PricedConstants(
                version=priced["version"],
                uncalibrated=priced["uncalibrated"],
                constants=EngineConstants(**priced["constants"]),
            )
            for name, priced in row["constants"].items()
        },
        slo=SloPolicy(
            classes={name: _targets(pair) for name, pair in row["classes"].items()},
            default_class=row["default_class"],
        ),
    )
