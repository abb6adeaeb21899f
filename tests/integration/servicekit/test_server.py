"""The server over loopback: errors, metrics, logs, health, reflection, channelz, stopping."""

import asyncio

import aiohttp
import grpc
import pytest
import structlog
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from servicekit import probe
from servicekit.channel import open_channel
from servicekit.options import ServerOptions

NAME = "test.Echo"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_answers_counts_and_logs_one_line(running, kind):
    """A call of each kind is answered, counted OK, and logged once with what the handler added."""
    with structlog.testing.capture_logs() as lines:
        answers = await running.call(kind, "hello")

    assert set(answers) == {"hello"}
    assert running.handled(kind, "OK") == 1
    handled = [line for line in lines if line["event"] == "rpc_handled"]
    assert [(line["method"], line["code"], line["text"]) for line in handled] == [
        (kind, "OK", "hello")
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_our_errors_arrive_as_rich_statuses(running, kind):
    """An InvalidArgument reaches the caller with its reason and the field that is wrong."""
    error = await running.fail(kind, "invalid")

    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == "INVALID_ARGUMENT"
    assert [(v.field, v.description) for v in error.violations] == [
        ("prompt", "is empty, at least 1 token is needed")
    ]
    assert running.handled(kind, "INVALID_ARGUMENT") == 1


@pytest.mark.asyncio
async def test_retry_advice_travels(running):
    """UNAVAILABLE carries how long to wait before trying again."""
    error = await running.fail("unary_unary", "unavailable")

    assert (error.reason, error.retry_after_seconds) == ("NO_INSTANCE", 1.5)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_is_internal_logged_once_and_not_leaked(running, kind):
    """An unhandled exception is INTERNAL without its text; the log has it once with traceback."""
    with structlog.testing.capture_logs() as lines:
        error = await running.fail(kind, "bug")

    assert error.code is grpc.StatusCode.INTERNAL
    assert "secret" not in error.message
    crashes = [line for line in lines if line["event"] == "rpc_crashed"]
    assert [type(line["exc_info"]) for line in crashes] == [KeyError]
    assert error.metadata["request_id"] == crashes[0]["request_id"]
    assert running.handled(kind, "INTERNAL") == 1


@pytest.mark.asyncio
async def test_foreign_exceptions_are_translated(running):
    """An exception that the service gives a meaning becomes that error."""
    assert (await running.fail("unary_unary", "foreign")).code is grpc.StatusCode.NOT_FOUND


@pytest.mark.asyncio
async def test_abort_by_hand_keeps_its_code(running):
    """A handler's own abort passes through and is counted under its code."""
    error = await running.fail("unary_stream", "abort")

    assert (error.code, error.message) == (grpc.StatusCode.ALREADY_EXISTS, "by hand")
    assert running.handled("unary_stream", "ALREADY_EXISTS") == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_passed_deadline_is_counted_as_such(running, kind):
    """A handler whose caller's time is up is cancelled and counted as DEADLINE_EXCEEDED."""
    error = await running.fail(kind, "hang", timeout=0.1)
    await running.service.left.wait()
    await _eventually(lambda: running.handled(kind, "DEADLINE_EXCEEDED") == 1)

    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.asyncio
async def test_a_cancelled_call_is_counted_as_such(running):
    """A handler whose caller left is cancelled and counted as CANCELLED."""
    task = asyncio.create_task(running.call("unary_stream", "hang"))
    await running.service.entered.wait()
    task.cancel()
    await running.service.left.wait()

    await _eventually(lambda: running.handled("unary_stream", "CANCELLED") == 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [100_000, 10_000_000])
async def test_too_long_messages_are_refused_clearly(running, kind, size):
    """A message over the limit is RESOURCE_EXHAUSTED, and says its size and the limit."""
    error = await running.fail(kind, "x" * size)

    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(size)[:2] in error.message
    if size < 4 * 65_536:
        assert error.reason == "MESSAGE_TOO_LARGE"
        assert error.metadata["max_message_bytes"] == "65536"


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", KINDS)
async def test_invalid_utf8_names_the_field(running, kind):
    """A string that is not UTF-8 is INVALID_ARGUMENT naming the field."""
    error = await running.fail(kind, b"\x0a\x02\xff\xfe")

    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_UTF8")
    assert [violation.field for violation in error.violations] == ["value"]


@pytest.mark.asyncio
async def test_garbage_is_an_invalid_argument(running):
    """Bytes that are no message at all are INVALID_ARGUMENT, not a crash."""
    error = await running.fail("unary_unary", b"\xff\xff\xff")

    assert error.reason == "UNPARSABLE_MESSAGE"


@pytest.mark.asyncio
async def test_trace_context_passes_through(running):
    """The next hop gets the caller's trace id under a span of our own."""
    parent = f"00-{TRACE}-b7ad6b7169203331-01"
    with structlog.testing.capture_logs() as lines:
        (child,) = await running.call(
            "unary_unary", "metadata", metadata=(("traceparent", parent),)
        )

    assert child.startswith(f"00-{TRACE}-")
    assert child.endswith("-01")
    assert child != parent
    assert lines[-1]["trace_id"] == TRACE


@pytest.mark.asyncio
async def test_unknown_methods_are_unimplemented(running):
    """A method that nobody serves is UNIMPLEMENTED."""
    method = running.channel.unary_unary(f"/{NAME}/Nothing")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"")

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.asyncio
async def test_health_follows_set_serving(running):
    """Health answers for the server and each service, over gRPC, HTTP and the probe."""
    stub = health_pb2_grpc.HealthStub(running.channel)
    for name in ("", NAME):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert await asyncio.to_thread(probe.main, [running.server.address]) == 0

    await running.server.set_serving(False)

    assert await asyncio.to_thread(probe.probe, running.server.address) == "NOT_SERVING"
    assert await asyncio.to_thread(probe.main, [running.server.address]) == 1
    status, _ = await _get(running, "/healthz")
    assert status == 503


