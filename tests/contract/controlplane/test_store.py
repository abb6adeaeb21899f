"""What every store promises."""

import asyncio
from dataclasses import replace

import pytest

from controlplane.core import slo
from controlplane.core.liveness import Liveness, Signal, State, step
from controlplane.core.registry import Change
from controlplane.core.values import (
    Constants,
    Engine,
    Load,
    Report,
    Role,
    RouterShare,
    Slo,
    Targets,
)
from controlplane.errors import ChangedMeanwhile, EpochReplaced
from controlplane.store import Registration, SnapshotState
from enginemodel.profiles import A40_QWEN

pytestmark = pytest.mark.asyncio

ENGINE = Engine(
    instance_id="d0",
    epoch="e1",
    role=Role.DECODE,
    model="org/model",
    model_revision="r1",
    address="127.0.0.1:7201",
    dtype="bfloat16",
    max_model_tokens=8192,
    vocab_size=32_000,
    block_tokens=16,
    kv_total_tokens=60_000,
    kv_bytes_per_token=36_864,
    max_num_seqs=256,
    max_batched_tokens=2048,
    pairing_key="k",
    handoff_lease_seconds=30.5,
    profile="a40/x",
    engine_kind="emulated",
    engine_version="1",
    tokenizer_sha256="ab",
)
LOAD = Load(
    running=3,
    waiting=1,
    kv_used_tokens=1234,
    queued_prefill_tokens=77,
    step_seconds=0.0123,
    by_router=(RouterShare("r1", 1, 2, 3, 4, 5, 6),),
    preemptions=9,
    engine_healthy=False,
)
REPORT = Report("d0", "e1", LOAD)
DRAFT = Constants(
    profile="a40/x",
    version=0,
    constants=A40_QWEN.constants,
    standard_error=replace(A40_QWEN.constants, p0_seconds=-1.0),
    heldout_median_error=0.031,
    sample_count=412,
    fingerprint="vllm 0.32, A40",
    instance_scale={"d0": 1.3},
    reason="first fit",
)
LEASE_SECONDS = 5.0


async def change(store, signal, *, seen=None):
    """Decide and take a step of d0's life; returns whether it was taken."""
    member = await store.member("d0")
    after = step(member.liveness, signal)
    seen = member.registered_unix_seconds if seen is None else seen
    return await store.change(Change(member, after, signal, seen))


async def sighting(store, replica="a"):
    """Look at d0 as the publisher does."""
    return (await store.tick(replica, LEASE_SECONDS)).sightings.get("d0")


async def test_a_registration_is_kept_whole(store):
    """Every field of what registers comes back, in a new life."""
    assert await store.register(ENGINE) == Registration("new")
    member = await store.member("d0")

    assert member.engine == ENGINE
    assert member.liveness == Liveness()
    assert await store.members() == [member]
    assert await store.member("nobody") is None


async def test_members_are_listed_by_id(store):
    """The order is that of the ids, whatever the order of registration."""
    for name in ("p1", "d2", "d10"):
        await store.register(replace(ENGINE, instance_id=name))

    assert [m.engine.instance_id for m in await store.members()] == ["d10", "d2", "p1"]


async def test_the_same_epoch_registers_again(store):
    """Renewing keeps the state and takes a new address over."""
    await store.register(ENGINE)
    await change(store, Signal.HEALTHY)
    renewed = await store.register(replace(ENGINE, address="h:2"))
    member = await store.member("d0")

    assert renewed == Registration("renewed")
    assert (member.engine.address, member.liveness.state) == ("h:2", State.READY)


async def test_a_new_epoch_replaces_the_old_one_for_good(store):
    """The new boot starts from nothing; the old one can neither report nor register."""
    await store.register(ENGINE)
    await change(store, Signal.HEALTHY)
    await change(store, Signal.DRAIN)
    await store.write_reports([REPORT])
    second = replace(ENGINE, epoch="e2")

    assert await store.register(second) == Registration("replaced", "e1")
    assert (await store.member("d0")).liveness == Liveness()
    assert (await sighting(store)).report is None
    assert await store.write_reports([REPORT]) == {("d0", "e1")}
    with pytest.raises(EpochReplaced):
        await store.register(ENGINE)


async def test_reports_are_seen_with_their_time(store):
    """A stored report comes back whole, timed by the store."""
    await store.register(ENGINE)
    before = (await store.tick("a", LEASE_SECONDS)).now_unix_seconds
    assert await store.write_reports([REPORT]) == set()
    found = await sighting(store)

    assert found.report == REPORT
    assert before - 0.002 <= found.seen_unix_seconds <= before + 5


async def test_reports_of_strangers_are_refused_alone(store):
    """Who is not registered under that epoch is named; the others' reports are stored."""
    await store.register(ENGINE)
    strangers = [replace(REPORT, epoch="e9"), replace(REPORT, instance_id="x")]

    assert await store.write_reports([*strangers, REPORT]) == {("d0", "e9"), ("x", "e1")}
    assert (await sighting(store)).report == REPORT
    assert await store.write_reports([]) == set()


async def test_a_step_is_taken_once(store):
    """A change decided on a state that is no more is refused."""
    await store.register(ENGINE)
    member = await store.member("d0")
    ready = Change(member, Liveness(State.READY), Signal.HEALTHY, 0.0)

    assert await store.change(ready)
    assert not await store.change(ready)
    assert (await store.member("d0")).liveness == Liveness(State.READY)


async def test_a_step_of_another_epoch_is_refused(store):
    """What was decided about one boot does not happen to the next."""
    await store.register(ENGINE)
    member = await store.member("d0")
    await store.register(replace(ENGINE, epoch="e2"))

    assert not await store.change(Change(member, Liveness(State.GONE), Signal.LEFT, 0.0))
    assert (await store.member("d0")).engine.epoch == "e2"


