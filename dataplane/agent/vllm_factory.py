"""Makes the engine that talks to vLLM, and the process it talks to where the agent owns it."""

import shlex
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import structlog

from dataplane.agent.engine_vllm import EngineVllm
from dataplane.agent.errors import EngineNotStarted
from dataplane.agent.http_client import HttpClient
from dataplane.agent.settings import AgentSettings
from dataplane.agent.supervisor import Supervisor, wait_healthy
from dataplane.agent.vllm_describe import Fallbacks
from dataplane.agent.vllm_http import VllmHttp
from servicekit.clock import Clock
from servicekit.errors import SettingsInvalid, SteelyardError

_MOST_STARTS = 3
"""A server that ends that often before it first answers is not going to."""


async def start_vllm(settings: AgentSettings, clock: Clock, stack: AsyncExitStack) -> EngineVllm:
    """Start the server where that was asked for, wait until it answers, and learn what it is.

    Args:
        settings: The agent's.
        clock: For waits.
        stack: Ends what is started here, last first.

    Raises:
        SettingsInvalid: a server is to be spawned and its command line makes no sense.
        EngineNotStarted: it did not answer in time, or ends whenever it is started.
        SteelyardError: it answers, but not as we know it.
    """
    supervisor = None
    if settings.spawn_vllm:
        command = spawn_command(settings)
        supervisor = Supervisor(command, log_path=settings.vllm_log_path, clock=clock)
        stack.push_async_callback(supervisor.stop)
        await supervisor.start()
    http = VllmHttp(HttpClient(settings.vllm_url))
    fallbacks = Fallbacks(
        dtype=settings.vllm_dtype,
        max_num_seqs=settings.vllm_max_num_seqs,
        max_batched_tokens=settings.vllm_max_batched_tokens,
        lease_seconds=settings.handoff_lease_seconds,
        profile=settings.profile,
        kv_bytes_per_token=settings.vllm_kv_bytes_per_token,
        clock_rate=settings.clock_rate,
    )
    engine = EngineVllm(
        http,
        clock,
        fallbacks=fallbacks,
        metrics_interval_seconds=settings.vllm_metrics_seconds,
        fixed_lengths=settings.vllm_fixed_lengths,
    )
    stack.push_async_callback(engine.close)

    async def healthy() -> bool:
        if supervisor is not None and supervisor.starts > _MOST_STARTS:
            raise EngineNotStarted(f"the engine ended {_MOST_STARTS} times at its start")
        try:
            await http.get("/health", timeout_seconds=2.0)
        except SteelyardError:
            return False
        return True

    structlog.get_logger("dataplane.agent").info(
        "waiting_for_engine",
        url=settings.vllm_url,
        spawned=settings.spawn_vllm,
        at_most_seconds=settings.engine_start_seconds,
    )
    await wait_healthy(healthy, settings.engine_start_seconds, clock)
    await engine.start()
    return engine


def spawn_command(settings: AgentSettings) -> list[str]:
    """Return the command line of a spawned server; it listens where `vllm_url` says.

    Raises:
        SettingsInvalid: there is no command, the flags are no shell words, or the URL has no port.
    """
    try:
        command = [*settings.vllm_command, *shlex.split(settings.vllm_flags)]
        url = urlsplit(settings.vllm_url)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise SettingsInvalid(f"the vLLM server cannot be spawned: {error}") from error
    if not settings.vllm_command:
        raise SettingsInvalid(f"{settings.variable('vllm_command')}: is empty")
    if any(word.partition("=")[0] == "--port" for word in command):
        return command
    if host is None or port is None:
        raise SettingsInvalid(f"{settings.variable('vllm_url')}: {settings.vllm_url} has no port")
    return [*command, "--host", host, "--port", str(port)]