@pytest.mark.asyncio
async def test_probe_fails_where_nobody_listens():
    """The probe's exit code is 1 when there is no server, 2 when it is called wrongly."""
    assert await asyncio.to_thread(probe.main, ["127.0.0.1:1"]) == 1
    assert probe.main([]) == 2


@pytest.mark.asyncio
async def test_instances_are_reached_directly_whatever_proxy_is_set(monkeypatch, running):
    """A proxy for the way out, where nobody listens, is not asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    address = running.server.address

    async with asyncio.timeout(10), open_channel(address) as channel:
        await channel.channel_ready()

    assert await asyncio.to_thread(probe.probe, address) == "SERVING"


@pytest.mark.asyncio
async def test_reflection_lists_the_services(running):
    """Reflection names our service beside the standard ones."""
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
    names = {service.name for service in answers[0].list_services_response.service}

    assert {NAME, "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} <= names


@pytest.mark.asyncio
async def test_channelz_answers(running):
    """Channelz sees our server's sockets."""
    stub = channelz_pb2_grpc.ChannelzStub(running.channel)
    answer = await stub.GetServers(channelz_pb2.GetServersRequest(start_server_id=0))

    assert answer.server


@pytest.mark.asyncio
async def test_metrics_page_shows_the_calls(running):
    """The HTTP side serves the registry's text."""
    await running.call("unary_unary", "hello")
    status, text = await _get(running, "/metrics")

    assert status == 200
    assert 'grpc_server_handled_total{grpc_code="OK",grpc_method="unary_unary"' in text


@pytest.mark.asyncio
async def test_stop_lets_calls_finish_within_the_grace(serve):
    """Stopping tells health first, cuts what does not end in its grace, and closes the port."""
    async with serve(drain_grace_seconds=0.2) as running:
        hanging = asyncio.create_task(running.fail("unary_unary", "hang"))
        await running.service.entered.wait()
        watch = health_pb2_grpc.HealthStub(running.channel).Watch(health_pb2.HealthCheckRequest())
        states = [(await watch.read()).status]
        stopping = asyncio.create_task(running.server.stop())
        states.append((await watch.read()).status)
        assert running.server.stopping.is_set()
        assert not hanging.done()
        await stopping

        error = await hanging
        assert states == [
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        ]
        assert error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert running.service.left.is_set()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", running.server.port)


@pytest.mark.asyncio
async def test_a_taken_port_is_an_os_error(running, serve):
    """Starting on somebody else's port fails with the address in the message."""
    second = serve()
    second.server.options = ServerOptions(listen=running.server.address)
    with pytest.raises(OSError, match=str(running.server.port)):
        await second.server.start()


async def _get(running, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{running.server.http_port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def _eventually(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  counters have no event
            await asyncio.sleep(0.005)
