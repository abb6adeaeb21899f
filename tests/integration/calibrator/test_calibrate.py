"""Calibrations of emulated engines over real gRPC, a real control plane and a real Redis."""

import asyncio
import json

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from calibrator.app import Calibration, Options
from calibrator.campaign import Plan
from calibrator.display import Display
from calibrator.errors import (
    CalibrationRunning,
    ClusterUnavailable,
    GateFailed,
    InstanceLost,
    NoReadyInstance,
    PublicationRefused,
)
from enginemodel.profiles import A40_QWEN
from servicekit import redis_keys
from servicekit.clock import SystemClock
from servicekit.embedded_redis import EmbeddedRedis
from servicekit.redis_client import connect
from tests.support.emulated_pool import EmulatedPool
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio
PREFILL, DECODE = {"role": "prefill"}, {"role": "decode"}
SERIAL = {"parallel": 1, "handoff_pairs": 2}


async def test_a_calibration_publishes_constants_targets_json_and_report(
    redis_url, redis_client, tmp_path
):
    """One run passes the gates, fits every constant, publishes a version and leaves nothing."""
    engines = {"p0": PREFILL, "d0": DECODE, "d1": DECODE}
    async with EmulatedPool(redis_url, engines) as pool:
        result = await pool.calibrate(
            20.0,
            plan=SERIAL,
            force=True,  # the machine's own noise is not what this test is about
            json_path=tmp_path / "out" / "result.json",
            report_directory=tmp_path / "report",
        )

        await eventually(pool.idle)
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    stored = await redis_client.hgetall(redis_keys.constants_version("a40-qwen2.5-3b", 1))
    assert result.outcome == "published"
    assert [gate["passed"] for gate in document["gates"]] == [True] * 4
    assert document["version"] == 1
    for name in A40_QWEN.constants.__slots__:
        value = document["constants"][name]
        assert float(stored[name.encode()]) == pytest.approx(value)
        error = document["constants"][f"{name}_stderr"]
        assert float(stored[f"{name}_stderr".encode()]) == pytest.approx(error)
    assert document["constants"]["d0_seconds"] == pytest.approx(
        A40_QWEN.constants.d0_seconds, rel=0.25
    )
    assert document["constants"]["p2_seconds_per_token"] == pytest.approx(
        A40_QWEN.constants.p2_seconds_per_token, rel=0.4
    )
    assert set(document["heldout"]) == {"prefill", "decode", "handoff"}
    assert document["elapsed_seconds"] < 30.0
    assert set(document["round_trip_seconds"]) == set(engines)
    assert await redis_client.exists(redis_keys.SLO)
    assert {path.suffix for path in (tmp_path / "report").iterdir()} == {".html", ".md", ".png"}


