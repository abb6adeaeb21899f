"""Constants, targets, outcomes and the calibration lock over gRPC."""

import asyncio

import grpc
import pytest
from steelyard.v1 import control_pb2, types_pb2

from enginemodel.profiles import A40_QWEN
from servicekit import redis_keys

pytestmark = pytest.mark.asyncio

PROFILE = "a40-qwen2.5-3b"


def draft(**values) -> types_pb2.ConstantsVersion:
    """Make constants like the reference, some of them replaced."""
    names = [field.name for field in types_pb2.EngineConstants.DESCRIPTOR.fields]
    known = {name: getattr(A40_QWEN.constants, name) for name in names}
    return types_pb2.ConstantsVersion(
        profile=PROFILE,
        constants=types_pb2.EngineConstants(**(known | values)),
        standard_error=types_pb2.EngineConstants(p0_seconds=1e-4),
        heldout_median_error=0.03,
        sample_count=99,
        instance_scale={"d0": 1.25},
        fingerprint="here",
        reason="test",
    )


def publish(stub, constants, *, accept_jump=False):
    """Call PublishConstants."""
    return stub.PublishConstants(
        control_pb2.PublishConstantsRequest(constants=constants, accept_jump=accept_jump)
    )


async def get(stub, version=0, profile=PROFILE):
    """Call GetConstants."""
    request = control_pb2.GetConstantsRequest(profile=profile, version=version)
    return (await stub.GetConstants(request)).constants


async def test_constants_are_published_listed_and_rolled_back(cluster):
    """Versions count up; snapshots carry the current one; a rollback makes an earlier one current."""
    _, first = await cluster.replica()
    _, second = await cluster.replica()
    cluster.agent(first).start()
    view = await cluster.until(second, lambda v: v.constants == {PROFILE: 0})
    assert view.roster.constants[0].uncalibrated
    published = (await publish(first, draft())).constants
    assert (published.version, published.uncalibrated) == (1, False)
    view = await cluster.until(second, lambda v: v.constants == {PROFILE: 1})
    assert view.roster.instances[0].scale == 1.25
    assert (await publish(second, draft(d0_seconds=0.013))).constants.version == 2
    await cluster.until(first, lambda v: v.constants == {PROFILE: 2})
    stored = await get(first, 1)
    assert stored == published
    listing = await first.ListConstants(control_pb2.ListConstantsRequest())
    assert [c.version for c in listing.constants] == [2, 1]
    assert dict(listing.current) == {PROFILE: 2}
    rollback = control_pb2.RollbackConstantsRequest(profile=PROFILE, version=1)
    assert (await second.RollbackConstants(rollback)).constants == published
    await cluster.until(first, lambda v: v.constants == {PROFILE: 1})

    assert (await get(second)).version == 1
    shown = await cluster.client.hgetall(redis_keys.constants_version(PROFILE, 2))
    assert float(shown[b"d0_seconds"]) == 0.013
    assert shown[b"p0_seconds_stderr"] == b"0.0001"
    assert b"e" not in shown[b"p3_seconds_per_token_squared"]
    assert await cluster.client.hget(redis_keys.constants(PROFILE), "version") == b"1"
    kinds = [row[b"kind"] for _, row in await cluster.client.xrange(redis_keys.EVENTS)]
    assert [kind for kind in kinds if kind.startswith(b"constants")] == [
        b"constants_published",
        b"constants_published",
        b"constants_rolled_back",
    ]


async def test_impossible_constants_are_refused(cluster):
    """Every bad field is named, and nothing is published."""
    _, stub = await cluster.replica()
    error = await cluster.refused(
        publish(stub, draft(p0_seconds=float("nan"), d0_seconds=-1.0, h0_seconds=5.0))
    )

    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert {violation.field for violation in error.violations} == {
        f"constants.constants.{name}" for name in ("p0_seconds", "d0_seconds", "h0_seconds")
    }
    nameless = draft()
    nameless.profile = ""
    error = await cluster.refused(publish(stub, nameless))
    assert [violation.field for violation in error.violations] == ["constants.profile"]
    assert await cluster.client.keys("steelyard:constants*") == []


async def test_a_jump_needs_to_be_accepted(cluster):
    """A value three times away from the current version's is published on demand only."""
    _, stub = await cluster.replica()
    await publish(stub, draft())
    jump = draft(d0_seconds=A40_QWEN.constants.d0_seconds * 3.5)
    error = await cluster.refused(publish(stub, jump))

    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CONSTANTS_JUMP")
    assert [violation.field for violation in error.violations] == ["constants.constants.d0_seconds"]
    assert (await publish(stub, jump, accept_jump=True)).constants.version == 2


async def test_unknown_versions_are_not_found(cluster):
    """An unpublished profile has the reference; a version that is not there is NOT_FOUND."""
    _, stub = await cluster.replica()
    reference = await get(stub, profile="nobody/knows")
    rollback = control_pb2.RollbackConstantsRequest(profile=PROFILE, version=3)

    assert (reference.version, reference.uncalibrated) == (0, True)
    assert reference.constants.p0_seconds == A40_QWEN.constants.p0_seconds
    for call in (get(stub, 7), stub.RollbackConstants(rollback)):
        error = await cluster.refused(call)
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_CONSTANTS")


