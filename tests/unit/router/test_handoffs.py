"""Hand-offs that must not reach a decode engine, and pairs that must not be used."""

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.support.scripted_agents import PrefillScript, expected_tokens
from tests.support.scripted_cluster import ScriptedCluster
from tests.support.waiting import eventually

MILLISECOND = Duration(nanos=1_000_000)


def decodes(cluster: ScriptedCluster) -> list[str]:
    """Return the agents that a decode was sent to."""
    return [agent for what, agent in cluster.script.calls if what == "decode"]


@pytest.mark.asyncio
async def test_an_expired_hand_off_is_not_sent(redis_url):
    """A lease that ran out before the decode leg costs another try, never a decode call."""
    short = {"p0": {"handoff_lease": MILLISECOND}}
    async with ScriptedCluster(redis_url, ("p0", "d0", "d1"), short) as cluster:
        heard = await cluster.generate(timeout=5)
        await eventually(lambda: not cluster.script.held)
        await cluster.settled()

        assert heard.code is grpc.StatusCode.UNAVAILABLE
        assert "HANDOFF_EXPIRED" in heard.error.message
        assert decodes(cluster) == []


@pytest.mark.asyncio
async def test_an_expired_hand_off_is_made_up_for_elsewhere(redis_url):
    """Another prefill with a lease that holds serves the request."""
    short = {"p0": {"handoff_lease": MILLISECOND}}
    async with ScriptedCluster(redis_url, ("p0", "p1", "d0", "d1"), short) as cluster:
        heard = [await cluster.generate(timeout=5) for _ in range(6)]
        await cluster.settled()
        served = [h for h in heard if h.error is None]

        assert served
        assert all(h.tokens == expected_tokens((1, 2, 3), 4) for h in served)
        assert len(decodes(cluster)) == len(served)


@pytest.mark.asyncio
async def test_a_hand_off_of_another_boot_is_not_sent(redis_url):
    """A prefill engine that restarted under us makes hand-offs that nobody is sent."""
    async with ScriptedCluster(redis_url, ("p0", "d0", "d1")) as cluster:
        cluster.agents[0].info.epoch = "boot-2"
        heard = await cluster.generate(timeout=5)
        await cluster.settled()

        assert "HANDOFF_FOREIGN_EPOCH" in heard.error.message
        assert decodes(cluster) == []


@pytest.mark.asyncio
async def test_a_hand_off_of_another_layout_is_not_sent(redis_url):
    """A hand-off whose key is not the decode engine's is refused by the router itself."""
    async with ScriptedCluster(redis_url, ("p0", "d0", "d1")) as cluster:
        cluster.agents[0].info.pairing_key = "another"
        heard = await cluster.generate(timeout=5)
        await cluster.settled()

        assert "PAIR_MISMATCH" in heard.error.message
        assert decodes(cluster) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "marginal_cost", "late_binding"])
async def test_only_pairs_that_agree_are_used(redis_url, policy):
    """Engines with other keys are passed over on both sides, by every kind of policy."""
    other = {"p1": {"pairing_key": "lonely"}, "d1": {"pairing_key": "else"}}
    async with ScriptedCluster(redis_url, ("p0", "p1", "d0", "d1"), other) as cluster:
        for _ in range(8):
            heard = await cluster.generate(cluster.request(policy=policy), timeout=5)
            assert heard.error is None
        prefills = {agent for what, agent in cluster.script.calls if what == "prefill"}

        assert prefills == {"p0"}
        assert set(decodes(cluster)) == {"d0"}


@pytest.mark.asyncio
async def test_a_cluster_without_a_pair_is_unavailable(redis_url):
    """Both roles are there, but no two agree: UNAVAILABLE with reason NO_PAIR."""
    other = {"d0": {"pairing_key": "else"}}
    async with ScriptedCluster(redis_url, ("p0", "d0"), other) as cluster:
        heard = await cluster.generate(timeout=5)
        await cluster.settled()

        assert (heard.code, heard.error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_PAIR")
        assert cluster.script.calls == []


@pytest.mark.asyncio
async def test_a_mixed_engine_needs_no_hand_off(redis_url):
    """A pool of engines that do both is served with a decode call alone."""
    async with ScriptedCluster(redis_url, ("m0", "m1")) as cluster:
        heard = await cluster.generate(timeout=5)
        await cluster.settled()

        assert heard.tokens == expected_tokens((1, 2, 3), 4)
        assert [what for what, _ in cluster.script.calls] == ["decode"]


@pytest.mark.asyncio
async def test_kv_of_a_failed_decode_is_freed_through_another(redis_url):
    """When the chosen decode agent is dead, another agent of the pair is asked to release."""
    async with ScriptedCluster(redis_url, ("p0", "d0", "d1")) as cluster:
        script = cluster.script
        script.prefills.append(PrefillScript("deaf"))
        call = cluster.stub.Generate(cluster.request())
        await script.entered.wait()
        (driver,) = cluster.router.fleet
        (request_id,) = driver.tickets
        chosen = driver.pool.decode_of(request_id).instance_id
        await next(a for a in cluster.agents if a.info.instance_id == chosen).stop()
        script.resume.set()
        tokens = [token async for message in call for token in message.token_ids]
        await cluster.settled()
        releases = [agent for what, agent in script.calls if what == "release"]

        assert tokens == expected_tokens((1, 2, 3), 4)
        assert releases
        assert chosen not in releases