async def test_silence_is_void_once_something_was_heard(store):
    """An instance that reports while it is being given up is not given up."""
    await store.register(ENGINE)
    await store.write_reports([REPORT])
    seen = (await sighting(store)).seen_unix_seconds

    assert not await change(store, Signal.SILENT, seen=seen - 1)
    assert await change(store, Signal.SILENT, seen=seen)
    assert (await store.member("d0")).liveness.state is State.STALE


async def test_gone_is_forgotten(store):
    """A member that is GONE leaves nothing, and its epoch may register anew."""
    await store.register(ENGINE)
    await store.write_reports([REPORT])
    await change(store, Signal.LEFT)

    assert await store.member("d0") is None
    assert await store.members() == []
    assert await sighting(store) is None
    assert await store.write_reports([REPORT]) == {("d0", "e1")}
    assert await store.register(ENGINE) == Registration("new")


async def test_the_generation_moves_with_what_changes_seldom(store):
    """Members, drains, constants and targets move it; reports and snapshots do not."""

    async def generation():
        return (await store.tick("a", LEASE_SECONDS)).generation

    seen = [await generation()]
    for action in (
        lambda: store.register(ENGINE),
        lambda: change(store, Signal.HEALTHY),
        lambda: store.publish_constants(DRAFT, 0),
        lambda: store.point_constants(DRAFT.profile, 1),
        lambda: store.set_slo(slo.DEFAULT),
    ):
        await action()
        seen.append(await generation())
    await store.write_reports([REPORT])
    await store.publish("a", SnapshotState(sequence=1), b"s")

    assert sorted(set(seen)) == seen
    assert await generation() == seen[-1]


async def test_one_replica_publishes(store):
    """The lease has one holder; the other sees that, and takes over when it is given back."""
    assert (await store.tick("a", LEASE_SECONDS)).holder
    assert not (await store.tick("b", LEASE_SECONDS)).holder
    assert not await store.publish("b", SnapshotState(sequence=1), b"from b")
    await store.release("b")
    assert not (await store.tick("b", LEASE_SECONDS)).holder
    await store.release("a")
    assert (await store.tick("b", LEASE_SECONDS)).holder
    assert not (await store.tick("a", LEASE_SECONDS)).holder


async def test_a_dead_publishers_lease_runs_out(store):
    """Whoever stops ticking loses the lease to the next that asks."""
    await store.tick("a", 0.05)
    async with asyncio.timeout(5):
        while not (await store.tick("b", LEASE_SECONDS)).holder:  # noqa: ASYNC110  a lease runs out silently
            await asyncio.sleep(0.01)

    assert not await store.publish("a", SnapshotState(sequence=1), b"late")


async def test_sequences_only_rise(store):
    """A snapshot with a number that was used is not published."""
    await store.tick("a", LEASE_SECONDS)

    assert await store.publish("a", SnapshotState(7, 0.0, 3, "digest"), b"seven")
    assert not await store.publish("a", SnapshotState(7), b"again")
    state = (await store.tick("a", LEASE_SECONDS)).state
    assert (state.sequence, state.roster_version, state.roster_digest) == (7, 3, "digest")
    assert state.published_unix_seconds > 1e9


async def test_snapshots_are_followed(store):
    """A follower gets the current snapshot, then each new one."""
    await store.tick("a", LEASE_SECONDS)
    await store.publish("a", SnapshotState(sequence=1), b"one")
    following = store.snapshots()

    assert await anext(following) == b"one"
    waiting = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    await store.publish("a", SnapshotState(sequence=2), b"two")
    assert await asyncio.wait_for(waiting, 5) == b"two"
    await following.aclose()


async def test_constants_are_kept_by_version(store):
    """Each publication is a version of its own, whole, and the last one is current."""
    first = await store.publish_constants(DRAFT, 0)
    second = await store.publish_constants(replace(DRAFT, reason="again"), 1)

    assert (first.version, second.version) == (1, 2)
    assert await store.constants(DRAFT.profile, 1) == first
    assert replace(first, version=0, published_unix_seconds=0.0) == DRAFT
    assert first.published_unix_seconds > 1e9
    assert await store.all_constants(DRAFT.profile) == [second, first]
    assert await store.current_versions() == {DRAFT.profile: 2}
    assert await store.constants(DRAFT.profile, 3) is None
    assert await store.all_constants("other") == []


async def test_two_publishers_do_not_overtake_each_other(store):
    """A draft compared with a version that is not current any more is refused."""
    await store.publish_constants(DRAFT, 0)
    with pytest.raises(ChangedMeanwhile):
        await store.publish_constants(DRAFT, 0)

    assert await store.current_versions() == {DRAFT.profile: 1}


async def test_rolling_back_moves_the_pointer_alone(store):
    """An earlier version becomes current, later ones stay, and the next number is a new one."""
    for expected in range(3):
        await store.publish_constants(DRAFT, expected)
    assert await store.point_constants(DRAFT.profile, 1)
    assert not await store.point_constants(DRAFT.profile, 9)

    assert await store.current_versions() == {DRAFT.profile: 1}
    assert len(await store.all_constants(DRAFT.profile)) == 3
    assert (await store.publish_constants(DRAFT, 1)).version == 4


async def test_targets_are_replaced_whole(store):
    """What is set comes back; classes that are not in it are gone."""
    assert await store.slo() is None
    await store.set_slo(slo.DEFAULT)
    assert await store.slo() == slo.DEFAULT
    only = Slo({"batch": Targets(None, 0.5, 0.001)}, "batch")
    await store.set_slo(only)

    assert await store.slo() == only