async def test_targets_are_set_and_seen(cluster):
    """New targets reach snapshots; impossible ones are refused by name."""
    _, stub = await cluster.replica()
    view = await cluster.until(stub, lambda v: v.roster.slo.default_class == "loose")
    assert view.roster.slo.classes["tight"].ttft.ToMilliseconds() == 175
    targets = types_pb2.SloPolicy(default_class="tight")
    targets.classes["tight"].ttft.FromMilliseconds(90)
    targets.classes["tight"].ttft_per_prompt_token.FromMicroseconds(50)
    answer = await stub.SetSlo(control_pb2.SetSloRequest(slo=targets))
    assert answer.slo == targets
    await cluster.until(stub, lambda v: v.roster.slo == targets)
    targets.default_class = "other"
    error = await cluster.refused(stub.SetSlo(control_pb2.SetSloRequest(slo=targets)))

    assert [violation.field for violation in error.violations] == ["slo.default_class"]


def outcome(number: int, **fields) -> control_pb2.ReportOutcomesRequest:
    """Make a finished request."""
    made = control_pb2.Outcome(
        request_id=f"r{number}",
        model="org/model",
        tenant="t",
        slo_class="tight",
        policy="marginal_cost",
        prompt_tokens=300,
        completion_tokens=number + 1,
        status="ok",
        slo_met=True,
        **fields,
    )
    made.ttft.FromMilliseconds(120)
    return control_pb2.ReportOutcomesRequest(outcome=made)


async def test_outcomes_land_in_the_stream_and_in_the_lengths(cluster):
    """Each is stored once, readable, and routers get the statistics with the snapshot."""
    _, first = await cluster.replica()
    _, second = await cluster.replica()

    async def some(numbers):
        for number in numbers:
            yield outcome(number)

    answers = await asyncio.gather(
        first.ReportOutcomes(some(range(30))), second.ReportOutcomes(some(range(30, 50)))
    )
    assert [answer.accepted for answer in answers] == [30, 20]
    rows = await cluster.client.xrange(redis_keys.OUTCOMES)
    assert sorted(row[b"request_id"] for _, row in rows) == sorted(
        f"r{n}".encode() for n in range(50)
    )
    assert rows[0][1][b"ttft_seconds"] == b"0.12"
    assert b"tpot_seconds" not in rows[0][1]

    def evidence(view):
        table = types_pb2.LengthTable.FromString(view.snapshot.lengths)
        return {row.key: sum(row.weights) for row in table.lengths}

    view = await cluster.until(second, lambda v: evidence(v).get("org/model|||", 0) > 49)
    assert set(evidence(view)) == {
        "org/model|t|tight|512",
        "org/model||tight|512",
        "org/model|||",
    }
    assert await cluster.client.exists(redis_keys.lengths("org/model"))


async def test_outcomes_of_an_open_stream_do_not_wait_for_its_end(cluster):
    """Routers keep one stream open; what they send is stored as it comes."""
    _, stub = await cluster.replica()
    call = stub.ReportOutcomes()
    await call.write(outcome(1))

    async def stored():
        return await cluster.client.xlen(redis_keys.OUTCOMES) == 1

    await cluster.eventually(stored)
    await call.done_writing()
    assert (await call).accepted == 1


async def test_an_open_stream_of_outcomes_does_not_hold_up_a_stop(cluster):
    """A stopping replica stores what came, answers with how many, and does not wait for more."""
    replica, stub = await cluster.replica(drain_grace_seconds=600.0)
    call = stub.ReportOutcomes()
    await call.write(outcome(1))

    async def stored():
        return await cluster.client.xlen(redis_keys.OUTCOMES) == 1

    await cluster.eventually(stored)
    await asyncio.wait_for(cluster.stop(replica), 30)

    assert (await call).accepted == 1


async def test_a_bad_outcome_names_the_field(cluster):
    """A number that cannot be ends the stream with INVALID_ARGUMENT."""
    _, stub = await cluster.replica()

    async def bad():
        yield outcome(1, predicted_tokens=float("inf"))

    error = await cluster.refused(stub.ReportOutcomes(bad()))

    assert [violation.field for violation in error.violations] == ["outcome.predicted_tokens"]


async def test_one_calibration_at_a_time_over_all_replicas(cluster):
    """The lock is held while the stream is open, by one, and free as soon as it is closed."""
    _, first = await cluster.replica()
    _, second = await cluster.replica()
    held = first.HoldCalibration(control_pb2.HoldCalibrationRequest(holder="host:1"))
    assert (await held.read()).lease.seconds > 0
    request = control_pb2.HoldCalibrationRequest(holder="host:2")
    error = await cluster.refused(second.HoldCalibration(request).read())
    assert (error.code, error.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "CALIBRATION_RUNNING",
    )
    assert error.metadata == {"holder": "host:1"}
    held.cancel()

    async def free():
        return not await cluster.client.exists(redis_keys.CALIBRATION)

    await cluster.eventually(free)
    other = second.HoldCalibration(request)
    assert (await other.read()).lease.seconds > 0
    other.cancel()
    nameless = control_pb2.HoldCalibrationRequest()
    error = await cluster.refused(first.HoldCalibration(nameless).read())
    assert [violation.field for violation in error.violations] == ["holder"]
