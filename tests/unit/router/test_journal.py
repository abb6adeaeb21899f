"""The journal: rows that parse, decisions that can be made again from them."""

import asyncio
import json
from array import array

import pytest
import pytest_asyncio
from steelyard.v1 import types_pb2

from dataplane.core.cluster import Instance, Measurements, PricedConstants, Role, Roster, State
from dataplane.core.ledger import Columns
from dataplane.core.policies.registry import POLICIES, make_policy
from dataplane.core.predictor import LengthEstimate
from dataplane.core.request import Request, Targets
from dataplane.core.slo import DEFAULT_SLO
from dataplane.core.view import ClusterView
from dataplane.router.journal import Journal
from dataplane.router.session import Record
from enginemodel.model import EngineConstants
from servicekit.clock import ManualClock, SystemClock
from tests.support.scripted_agents import DecodeScript
from tests.support.scripted_cluster import ScriptedCluster
from tests.support.waiting import eventually

NOT_IN_ROWS = {"pool": "", "address": "", "vocab_size": 0, "handoff_lease_seconds": 0.0}
COLUMNS = ("prefill_requests", "prefill_tokens", "decode_requests", "decode_kv_tokens")


def roster_of(row: dict) -> Roster:
    """Read a roster row back."""
    instances = []
    for fields in row["instances"]:
        values = {k: v for k, v in fields.items() if k not in ("id", "role", "state")}
        instances.append(
            Instance(
                instance_id=fields["id"],
                role=Role(fields["role"]),
                state=State(fields["state"]),
                tokenizer_sha256="",
                **values,
                **NOT_IN_ROWS,
            )
        )
    constants = {}
    for profile, values in row["constants"].items():
        version = values.pop("version")
        constants[profile] = PricedConstants(
            version=version, constants=EngineConstants(**values), uncalibrated=False
        )
    return Roster(
        version=row["roster_version"],
        instances=tuple(instances),
        constants=constants,
        slo=DEFAULT_SLO,
    )


def view_of(row: dict, roster: Roster) -> ClusterView:
    """Read the view of a request row back."""
    loads, count = row["view"], len(roster.instances)
    own = Columns(count)
    for name in Columns.__slots__:
        setattr(own, name, array("d", loads[f"own_{name}"]))
    zeros = array("d", [0.0] * count)
    measured = Measurements(
        step_seconds=zeros,
        age_seconds=zeros,
        kv_used_tokens=zeros,
        **{f"other_{name}": array("d", loads[f"other_{name}"]) for name in COLUMNS},
    )
    view = ClusterView(roster, measured, own)
    view.typical_remaining_tokens = row["typical_remaining_tokens"]
    return view


def request_of(row: dict) -> Request:
    """Read the request of a row back."""
    infinite = float("inf")
    ttft, tpot = row["ttft_target_seconds"], row["tpot_target_seconds"]
    return Request(
        request_id=row["request_id"],
        prompt_tokens=row["prompt_tokens"],
        max_tokens=row["max_tokens"],
        length=LengthEstimate(row["predicted_tokens"], (), row["max_tokens"]),
        slo_class=row["slo_class"],
        urgency=row["urgency"],
        targets=Targets(infinite if ttft is None else ttft, infinite if tpot is None else tpot),
        arrived_at=row["arrived_monotonic"],
    )


@pytest_asyncio.fixture
async def journaled(redis_url, tmp_path):
    """Yield a router that keeps a journal, and the journal's path."""
    path = tmp_path / "journal" / "rows.jsonl"
    names = ("p0", "p1", "p2", "d0", "d1", "d2", "d3")
    async with ScriptedCluster(redis_url, names, journal_path=path) as cluster:
        yield cluster, path


def rows_in(path) -> list[dict]:
    """Read all rows; every line is one JSON object."""
    return [json.loads(line) for line in path.read_text().splitlines()]


async def finished_rows(path, count: int) -> list[dict]:
    """Wait until that many requests are on disk."""

    def enough():
        rows = rows_in(path) if path.exists() else []
        done = [row for row in rows if row["type"] == "request"]
        return rows if len(done) >= count else None

    return await eventually(enough)


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"round_robin"}))
async def test_decisions_can_be_made_again(journaled, policy):
    """Roster and request rows rebuild the view, and the policy places as it did."""
    cluster, path = journaled
    messages = [
        cluster.request(range(1, 20 * (i % 5) + 2), 4, policy=policy, tenant=f"t{i % 3}")
        for i in range(24)
    ]
    await asyncio.gather(*(cluster.generate(message, timeout=20) for message in messages))
    rows = await finished_rows(path, 24)
    rosters = {row["roster_version"]: row for row in rows if row["type"] == "roster"}
    for row in rows:
        if row["type"] != "request":
            continue
        roster = roster_of(json.loads(json.dumps(rosters[row["roster_version"]])))
        again = make_policy(policy).place(request_of(row), view_of(row, roster))
        assert (again.prefill_id, again.decode_id) == (row["prefill_id"], row["decode_id"])

    assert any(sum(row["view"]["own_decode_requests"]) > 3 for row in rows if "view" in row)


