"""The vLLM engine when its server restarts, breaks, or answers what it should not."""

import asyncio
import json
from dataclasses import replace

import pytest

from dataplane.agent.engine import DecodeJob, Finish, PrefillJob, Sampling
from dataplane.agent.errors import (
    EngineAnswerUnreadable,
    EngineFailed,
    EngineUnavailable,
    HandoffRefused,
    NotSupported,
)
from servicekit.errors import InvalidArgument
from tests.integration.agent.vllm_double import HANDOFF, VllmDouble, engine_at, event, serving

pytestmark = pytest.mark.asyncio

JOB = DecodeJob(request_id="r", prompt=[1] * 200, max_tokens=4)
DONE = ["[DONE]"]


async def read_all(engine, job=JOB):
    """Read one generation; returns its last chunk and all tokens."""
    stream = await engine.decode(job)
    tokens = []
    try:
        while True:
            chunk = await stream.read()
            tokens += chunk.token_ids
            if chunk.finish is not None:
                return chunk, tokens
    finally:
        await stream.close()


async def until(engine, condition):
    """Wait until a measurement satisfies a condition."""
    async with asyncio.timeout(10):
        while not condition(measure := await engine.measure()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return measure


async def test_a_restarted_server_is_noticed_by_its_start_time():
    """Another start time is another boot; describing it again gives the new epoch."""
    double = VllmDouble()
    async with serving(double) as port, engine_at(port) as engine:
        old = await engine.describe()
        double.start_time, double.engine_id = "1.6e+09", "boot-2"

        await until(engine, lambda measure: measure.epoch != old.epoch)
        new = await engine.describe()

        assert (old.epoch, new.epoch) == ("boot-1", "boot-2")
        assert (await engine.measure()).epoch == "boot-2"


async def test_a_handoff_of_another_boot_is_noticed_at_once():
    """A hand-off that names another engine id belongs to a boot that nobody has measured yet."""
    double = VllmDouble()
    async with serving(double) as port, engine_at(port) as engine:
        double.start_time, double.engine_id = "1.6e+09", "boot-2"
        double.handoff = {**HANDOFF, "remote_engine_id": "boot-2"}

        held = await engine.prefill(PrefillJob(request_id="r", prompt=[1, 2]))

        assert held.epoch == "boot-2"
        assert json.loads(held.engine_params) == double.handoff


async def test_without_dev_mode_an_epoch_lasts_as_long_as_the_boot():
    """A server that hides its engine id is told apart by its start; hand-offs do not change it."""
    double = VllmDouble()
    double.dev_mode = False
    async with serving(double) as port, engine_at(port) as engine:
        epochs = {(await engine.describe()).epoch}
        for _ in range(2):
            held = await engine.prefill(PrefillJob(request_id="r", prompt=[1, 2]))
            epochs.add(held.epoch)

        assert epochs == {"start-1.5e+09"}


async def test_a_server_that_is_gone_is_unhealthy_and_comes_back():
    """While nobody answers requests are UNAVAILABLE; afterwards all is as before."""
    double = VllmDouble()
    async with serving(double) as port:
        pass
    async with serving(double, port):
        session = engine_at(port)
        engine = await session.__aenter__()
    try:
        await until(engine, lambda measure: not measure.healthy)
        with pytest.raises(EngineUnavailable):
            await read_all(engine)
        async with serving(double, port):
            measure = await until(engine, lambda measure: measure.healthy)
            assert (measure.running, measure.kv_used_tokens) == (2, 16_384)
    finally:
        await session.__aexit__(None, None, None)


async def test_a_stream_that_breaks_is_unavailable():
    """The server dies in mid stream: what came before was given out, then the error."""
    double = VllmDouble()
    double.events, double.break_stream = [event(token_ids=[7])], True
    async with serving(double) as port, engine_at(port) as engine:
        with pytest.raises(EngineUnavailable):
            await read_all(engine)


async def test_a_stream_that_ends_early_is_unavailable():
    """An end without a finish reason is no end of the text."""
    double = VllmDouble()
    double.events = [event(token_ids=[7])]
    async with serving(double) as port, engine_at(port) as engine:
        with pytest.raises(EngineUnavailable, match="before the request"):
            await read_all(engine)


async def test_an_error_in_the_stream_has_its_meaning():
    """VLLM reports some bad parameters only once it streams."""
    double = VllmDouble()
    error = {"message": "logprobs too many", "param": "logprobs", "code": 400}
    double.events = [json.dumps({"error": error}), *DONE]
    async with serving(double) as port, engine_at(port) as engine:
        with pytest.raises(InvalidArgument) as caught:
            await read_all(engine)

    assert caught.value.violations[0].field == "sampling.logprobs"


async def test_a_request_that_the_engine_gave_up_has_failed():
    """finish_reason error, as after a failed pull, is an error and no text."""
    double = VllmDouble()
    double.events = [event(token_ids=[], finish_reason="error"), *DONE]
    async with serving(double) as port, engine_at(port) as engine:
        with pytest.raises(EngineFailed):
            await read_all(engine)


async def test_an_event_of_another_shape_is_told_without_its_content():
    """A version that answers otherwise is named; prompts and hand-offs stay out of messages."""
    double = VllmDouble()
    double.events = ['{"choices": "secret"}']
    async with serving(double) as port, engine_at(port) as engine:
        with pytest.raises(EngineAnswerUnreadable) as caught:
            await read_all(engine)

    assert "secret" not in caught.value.message


async def test_many_steps_in_one_event_and_one_step_in_many_are_counted_by_tokens():
    """VLLM merges steps when its loop lags; text may come without ids and ids without text."""
    double = VllmDouble()
    usage = {"choices": [], "usage": {"prompt_tokens": 200, "completion_tokens": 4}}
    double.events = [
        event(token_ids=[1, 2, 3], text=""),
        event(token_ids=[], text="held back"),
        event(token_ids=[4], text="!", finish_reason="stop", stop_reason=4),
        json.dumps(usage),
        *DONE,
    ]
    async with serving(double) as port, engine_at(port) as engine:
        chunk, tokens = await read_all(engine, replace(JOB, want_text=True))

    assert tokens == [1, 2, 3, 4]
    assert (chunk.finish, chunk.stop_reason) == (Finish.STOP, "4")
    assert chunk.usage.completion_tokens == 4


@pytest.mark.parametrize(
    "wrong",
    [{"remote_num_tokens": 199}, {"remote_block_ids": [[4]]}, {"remote_block_ids": [[4, 5, 6]]}],
)
async def test_a_handoff_of_another_size_never_reaches_the_server(wrong):
    """Too few blocks end a vLLM engine with every request in it."""
    double = VllmDouble()
    params = json.dumps({**HANDOFF, **wrong}).encode()
    async with serving(double) as port, engine_at(port) as engine:
        with pytest.raises(HandoffRefused):
            await read_all(engine, replace(JOB, engine_params=params))

    assert double.bodies == []


async def test_a_release_is_a_request_that_is_refused_and_once_a_nudge():
    """The first release of a peer's hand-off is followed by one small request, later ones not."""
    double = VllmDouble()
    params = json.dumps({**HANDOFF, "remote_engine_id": "peer"}).encode()
    async with serving(double) as port, engine_at(port) as engine:
        assert await engine.release(params, [])
        assert await engine.release(params, [])
        async with asyncio.timeout(10):
            while len(double.bodies) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    assert [body["max_tokens"] for body in double.bodies] == [1 << 30, 1 << 30, 1]
    assert double.bodies[0]["kv_transfer_params"]["remote_engine_id"] == "peer"


async def test_a_release_at_the_engine_that_holds_it_waits_for_the_lease():
    """No vLLM engine can free its own hand-offs; nothing is sent."""
    double = VllmDouble()
    async with serving(double) as port, engine_at(port) as engine:
        assert not await engine.release(json.dumps(HANDOFF).encode(), [])

    assert double.bodies == []


async def test_a_server_that_does_not_refuse_has_not_released():
    """An answer other than a refusal is told, not taken for success."""
    double = VllmDouble()
    double.refuse_with = 500
    async with serving(double) as port, engine_at(port) as engine:
        with pytest.raises(EngineFailed, match="must refuse"):
            await engine.release(json.dumps({**HANDOFF, "remote_engine_id": "x"}).encode(), [])


async def test_an_engine_without_a_connector_cannot_prefill_for_others():
    """An answer without a hand-off is not a hand-off."""
    double = VllmDouble()
    double.handoff = None
    async with serving(double) as port, engine_at(port) as engine:
        with pytest.raises(NotSupported, match="no KV connector"):
            await engine.prefill(PrefillJob(request_id="r", prompt=[1]))


async def test_a_server_without_the_endpoint_cannot_empty_its_cache():
    """Outside dev mode there is no /reset_prefix_cache."""
    async with serving(VllmDouble()) as port, engine_at(port) as engine:
        with pytest.raises(NotSupported, match="VLLM_SERVER_DEV_MODE"):
            await engine.reset_prefix_cache()


async def test_sampling_outside_its_range_is_refused_before_the_server():
    """NaN is not even JSON."""
    double = VllmDouble()
    job = replace(JOB, sampling=Sampling(temperature=float("nan")))
    async with serving(double) as port, engine_at(port) as engine:
        with pytest.raises(InvalidArgument):
            await read_all(engine, job)

    assert double.bodies == []
