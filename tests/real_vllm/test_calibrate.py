"""A calibration of a real vLLM prefill/decode cluster."""

import asyncio
import json
from pathlib import Path

import pytest
from rich.console import Console
from steelyard.v1 import control_pb2, control_pb2_grpc, types_pb2

from calibrator.agents import AgentClient
from calibrator.app import Calibration, Options
from calibrator.campaign import Plan
from calibrator.cluster import ready_targets
from calibrator.control import ControlClient
from calibrator.display import Display
from localcluster.cluster import LocalCluster
from localcluster.spec import ClusterSpec, Pools
from servicekit.channel import open_channel
from servicekit.clock import SystemClock

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(400), pytest.mark.asyncio]
BUDGET_SECONDS = 60.0


async def test_a_real_cluster_is_calibrated_within_its_budget_and_left_as_it_was(tmp_path: Path):
    """Gates pass, every constant gets a value, the version is current, no KV stays in use.

    Publication is forced: how noisy this machine is today is no property of the product.
    """
    spec = ClusterSpec(
        engine="vllm",
        pools=Pools(2, 4),
        directory=tmp_path / "cluster",
        log_level="WARNING",
        agent_settings={"vllm_metrics_seconds": 0.2},
    )
    async with LocalCluster(spec) as cluster:
        address = cluster.addresses.control[0]
        options = Options(
            control_plane=address,
            plan=Plan(budget_seconds=BUDGET_SECONDS, seed=1, parallel=1),
            json_path=tmp_path / "result.json",
            report_directory=tmp_path / "report",
            force=True,
        )
        with Display(Console(quiet=True)) as display:
            result = await Calibration(options, display, SystemClock()).run()

        document = json.loads((tmp_path / "result.json").read_text())
        assert result.outcome == "published"
        assert {gate["name"]: gate["passed"] for gate in document["gates"]} == {
            "prefix_cache": True,
            "token_counts": True,
            "greedy_equality": True,
            "pairs": True,
        }
        assert document["elapsed_seconds"] < BUDGET_SECONDS + 15.0
        assert document["fingerprint"].startswith("profile=tiny-float32-vllm")
        assert all(document["constants"][f"{name}_stderr"] >= 0 for name in ("p0_seconds",))
        assert document["constants"]["d0_seconds"] > 0
        assert document["constants"]["handoff_bytes_per_second"] > 0
        await _is_current(address, document["profile"])
        await _is_idle(address)


async def _is_current(address: str, profile: str) -> None:
    async with open_channel(address) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        listed = await stub.ListConstants(control_pb2.ListConstantsRequest(profile=profile))
    assert listed.current[profile] == 1


async def _is_idle(address: str) -> None:
    """Wait until no engine runs, queues or holds anything."""
    async with open_channel(address) as channel, asyncio.timeout(40):
        targets = ready_targets((await ControlClient(address, channel).roster()).instances)
        for target in targets:
            client = AgentClient(target, open_channel(target.address), SystemClock())
            try:
                while True:
                    load: types_pb2.InstanceLoad = await client.load()
                    if not (load.running or load.waiting or load.kv_used_tokens):
                        break
                    await asyncio.sleep(0.2)
            finally:
                await client.close()
