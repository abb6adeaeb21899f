"""Engines that leave the pace of their constants, as the control plane tells of them."""

import asyncio
import math

import pytest
from steelyard.v1 import control_pb2, types_pb2

from cli import ctl
from controlplane.core.values import Outcome
from controlplane.drift_folder import DriftFolder
from controlplane.library import Library
from controlplane.store_memory import MemoryStore
from controlplane.testing import make_metrics
from controlplane.wire import constants_from
from enginemodel.model import decode_step_seconds, prefill_seconds
from enginemodel.profiles import A40_QWEN
from servicekit.clock import ManualClock
from tests.integration.controlplane.test_library import PROFILE, draft, publish

pytestmark = pytest.mark.asyncio
RUNNING, KV_TOKENS = 4, 8_000


async def report(stub, factor: float, count: int) -> None:
    """Report requests that were decoded at so many times the pace of the constants."""
    step = decode_step_seconds(A40_QWEN.constants, RUNNING, KV_TOKENS) * 1.25 * factor

    async def outcomes():
        for index in range(count):
            outcome = control_pb2.Outcome(
                request_id=f"{factor}-{index}", decode_instance_id="d0", completion_tokens=20
            )
            outcome.tpot.FromNanoseconds(round(step * 1e9))
            outcome.total.FromNanoseconds(round(30 * step * 1e9))
            outcome.end_time.GetCurrentTime()
            yield control_pb2.ReportOutcomesRequest(outcome=outcome)

    await stub.ReportOutcomes(outcomes())


async def test_a_decode_engine_that_slows_is_flagged_and_a_version_proposed(cluster, capsys):
    """Event, list and proposal name it; nothing is published by itself; a publication clears it."""
    replica, stub = await cluster.replica()
    agent = cluster.agent(stub)
    agent.load.kv_used_tokens, agent.load.running = KV_TOKENS, RUNNING
    agent.start()
    await publish(stub, draft())
    await cluster.until(stub, lambda v: v.constants == {PROFILE: 1} and v.load("d0", "running"))

    async def listing():
        return await stub.ListConstants(control_pb2.ListConstantsRequest(profile=PROFILE))

    async def flagged() -> bool:
        await report(stub, 1.4, 10)
        return bool((await listing()).drifting)

    async def steady() -> bool:
        await report(stub, 1.0, 10)
        return replica.drift.outcomes >= 30

    await cluster.eventually(steady)
    assert not (await listing()).drifting
    await cluster.eventually(flagged)

    found = await listing()
    (drift,) = found.drifting
    assert (drift.instance_id, drift.part) == ("d0", "decode")
    assert drift.ratio == pytest.approx(1.4, rel=0.1)
    assert found.proposed[PROFILE].version == 0
    assert found.current[PROFILE] == 1, "a proposal is no publication"
    rows = await cluster.client.xrange("steelyard:events")
    assert any(fields[b"kind"] == b"drift" for _, fields in rows)
    address = replica.server.address
    await asyncio.to_thread(ctl.list_constants, PROFILE, control_plane=address)
    shown = capsys.readouterr().out
    assert "DRIFT d0: decode at 1.4" in shown
    assert f"PROPOSED for {PROFILE}" in shown
    await asyncio.to_thread(ctl.accept, PROFILE, control_plane=address)
    assert f"{PROFILE}: version 2 is current" in capsys.readouterr().out

    async def cleared() -> bool:
        return not (await listing()).drifting

    await cluster.eventually(cleared)


class Holding:
    """A publisher that holds the lease."""

    holder = True


class Feed:
    """A feed with one snapshot that the test moves on."""

    def __init__(self) -> None:
        self.roster = types_pb2.Roster()
        self.latest = types_pb2.ClusterSnapshot(sequence=1, roster_version=1)
        for name in ("p0", "p1"):
            engine = types_pb2.EngineInfo(
                instance_id=name, epoch="e", profile=PROFILE, max_batched_tokens=2048
            )
            self.roster.instances.add(engine=engine)

    def carry(self, constants: types_pb2.ConstantsVersion) -> None:
        """Carry other constants in the next snapshot."""
        del self.roster.constants[:]
        self.roster.constants.add().CopyFrom(constants)
        self.latest = types_pb2.ClusterSnapshot(
            sequence=self.latest.sequence + 1, roster_version=self.latest.roster_version + 1
        )


@pytest.mark.parametrize("auto_publish", [True, False])
async def test_a_lasting_drift_is_published_only_where_that_is_wanted(auto_publish):
    """With auto_publish the proposal becomes a version after a minute; else it stays a proposal."""
    clock, metrics = ManualClock(), make_metrics()
    store, feed = MemoryStore(clock), Feed()
    library = Library(store, metrics)
    version = draft()
    version.version = 1
    await library.publish(constants_from(version), accept_jump=False)
    feed.carry(version)
    folder = DriftFolder(
        store,
        feed,
        Holding(),
        library,
        metrics=metrics,
        clock=clock,
        publish_after_seconds=60.0 if auto_publish else None,
    )
    await folder.step()
    for second in range(160):
        factor = 1.4 if second >= 40 else 1.0
        await store.add_outcomes([prefilled("p0", factor), prefilled("p1", factor)])
        await clock.advance(1.0)
        await folder.step()

    drifting, proposed = await store.drift()
    versions = await store.current_versions()
    assert [drift.instance_id for drift in drifting] == ["p0", "p1"]
    new = (await store.constants(PROFILE, 2)) if auto_publish else proposed[PROFILE]
    assert versions[PROFILE] == (2 if auto_publish else 1)
    assert new.constants.p2_seconds_per_token == pytest.approx(
        1.4 * A40_QWEN.constants.p2_seconds_per_token, rel=0.1
    )
    assert metrics.drift_ratio.labels("p0", "prefill")._value.get() == pytest.approx(1.4, rel=0.1)


def prefilled(name: str, factor: float, tokens: int = 1000) -> Outcome:
    """Return a request that found its prefill engine free."""
    return Outcome(
        request_id="r",
        prefill_instance_id=name,
        prompt_tokens=tokens,
        prefill_tokens_ahead=0,
        prefill_engine_seconds=factor * prefill_seconds(A40_QWEN.constants, tokens, 2048),
    )


async def test_prompts_that_waited_or_were_cached_say_nothing_of_the_pace():
    """Waiting and cache hits are taken out: neither looks like a slow or a fast engine."""
    clock, metrics = ManualClock(), make_metrics()
    store, feed = MemoryStore(clock), Feed()
    version = draft()
    version.version = 1
    feed.carry(version)
    folder = DriftFolder(
        store,
        feed,
        Holding(),
        Library(store, metrics),
        metrics=metrics,
        clock=clock,
        publish_after_seconds=None,
    )
    await folder.step()
    waited = Outcome(
        request_id="w",
        prefill_instance_id="p0",
        prompt_tokens=1000,
        prefill_tokens_ahead=3000,
        prefill_engine_seconds=5.0,
    )
    unknown = Outcome(
        request_id="u", prefill_instance_id="p0", prompt_tokens=9, prefill_engine_seconds=math.pi
    )
    for _ in range(100):
        await store.add_outcomes([prefilled("p0", 1.0), waited, unknown])
        await clock.advance(1.0)
        await folder.step()

    assert await store.drift() == ([], {})
