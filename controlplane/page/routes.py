"""The page's one route."""

from collections.abc import Sequence
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route
from steelyard.v1 import types_pb2

from controlplane.core.values import Happening, Outcome
from controlplane.feed import SnapshotFeed
from controlplane.page.view import WINDOW_SECONDS, instance_rows, outcome_rows
from controlplane.store import StreamStore
from servicekit.errors import RedisUnavailable

REFRESH_SECONDS = 2
_MOST_OUTCOMES = 2_000
_SHOWN_OUTCOMES, _SHOWN_EVENTS = 12, 20


def page_routes(feed: SnapshotFeed, store: StreamStore, replica_id: str) -> list[BaseRoute]:
    """Make the page; it refreshes itself and needs no script."""
    environment = Environment(
        loader=PackageLoader("controlplane.page"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clock": _clock, "ms": _milliseconds, "value": _value}
    template = environment.get_template("cluster.html")

    async def show(_: Request) -> Response:
        outcomes: Sequence[tuple[float, Outcome]] = ()
        events: Sequence[Happening] = ()
        store_error = ""
        try:
            outcomes = await store.recent_outcomes(_MOST_OUTCOMES)
            events = await store.recent_events(_SHOWN_EVENTS)
        except RedisUnavailable as error:
            store_error = error.message
        snapshot = feed.latest or types_pb2.ClusterSnapshot()
        now_unix_seconds = max(
            snapshot.time.ToNanoseconds() / 1e9 + feed.age_seconds(),
            outcomes[0][0] if outcomes else 0.0,
        )
        text = template.render(
            replica_id=replica_id,
            refresh_seconds=REFRESH_SECONDS,
            store_error=store_error,
            snapshot=snapshot,
            age_milliseconds=feed.age_seconds() * 1000,
            instances=instance_rows(snapshot, feed.roster),
            constants=feed.roster.constants,
            constant_names=[field.name for field in types_pb2.EngineConstants.DESCRIPTOR.fields],
            slo=feed.roster.slo,
            summary=outcome_rows(outcomes, now_unix_seconds),
            window_minutes=round(WINDOW_SECONDS / 60),
            outcomes=outcomes[:_SHOWN_OUTCOMES],
            events=events,
        )
        return HTMLResponse(text)

    return [Route("/", show)]


def _clock(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, tz=UTC).strftime("%H:%M:%S")


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}" if seconds < 0.1 else f"{seconds * 1000:.0f}"


def _value(number: float) -> str:
    return f"{number:.4g}"
