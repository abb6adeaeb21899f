"""Whatever happens to a request, it ends once and nothing of it is left anywhere."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from steelyard.v1 import router_pb2

from tests.support.scripted_agents import DecodeScript, PrefillScript, expected_tokens
from tests.support.scripted_cluster import Heard, ScriptedCluster, listen
from tests.support.waiting import eventually

PATIENCE_SECONDS = 0.2
MAX_TOKENS = 4
PROMPT = (1, 2, 3)
CODES = st.sampled_from(
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ]
)
PREFILLS = st.builds(
    PrefillScript, end=st.sampled_from(["answer", "answer", "fail", "hang"]), code=CODES
)
DECODES = st.builds(
    DecodeScript,
    tokens=st.one_of(st.none(), st.integers(0, MAX_TOKENS - 1)),
    end=st.sampled_from(["finish", "vanish", "hang", "fail", "abort"]),
    code=CODES,
)


@dataclass(frozen=True)
class Client:
    """What a client does: read on, hang up after some messages, or have it cancelled by id."""

    leaves: str
    after: int
    policy: str


CLIENTS = st.builds(
    Client,
    leaves=st.sampled_from(["never", "hangup", "cancel"]),
    after=st.integers(0, 2),
    policy=st.sampled_from(["least_loaded", "late_binding"]),
)


@pytest.fixture(scope="module")
def world(shared_redis) -> Iterator[tuple[asyncio.Runner, ScriptedCluster]]:
    """Yield a router over scripted agents, and the loop that it lives in."""
    with asyncio.Runner() as runner:
        cluster = ScriptedCluster(shared_redis.url)

        async def start() -> None:
            await cluster.redis.flushall()
            await cluster.__aenter__()

        runner.run(start())
        yield runner, cluster
        runner.run(cluster.__aexit__())


async def play(cluster: ScriptedCluster, client: Client) -> Heard:
    """Send one request and treat it as the client would."""
    message = cluster.request(PROMPT, MAX_TOKENS, policy=client.policy)
    call = cluster.stub.Generate(message, timeout=PATIENCE_SECONDS)
    reading = asyncio.create_task(listen(_leaving(cluster, call, client)))
    return await reading


class _leaving:  # noqa: N801  reads as what it does to a call
    """A call that ends itself as a client would."""

    def __init__(self, cluster: ScriptedCluster, call, client: Client) -> None:
        self._cluster, self._call, self._client = cluster, call, client

    def cancelled(self) -> bool:
        return self._call.cancelled()

    async def __aiter__(self):
        seen = 0
        if self._client.leaves != "never" and self._client.after == 0:
            # On a slow machine the deadline may pass before any agent is called.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._cluster.script.entered.wait()
            await self._leave("")
        async for message in self._call:
            yield message
            seen += 1
            if self._client.leaves != "never" and seen == self._client.after:
                await self._leave(message.request_id)

    async def _leave(self, request_id: str) -> None:
        if self._client.leaves == "hangup":
            self._call.cancel()
            return
        ids = [request_id] if request_id else list(self._cluster.router.front._sessions)
        for known in ids:
            await self._cluster.stub.Cancel(router_pb2.CancelRequest(request_id=known))


def check(heard: Heard) -> None:
    """One ending, and before it nothing but the right tokens."""
    everything = expected_tokens(PROMPT, MAX_TOKENS)
    assert heard.tokens == everything[: len(heard.tokens)]
    assert heard.code in {
        grpc.StatusCode.OK,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
    if heard.code is grpc.StatusCode.OK:
        assert heard.finishes == [len(heard.messages) - 1]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prefills=st.lists(PREFILLS, max_size=3),
    decodes=st.lists(DECODES, max_size=3),
    client=CLIENTS,
)
def test_every_exit_leaves_nothing(world, prefills, decodes, client):
    """Failures, hangs, cancels and deadlines at any point: one ending, right tokens, all freed."""
    runner, cluster = world

    async def example() -> Heard:
        cluster.script.reset()
        cluster.script.prefills = deque(prefills)
        cluster.script.decodes = deque(decodes)
        heard = await play(cluster, client)
        await cluster.settled()
        return heard

    heard = runner.run(example())
    event(f"{heard.code.name} after {len(heard.tokens)} tokens")
    check(heard)
    if client.leaves == "never" and not prefills and not decodes:
        assert heard.code is grpc.StatusCode.OK


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prefills=st.lists(PREFILLS, max_size=8),
    decodes=st.lists(DECODES, max_size=8),
    clients=st.lists(CLIENTS, min_size=2, max_size=8),
)
def test_many_at_once_leave_nothing(world, prefills, decodes, clients):
    """The same with requests side by side: none takes what is another's."""
    runner, cluster = world

    async def example() -> list[Heard]:
        cluster.script.reset()
        cluster.script.prefills = deque(prefills)
        cluster.script.decodes = deque(decodes)
        all_heard = await asyncio.gather(*(play(cluster, client) for client in clients))
        await cluster.settled()
        return all_heard

    for heard in runner.run(example()):
        check(heard)


def run(world, work) -> None:
    """Run a test's coroutine in the router's loop, and make sure that nothing is left after it."""
    runner, cluster = world

    async def whole() -> None:
        cluster.script.reset()
        await work(cluster)
        await cluster.settled()

    runner.run(whole())


