"""AgentService over real gRPC, on emulated engines."""

import hashlib
import time

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from steelyard.v1 import agent_pb2, agent_pb2_grpc, types_pb2
from tokenizers import Tokenizer

from dataplane.agent.app import AgentApp
from dataplane.agent.settings import AgentSettings
from servicekit.channel import open_channel
from servicekit.status import from_rpc_error
from tests.integration.agent.agents import (
    agents,
    decode_request,
    drain,
    generate,
    new_prompt,
    prefill_request,
    refusal_of,
)

pytestmark = pytest.mark.asyncio

PREFILL, DECODE, MIXED = {"role": "prefill"}, {"role": "decode"}, {"role": "mixed"}
SLOW = {"time_scale": 1.0}


async def test_a_pair_says_what_one_engine_says_and_keeps_nothing():
    """Prefill, hand-off and decode over gRPC equal one engine; all loads return to zero."""
    async with agents(PREFILL, DECODE, MIXED) as (prefill, decode, solo):
        prompt = new_prompt()
        held = await prefill.stub.Prefill(prefill_request(prompt))
        assert (await prefill.load()).by_router[0].held_kv_tokens == 200

        tokens, messages = await generate(decode, decode_request(prompt, handoff=held.handoff))
        alone, _ = await generate(solo, decode_request(prompt))

        assert tokens == alone
        assert held.first_token_id == alone[0]
        assert held.engine_time.ToNanoseconds() > 0
        assert messages[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert messages[-1].usage.completion_tokens == 20
        for client in (prefill, decode, solo):
            await client.until_empty()


async def test_cancelling_the_call_frees_the_engine():
    """A client that hangs up in mid stream leaves no request and no KV."""
    async with agents({**MIXED, **SLOW}) as (client,):
        call = client.stub.Decode(decode_request(new_prompt(), max_tokens=5000))
        await call.read()
        load = await client.load()
        assert (load.running, load.by_router[0].decode_requests) == (1, 1)

        call.cancel()

        await client.until_empty()


async def test_a_deadline_that_passes_half_way_frees_the_engine():
    """The call ends with DEADLINE_EXCEEDED, the engine with nothing."""
    async with agents({**MIXED, **SLOW}) as (client,):
        call = client.stub.Decode(decode_request(new_prompt(), max_tokens=5000), timeout=0.5)
        await call.read()

        error = await refusal_of(call)

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await client.until_empty()


async def test_a_cancelled_prefill_is_neither_computed_nor_held():
    """A client that hangs up while its prompt waits leaves nothing."""
    async with agents({**PREFILL, **SLOW}) as (client,):
        calls = [
            client.stub.Prefill(prefill_request(new_prompt(4000), request_id=str(n)))
            for n in range(4)
        ]
        await client.until_running(1)
        assert (await client.load()).queued_prefill_tokens == 16_000

        for call in calls:
            call.cancel()

        await client.until_empty()


async def test_tokens_travel_together_inside_the_coalescing_window():
    """There is at most one message a window, whatever the engine's speed, and no token is lost."""
    async with agents({**MIXED, "time_scale": 10.0}) as (client,):
        prompt, window = new_prompt(), Duration(nanos=50_000_000)
        plain, _ = await generate(client, decode_request(prompt, max_tokens=100))
        begin = time.monotonic()

        tokens, messages = await generate(
            client, decode_request(prompt, max_tokens=100, coalesce=window)
        )

        assert tokens == plain
        assert len(messages) <= 2 + (time.monotonic() - begin) / 0.05


async def test_tokens_pile_up_while_the_reader_is_away():
    """At full speed a message carries what came while the one before was being written."""
    async with agents({**MIXED, "time_scale": 1e12}) as (client,):
        tokens, messages = await generate(client, decode_request(new_prompt(), max_tokens=3000))

        assert len(tokens) == 3000
        assert len(messages) < 1500


async def test_a_handoff_is_good_for_one_use():
    """The second use is refused, and the engine never sees it."""
    async with agents(PREFILL, DECODE) as (prefill, decode):
        prompt = new_prompt()
        held = await prefill.stub.Prefill(prefill_request(prompt))
        request = decode_request(prompt, handoff=held.handoff)
        await generate(decode, request)

        error = await refusal_of(decode.stub.Decode(request))

        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert from_rpc_error(error).reason == "HANDOFF_CONSUMED"
        await decode.until_empty()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda r: r.handoff.expire_time.FromSeconds(1), "HANDOFF_EXPIRED"),
        (lambda r: r.handoff_valid_for.FromSeconds(0), "HANDOFF_EXPIRED"),
        (lambda r: setattr(r.handoff, "pairing_key", "other"), "PAIR_MISMATCH"),
        (lambda r: r.prompt_token_ids.append(9), "HANDOFF_PROMPT_MISMATCH"),
        (lambda r: r.prompt_token_ids.__setitem__(0, 251), "HANDOFF_PROMPT_MISMATCH"),
        (lambda r: setattr(r, "expected_epoch", "older"), "EPOCH_CHANGED"),
    ],
    ids=["expired", "no time left", "pair", "longer prompt", "other prompt", "restarted"],
)
async def test_a_handoff_that_would_give_wrong_tokens_is_refused(spoil, reason):
    """Each misuse that an engine answers with wrong tokens ends before the engine, with a reason."""
    async with agents(PREFILL, DECODE) as (prefill, decode):
        prompt = new_prompt()
        held = await prefill.stub.Prefill(prefill_request(prompt))
        request = decode_request(prompt, handoff=held.handoff)
        spoil(request)

        error = await refusal_of(decode.stub.Decode(request))

        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert from_rpc_error(error).reason == reason
        good = decode_request(prompt, handoff=held.handoff)
        tokens, _ = await generate(decode, good)
        assert len(tokens) == 20