async def test_an_engine_with_other_weights_is_named_with_its_first_wrong_token(
    redis_url, tmp_path
):
    """Greedy texts that differ stop the run before anything is measured."""
    words = {f"w{i}": i for i in range(384)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    other = DECODE | {"tokenizer_path": tmp_path / "tokenizer.json"}
    engines = {"p0": PREFILL, "d0": DECODE, "d1": DECODE, "d2": other}
    async with EmulatedPool(redis_url, engines) as pool:
        with pytest.raises(GateFailed, match=r"greedy_equality: d2 says token \d+ at position"):
            await pool.calibrate(20.0)

        await eventually(pool.idle)


async def test_an_engine_with_another_block_size_is_named(redis_url, redis_client):
    """Engines of one pool that cannot hand KV to each other fail the gate of pairs."""
    engines = {"p0": PREFILL, "d0": DECODE, "d1": DECODE | {"block_tokens": 32}}
    async with EmulatedPool(redis_url, engines) as pool:
        with pytest.raises(GateFailed, match=r"pairs: d1 cannot pair .* 32 tokens, theirs 16"):
            await pool.calibrate(20.0)

        await eventually(pool.idle)
    assert not await redis_client.exists(redis_keys.CONSTANTS_PROFILES)


async def test_without_a_ready_instance_there_is_nothing_to_measure(redis_url):
    """An empty cluster is told at once, and in the JSON."""
    async with EmulatedPool(redis_url, {}) as pool:
        with pytest.raises(NoReadyInstance, match="no instance is READY"):
            await pool.calibrate(20.0)


async def test_a_budget_too_small_publishes_nothing_and_names_what_is_unknown(
    redis_url, redis_client, tmp_path
):
    """Constants that the few points do not tell are refused by name; the JSON says so too."""
    async with EmulatedPool(redis_url, {"p0": PREFILL, "d0": DECODE}) as pool:
        with pytest.raises((PublicationRefused, GateFailed), match="budget"):
            await pool.calibrate(1.2, plan=SERIAL, json_path=tmp_path / "r.json")

        await eventually(pool.idle)
    assert json.loads((tmp_path / "r.json").read_text())["outcome"] != "published"
    assert not await redis_client.exists(redis_keys.CONSTANTS_PROFILES)


async def test_a_second_calibration_is_refused_until_the_first_has_ended(redis_url):
    """The lock is the cluster's: the second is told who calibrates, a third succeeds later."""
    async with EmulatedPool(redis_url, {"p0": PREFILL, "d0": DECODE}) as pool:
        first = asyncio.create_task(pool.calibrate(60.0, plan=SERIAL, force=True))
        await eventually(pool.probing)

        with pytest.raises(CalibrationRunning, match="calibrates already"):
            await pool.calibrate(5.0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

        await eventually(pool.idle)
        await pool.calibrate(5.0, plan=SERIAL, force=True)


async def test_an_instance_that_dies_is_left_out_and_the_last_one_ends_the_run(
    redis_url, redis_client
):
    """A dead decode engine of two is named in the result; a dead only one ends the run."""
    async with EmulatedPool(redis_url, {"p0": PREFILL, "d0": DECODE, "d1": DECODE}) as pool:
        run = asyncio.create_task(pool.calibrate(12.0, plan=SERIAL, force=True))
        await eventually(lambda: pool.probing("d1"), within_seconds=20)
        await pool.stop("d1")
        result = await run

        assert set(result.profiles[0].lost_instances) == {"d1"}
        run = asyncio.create_task(pool.calibrate(20.0, plan=SERIAL, force=True))
        await eventually(lambda: pool.probing("d0"), within_seconds=20)
        await pool.stop("d0")
        with pytest.raises((InstanceLost, GateFailed), match="d0"):
            await run

        await eventually(pool.idle)
    assert await redis_client.hget(redis_keys.constants("a40-qwen2.5-3b"), "version") == b"1"


async def test_without_redis_at_publication_nothing_is_published_and_engines_are_free():
    """The run ends with a clear message when Redis goes; the engines carry nothing afterwards."""
    with EmbeddedRedis() as server:
        async with EmulatedPool(server.url, {"p0": PREFILL, "d0": DECODE}) as pool:
            run = asyncio.create_task(pool.calibrate(8.0, plan=SERIAL, force=True))
            await eventually(pool.probing)
            server.stop()

            with pytest.raises(ClusterUnavailable, match=r"lock was lost|published|readable"):
                await run

            await eventually(pool.idle)


async def test_a_control_plane_that_is_not_there_is_told(tmp_path):
    """Nobody listens at the address: the message names it."""
    options = Options(control_plane="127.0.0.1:9", plan=Plan(budget_seconds=1, seed=0, parallel=1))
    display = Display(Console(quiet=True))

    with pytest.raises(ClusterUnavailable, match=r"127\.0\.0\.1:9"):
        await Calibration(options, display, SystemClock()).run()


async def test_a_rollback_makes_the_earlier_version_current(redis_url):
    """Two calibrations are two versions; rolling back is a pointer move."""
    async with EmulatedPool(redis_url, {"p0": PREFILL, "d0": DECODE}) as pool:
        for version in (1, 2):
            result = await pool.calibrate(4.0, plan=SERIAL, force=True)
            assert result.profiles[0].version == version
        async with pool.control_client() as control:
            await control.roll_back("a40-qwen2.5-3b", 1)

            assert (await control.current("a40-qwen2.5-3b")).version == 1
    async with connect(redis_url) as client:
        assert await client.hget(redis_keys.constants("a40-qwen2.5-3b"), "version") == b"1"