def test_a_prefill_that_ends_after_its_client_left_is_released(world):
    """KV that was computed for a client who hung up meanwhile is freed through a decode agent."""

    async def work(cluster: ScriptedCluster) -> None:
        script = cluster.script
        script.prefills.append(PrefillScript("deaf"))
        call = cluster.stub.Generate(cluster.request())
        await script.entered.wait()
        call.cancel()
        await eventually(lambda: ("abort", "p0") in script.calls or ("abort", "p1") in script.calls)
        assert not script.held
        script.resume.set()
        await eventually(lambda: any(what == "release" for what, _ in script.calls))

    run(world, work)


def test_a_remote_cancel_is_a_failure_not_our_own(world):
    """An agent that ends a stream with CANCELLED is tried elsewhere; the client sees all tokens."""

    async def work(cluster: ScriptedCluster) -> None:
        cluster.script.decodes.append(DecodeScript(0, "fail", grpc.StatusCode.CANCELLED))
        heard = await cluster.generate(timeout=5)
        assert heard.tokens == expected_tokens(PROMPT, MAX_TOKENS)
        assert heard.code is grpc.StatusCode.OK

    run(world, work)


@pytest.mark.parametrize("policy", ["least_loaded", "late_binding"])
@pytest.mark.parametrize("end", ["fail", "vanish", "abort"])
def test_before_the_first_token_another_pair_is_tried(world, end, policy):
    """A decode that fails first is replaced, with a new prefill: the hand-off is not used twice."""

    async def work(cluster: ScriptedCluster) -> None:
        cluster.script.decodes.append(DecodeScript(0, end))
        heard = await cluster.generate(cluster.request(want_receipt=True, policy=policy), timeout=5)
        whats = [what for what, _ in cluster.script.calls]
        tried = [agent for what, agent in cluster.script.calls if what == "decode"]

        assert heard.tokens == expected_tokens(PROMPT, MAX_TOKENS)
        assert whats.count("prefill") == 2
        assert len(set(tried)) == 2
        assert heard.messages[0].receipt.decode_instance_id == tried[1]

    run(world, work)


@pytest.mark.parametrize("policy", ["least_loaded", "late_binding"])
@pytest.mark.parametrize("end", ["fail", "vanish", "abort"])
def test_after_the_first_token_nothing_is_tried_again(world, end, policy):
    """A stream that breaks ends UNAVAILABLE (STREAM_BROKEN) with what had come."""

    async def work(cluster: ScriptedCluster) -> None:
        cluster.script.decodes.append(DecodeScript(2, end))
        heard = await cluster.generate(cluster.request(policy=policy), timeout=5)

        assert heard.tokens == expected_tokens(PROMPT, 2)
        assert (heard.code, heard.error.reason) == (grpc.StatusCode.UNAVAILABLE, "STREAM_BROKEN")

    run(world, work)


def test_when_all_fail_the_client_is_told_what_the_last_said(world):
    """After the last attempt the status is UNAVAILABLE with a reason and the last cause."""

    async def work(cluster: ScriptedCluster) -> None:
        cluster.script.prefills.extend([PrefillScript("fail")] * 5)
        heard = await cluster.generate(timeout=5)

        assert heard.error.reason == "RETRIES_EXHAUSTED"
        assert "as the script says" in heard.error.message
        assert heard.error.retry_after_seconds == 1.0

    run(world, work)


def test_what_every_engine_would_refuse_is_not_tried_again(world):
    """INVALID_ARGUMENT from an engine reaches the client after one attempt."""

    async def work(cluster: ScriptedCluster) -> None:
        cluster.script.decodes.append(DecodeScript(0, "fail", grpc.StatusCode.INVALID_ARGUMENT))
        heard = await cluster.generate(timeout=5)

        assert heard.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [what for what, _ in cluster.script.calls].count("decode") == 1

    run(world, work)


def test_cancel_by_id_ends_the_client_and_the_engine(world):
    """`Cancel` gives the client CANCELLED, frees the engine, and says whether it knew the id."""

    async def work(cluster: ScriptedCluster) -> None:
        cluster.script.decodes.append(DecodeScript(2, "hang"))
        call = cluster.stub.Generate(cluster.request())
        first = await anext(aiter(call))
        cancelling = router_pb2.CancelRequest(request_id=first.request_id)
        found = (await cluster.stub.Cancel(cancelling)).found
        heard = await listen(call)
        await eventually(lambda: not cluster.script.running)
        again = (await cluster.stub.Cancel(cancelling)).found

        assert (found, again) == (True, False)
        assert heard.code is grpc.StatusCode.CANCELLED

    run(world, work)


def test_an_instance_that_leaves_before_its_leg_is_not_called(world):
    """A decode instance that is gone when the prompt is ready is passed over for another."""

    async def work(cluster: ScriptedCluster) -> None:
        script = cluster.script
        script.prefills.append(PrefillScript("deaf"))
        reading = asyncio.create_task(cluster.generate(timeout=5))
        await script.entered.wait()
        (driver,) = cluster.router.fleet
        (request_id,) = driver.tickets
        leaving = driver.pool.decode_of(request_id).instance_id
        await cluster.publish(leaving)
        script.resume.set()
        heard = await reading
        await cluster.publish()

        assert heard.tokens == expected_tokens(PROMPT, MAX_TOKENS)
        assert ("decode", leaving) not in script.calls

    run(world, work)