async def test_agents_of_another_block_size_do_not_pair():
    """The pairing key tells engines apart whose KV is laid out differently."""
    async with agents(PREFILL, {**DECODE, "block_tokens": 32}) as (prefill, decode):
        prompt = new_prompt()
        held = await prefill.stub.Prefill(prefill_request(prompt))

        error = await refusal_of(decode.stub.Decode(decode_request(prompt, handoff=held.handoff)))

        assert from_rpc_error(error).reason == "PAIR_MISMATCH"


async def test_each_role_refuses_the_others_work():
    """A decode-only engine prefills for nobody, a prefill-only engine generates for nobody."""
    async with agents(PREFILL, DECODE) as (prefill, decode):
        first = await refusal_of(decode.stub.Prefill(prefill_request(new_prompt())))
        second = await refusal_of(prefill.stub.Decode(decode_request(new_prompt())))

        for error in (first, second):
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert from_rpc_error(error).reason == "WRONG_ROLE"


async def test_a_retry_prefills_the_same_request_again_on_the_same_engine():
    """While the first hand-off is still held a second one is made, and both can be freed."""
    async with agents(PREFILL, DECODE) as (prefill, decode):
        prompt = new_prompt()
        first = await prefill.stub.Prefill(prefill_request(prompt))
        second = await prefill.stub.Prefill(prefill_request(prompt))
        assert (await prefill.load()).by_router[0].held_requests == 2

        tokens, _ = await generate(decode, decode_request(prompt, handoff=second.handoff))
        await decode.stub.Release(agent_pb2.ReleaseRequest(handoff=first.handoff))

        assert len(tokens) == 20
        await prefill.until_empty()


@pytest.mark.parametrize("at_prefill", [True, False], ids=["prefill agent", "decode agent"])
async def test_a_release_frees_what_nobody_will_pull(at_prefill):
    """Either agent of the pair frees the KV; the hand-off is good for nothing afterwards."""
    async with agents(PREFILL, DECODE) as (prefill, decode):
        prompt = new_prompt()
        held = await prefill.stub.Prefill(prefill_request(prompt))
        request = agent_pb2.ReleaseRequest(handoff=held.handoff, prompt_token_ids=prompt)
        there = prefill if at_prefill else decode

        assert (await there.stub.Release(request)).released

        await prefill.until_empty()
        assert not (await there.stub.Release(request)).released


async def test_abort_ends_a_generation_with_what_it_has():
    """The stream of an aborted request ends in order, with reason ABORT."""
    async with agents({**MIXED, **SLOW}) as (client,):
        call = client.stub.Decode(decode_request(new_prompt(), max_tokens=5000))
        await call.read()

        answer = await client.stub.Abort(agent_pb2.AbortRequest(request_id="r"))
        messages = await drain(call)

        assert answer.found
        assert messages[-1].finish_reason == types_pb2.FINISH_REASON_ABORT
        await client.until_empty()


async def test_abort_ends_a_prefill_under_way_and_one_that_is_held():
    """Before and after its answer, an aborted prefill leaves no KV; unknown ids are no error."""
    async with agents({**PREFILL, **SLOW}) as (client,):
        call = client.stub.Prefill(prefill_request(new_prompt(6000), request_id="early"))
        await client.until_running(1)
        early = await client.stub.Abort(agent_pb2.AbortRequest(request_id="early"))
        error = await refusal_of(call)
        await client.stub.Prefill(prefill_request(new_prompt(50), request_id="late"))
        late = await client.stub.Abort(agent_pb2.AbortRequest(request_id="late"))
        unknown = await client.stub.Abort(agent_pb2.AbortRequest(request_id="late"))

        assert (early.found, late.found, unknown.found) == (True, True, False)
        assert from_rpc_error(error).reason == "REQUEST_ABORTED"
        await client.until_empty()


