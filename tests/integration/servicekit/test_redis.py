"""The embedded redis-server, connections to it, and children that die with their parent."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from servicekit.embedded_redis import EmbeddedRedis
from servicekit.errors import ChildFailed, RedisUnavailable
from servicekit.redis_client import REDIS_ERRORS, connect, ping
from servicekit.supervise import bound_to_parent, end_group, end_group_async


@pytest.mark.asyncio
async def test_a_client_comes_back_with_its_redis():
    """A killed server fails commands; started again on its port, it is used without a new client."""
    with EmbeddedRedis(persist=True) as server:
        client = connect(server.url, timeout_seconds=0.5)
        await ping(client, server.url)
        await client.set("kept", "1")
        server.kill()
        with pytest.raises(REDIS_ERRORS):
            await client.get("kept")
        server.start()

        assert await client.get("kept") == b"1"
        await client.aclose()


@pytest.mark.asyncio
async def test_the_password_is_needed_and_never_shown():
    """A wrong password is a RedisUnavailable that says why, without either password."""
    with EmbeddedRedis(password="right-one") as server:
        good = connect(server.url)
        await ping(good, server.url)
        apart = connect(f"redis://127.0.0.1:{server.port}/0", password="right-one")
        await ping(apart, server.url)
        bad_url = server.url.replace("right-one", "wrong-one")
        bad = connect(bad_url)
        with pytest.raises(RedisUnavailable, match=str(server.port)) as caught:
            await ping(bad, bad_url)

        assert "one@" not in caught.value.message
        for client in (good, apart, bad):
            await client.aclose()


@pytest.mark.asyncio
async def test_nobody_there_is_a_clear_error():
    """No Redis at all is a RedisUnavailable naming the address."""
    client = connect("redis://127.0.0.1:1/0")
    with pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:1"):
        await ping(client, "redis://127.0.0.1:1/0")
    await client.aclose()


def test_a_taken_port_is_a_child_failed():
    """A redis-server that cannot bind fails with its own words, and leaves no process."""
    with EmbeddedRedis() as first:
        second = EmbeddedRedis(port=first.port, password="x")
        with pytest.raises(ChildFailed, match="did not start"):
            second.start()
        second.stop()

        assert not second.running


def test_a_bound_child_dies_with_its_parent():
    """A child started through `bound_to_parent` is gone once its parent was killed."""
    script = textwrap.dedent(
        """
        import subprocess, sys
        from servicekit.supervise import bound_to_parent
        child = subprocess.Popen(bound_to_parent(["sleep", "1000"]), stdout=sys.stdout)
        print(child.pid, flush=True)
        child.wait()
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.wait()

    # The pipe closes when the last holder is gone: the child held it too.
    assert parent.stdout.read() == b""
    parent.stdout.close()


def test_ending_a_group_takes_grandchildren_along():
    """A child that ignores SIGTERM is killed, and what it started with it."""
    command = "trap '' TERM; sleep 1000 & echo up; wait; wait"
    process = subprocess.Popen(
        bound_to_parent(["sh", "-c", command]), stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline() == b"up\n"
    code = end_group(process, 0.1)

    assert code < 0
    assert process.stdout.read() == b""
    process.stdout.close()


@pytest.mark.asyncio
async def test_a_child_ends_even_if_waiting_for_it_is_cancelled():
    """Whoever gives up the wait for a child that minds no SIGTERM leaves none behind."""
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)\n"
    child = await asyncio.create_subprocess_exec(
        *bound_to_parent([sys.executable, "-c", code + "signal.pause()"]),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    await child.stdout.readline()
    ending = asyncio.create_task(end_group_async(child, grace_seconds=60.0))
    await asyncio.sleep(0)
    ending.cancel()

    async with asyncio.timeout(10):
        assert await child.wait() == -signal.SIGKILL
    assert ending.cancelled()
