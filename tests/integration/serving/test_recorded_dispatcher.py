"""What a router's dispatcher was told is in a file, and decides the same again."""

import asyncio
import json
from pathlib import Path

import pytest

from dataplane.core.pool import Pool
from dataplane.core.recording import Row, replay
from dataplane.core.schedulers import make_late_binding
from servicekit.embedded_redis import EmbeddedRedis
from tests.support.requests import mixed_requests
from tests.support.waiting import eventually
from tests.support.whole_cluster import MODEL, WholeCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(90)]
REQUESTS = 40


async def test_a_dispatcher_replays_from_the_events_file(tmp_path):
    """Its rows are marked with pool and term, and late binding answers each of them as it did."""
    path = tmp_path / "events.jsonl"
    router = {"policy": "late_binding", "events_path": path}
    messages = mixed_requests(REQUESTS, seed=11, longest=300)
    with EmbeddedRedis() as server:
        async with WholeCluster(server.url, "2P2D", time_scale=20.0, router=router) as cluster:
            await eventually(lambda: _attached(cluster))
            heard = await asyncio.gather(*(cluster.generate(m, timeout=60) for m in messages))
            await cluster.settled()
    rows = [row for row in _rows(path) if "dispatcher" in row]
    differences = replay(rows, make_late_binding({}, Pool()))
    asked = [row["values"]["request_id"] for row in rows if row["kind"] == "Request"]
    sent = [a for row in rows for a in row["actions"] if a["kind"] == "StartDecode"]

    assert [h.error for h in heard if h.error] == []
    assert {(row["policy"], row["pool"]) for row in rows} == {("late_binding", MODEL)}
    assert len({row["dispatcher"] for row in rows}) == 1
    assert len(asked) == len(set(asked)) == REQUESTS
    assert len(sent) == REQUESTS
    assert differences == []


def _attached(cluster: WholeCluster) -> bool:
    """Tell whether requests go to the dispatcher rather than the fallback."""
    (driver,) = cluster.router.fleet
    return driver.scheduler("late_binding").attached


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]