async def test_a_live_request_id_is_refused():
    """Two live requests of one id could not be aborted apart."""
    async with agents({**MIXED, **SLOW}) as (client,):
        call = client.stub.Decode(decode_request(new_prompt(), max_tokens=1000))
        await call.read()

        error = await refusal_of(client.stub.Decode(decode_request(new_prompt())))

        assert from_rpc_error(error).reason == "DUPLICATE_REQUEST"
        call.cancel()
        await client.until_empty()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (decode_request([], 4), "prompt_token_ids"),
        (decode_request([384], 4), "prompt_token_ids"),
        (decode_request([1], 0), "max_tokens"),
        (decode_request([1], 100_000), "max_tokens"),
        (decode_request([1], 4, request_id=""), "request_id"),
        (decode_request([1], 4, handoff=types_pb2.Handoff()), "handoff.handoff_id"),
    ],
)
async def test_bad_input_names_the_field(request_, field):
    """INVALID_ARGUMENT with a violation; nothing stays in the books."""
    async with agents(MIXED) as (client,):
        error = await refusal_of(client.stub.Decode(request_))

        remote = from_rpc_error(error)
        assert remote.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [violation.field for violation in remote.violations] == [field]
        await client.until_empty()


async def test_the_tokenizer_comes_in_pieces_with_its_hash():
    """The pieces make the file that the announced hash belongs to, and it can be loaded."""
    async with agents(MIXED) as (client,):
        engine = (await client.stub.GetEngine(agent_pb2.GetEngineRequest())).engine
        pieces = [
            piece async for piece in client.stub.GetTokenizer(agent_pb2.GetTokenizerRequest())
        ]
        data = b"".join(piece.data for piece in pieces)

        assert hashlib.sha256(data).hexdigest() == engine.tokenizer_sha256 == pieces[0].sha256
        assert (
            Tokenizer.from_buffer(data).decode(Tokenizer.from_buffer(data).encode("héllo").ids)
            == "héllo"
        )


async def test_text_comes_beside_the_ids_where_it_is_wanted():
    """The text is the tokens' own, whole."""
    async with agents(MIXED) as (client,):
        request = decode_request(new_prompt(), want_text=True)
        tokens, messages = await generate(client, request)
        pieces = [p async for p in client.stub.GetTokenizer(agent_pb2.GetTokenizerRequest())]
        tokenizer = Tokenizer.from_buffer(b"".join(piece.data for piece in pieces))

        assert "".join(message.text for message in messages) == tokenizer.decode(tokens)


async def test_a_decode_probe_sees_the_batch_and_leaves_nothing():
    """Every step but the first is seen, with all sequences and their KV."""
    async with agents({**DECODE, **SLOW}) as (client,):
        probe = agent_pb2.DecodeProbe(sequences=4, context_tokens=64, output_tokens=8, seed=1)

        response = await client.stub.Probe(agent_pb2.ProbeRequest(decode=probe))

        steady = [step for step in response.steps if not step.unsteady]
        assert len(steady) >= 5
        assert {step.sequences for step in steady} == {4}
        assert [step.kv_tokens for step in steady] == sorted(step.kv_tokens for step in steady)
        assert all(step.duration.ToNanoseconds() > 0 for step in steady)
        await client.until_empty()


async def test_a_prefill_probe_times_every_prompt_and_holds_nothing():
    """Longer prompts take longer, and no KV waits for anybody afterwards."""
    async with agents({**PREFILL, **SLOW}) as (client,):
        times = []
        for tokens in (64, 4096):
            probe = agent_pb2.PrefillProbe(prompt_tokens=[tokens], seed=tokens)
            response = await client.stub.Probe(agent_pb2.ProbeRequest(prefill=probe))
            times += [taken.ToNanoseconds() for taken in response.prefill_times]

        assert len(times) == 2
        assert times[1] > 2 * times[0]
        await client.until_empty()


@pytest.mark.parametrize(
    "probe",
    [
        agent_pb2.ProbeRequest(),
        agent_pb2.ProbeRequest(prefill=agent_pb2.PrefillProbe(prompt_tokens=[0])),
        agent_pb2.ProbeRequest(decode=agent_pb2.DecodeProbe(sequences=1, context_tokens=1)),
        agent_pb2.ProbeRequest(prefill=agent_pb2.PrefillProbe(prompt_tokens=[100_000])),
    ],
)
async def test_a_probe_that_cannot_run_is_an_invalid_argument(probe):
    """Nothing to measure, or more than the model holds."""
    async with agents(MIXED) as (client,):
        error = await refusal_of(client.stub.Probe(probe))

        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        await client.until_empty()


async def test_emptying_the_prefix_cache_is_allowed_where_there_is_none():
    """Every prompt meets an empty cache on an emulated engine."""
    async with agents(MIXED) as (client,):
        await client.stub.ResetPrefixCache(agent_pb2.ResetPrefixCacheRequest())


async def test_an_agent_that_stops_ends_its_streams():
    """After the grace of a shutdown nobody waits for tokens."""
    app = AgentApp(AgentSettings(**MIXED, drain_grace_seconds=0.1))
    running = await app.__aenter__()
    async with open_channel(running.server.address) as channel:
        await channel.channel_ready()
        stub = agent_pb2_grpc.AgentServiceStub(channel)
        call = stub.Decode(decode_request(new_prompt(), max_tokens=5000))
        await call.read()

        await app.__aexit__()

        error = await refusal_of(call)
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