@pytest.mark.asyncio
async def test_a_row_tells_how_a_request_went(journaled):
    """Placement, tokens, times and ids of a finished request are in its row."""
    cluster, path = journaled
    heard = await cluster.generate(cluster.request(correlation_id="mine", slo_class="tight"))
    rows = await finished_rows(path, 1)
    row = rows[-1]

    assert row["request_id"] == heard.messages[0].request_id
    assert (row["correlation_id"], row["status"], row["slo_class"]) == ("mine", "ok", "tight")
    assert (row["prompt_tokens"], row["completion_tokens"], row["attempts"]) == (3, 4, 1)
    assert row["finish_reason"] == "FINISH_REASON_LENGTH"
    assert 0 < row["prefill_done_seconds"] <= row["decode_sent_seconds"] <= row["ttft_seconds"]
    assert row["ttft_seconds"] <= row["total_seconds"]
    assert row["predicted_ttft_seconds"] > 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("script", "call", "status", "tokens"),
    [
        (DecodeScript(1, "fail"), {}, "UNAVAILABLE", 1),
        (DecodeScript(2, "hang"), {"timeout": 0.3}, "DEADLINE_EXCEEDED", 2),
    ],
)
async def test_a_request_that_went_wrong_has_a_row(journaled, script, call, status, tokens):
    """A broken or late request is booked with its status, its tokens and what went wrong."""
    cluster, path = journaled
    cluster.script.decodes.append(script)
    await cluster.generate(**call)
    row = (await finished_rows(path, 1))[-1]

    assert (row["status"], row["completion_tokens"], row["slo_met"]) == (status, tokens, False)
    assert bool(row["causes"]) == (status == "UNAVAILABLE")


@pytest.mark.asyncio
async def test_arrivals_are_in_real_time_whatever_the_clock_counts(redis_url, tmp_path):
    """On a cluster that counts 50 seconds while one passes, a row has the time of day it came."""
    path = tmp_path / "rows.jsonl"
    async with ScriptedCluster(
        redis_url, ("p0", "d0"), journal_path=path, clock_rate=50.0
    ) as cluster:
        sent_unix = SystemClock().unix()
        await cluster.generate(cluster.request())
        row = (await finished_rows(path, 1))[-1]

    assert sent_unix <= row["arrived_unix"] <= SystemClock().unix()


@pytest.mark.asyncio
async def test_a_cancelled_request_has_a_row(journaled):
    """A client that hangs up leaves a row with CANCELLED."""
    cluster, path = journaled
    cluster.script.decodes.append(DecodeScript(1, "hang"))
    call = cluster.stub.Generate(cluster.request())
    await anext(aiter(call))
    call.cancel()
    row = (await finished_rows(path, 1))[-1]

    assert (row["status"], row["completion_tokens"]) == ("CANCELLED", 1)


@pytest.mark.asyncio
async def test_a_roster_is_written_once_a_version(journaled):
    """Decisions on the same roster share one roster row, a new version adds one."""
    cluster, path = journaled
    for _ in range(2):
        await cluster.generate()
    await cluster.publish(states={"d0": types_pb2.INSTANCE_STATE_DRAINING})
    await cluster.generate()
    rows = await finished_rows(path, 3)
    rosters = [row for row in rows if row["type"] == "roster"]

    assert [row["roster_version"] for row in rosters] == [1, 2]
    states = {i["id"]: i["state"] for i in rosters[1]["instances"]}
    assert states["d0"] == "draining"


@pytest.mark.asyncio
async def test_what_has_gathered_is_written_on_the_way_out(tmp_path):
    """Stopping a journal in whatever state writes every row once, in order."""
    path, clock = tmp_path / "rows.jsonl", ManualClock()
    journal = Journal(path, clock)
    task = asyncio.create_task(journal.run())
    await asyncio.sleep(0)
    for number in range(100):
        journal.write({"number": number})
    await clock.advance(0.3)
    for number in range(100, 200):
        journal.write({"number": number})
    task.cancel()
    await asyncio.wait([task])

    assert [row["number"] for row in rows_in(path)] == list(range(200))


@pytest.mark.asyncio
async def test_a_journal_that_cannot_be_written_stops_nobody(tmp_path):
    """A path that is a folder is told to the log, and rows go on being taken."""
    clock = ManualClock()
    journal = Journal(tmp_path, clock)
    task = asyncio.create_task(journal.run())
    await asyncio.sleep(0)
    journal.write({"a": 1})
    await clock.advance(0.3)
    journal.write({"a": 2})

    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


def test_only_the_last_decisions_are_kept(journal_of_many):
    """Explain knows recent requests; what is older is forgotten."""
    journal, ids = journal_of_many

    assert journal.recall(ids[0]) is None
    assert journal.recall(ids[-1]) is not None


@pytest.fixture
def journal_of_many():
    """Return a journal that was given one decision more than it keeps."""
    from dataplane.router.journal import Decision
    from tests.unit.core.builders import pool, request

    journal = Journal(None, SystemClock())
    view = pool("p0", "d0").view
    ids = [f"r{number}" for number in range(2_001)]
    for name in ids:
        decision = Decision(request(name), "least_loaded", "pool", 1, 0.0, view, blind=False)
        journal.remember(decision, Record(0.0, 0.0))
    return journal, ids
