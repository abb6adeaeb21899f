"""Makes the engine that talks to vLLM, and the process it talks to where the agent owns it."""

from contextlib import AsyncExitStack

from dataplane.agent.engine_vllm import EngineVllm
from dataplane.agent.settings import AgentSettings
from dataplane.agent.supervisor import Supervisor, wait_healthy
from dataplane.agent.vllm_describe import Fallbacks
from dataplane.agent.vllm_http import VllmHttp, new_session
from servicekit.clock import Clock
from servicekit.errors import SettingsInvalid, SteelyardError


async def start_vllm(settings: AgentSettings, clock: Clock, stack: AsyncExitStack) -> EngineVllm:
    """Start the server where that was asked for, wait until it answers, and learn what it is.

    Args:
        settings: The agent's.
        clock: For waits.
        stack: Ends what is started here, last first.

    Raises:
        SettingsInvalid: a server is to be spawned and there is no command.
        EngineNotStarted: it did not answer in time.
        SteelyardError: it answers, but not as we know it.
    """
    if settings.spawn_vllm:
        if not settings.vllm_command:
            raise SettingsInvalid(f"{settings.variable('vllm_command')}: is empty")
        supervisor = Supervisor(settings.vllm_command, log_path=settings.vllm_log_path, clock=clock)
        stack.push_async_callback(supervisor.stop)
        await supervisor.start()
    session = new_session()
    http = VllmHttp(session, settings.vllm_url)
    fallbacks = Fallbacks(
        dtype=settings.vllm_dtype,
        max_num_seqs=settings.vllm_max_num_seqs,
        max_batched_tokens=settings.vllm_max_batched_tokens,
        lease_seconds=settings.handoff_lease_seconds,
        profile=settings.profile,
    )
    engine = EngineVllm(
        http,
        session,
        clock,
        fallbacks=fallbacks,
        metrics_interval_seconds=settings.vllm_metrics_seconds,
    )
    stack.push_async_callback(engine.close)

    async def healthy() -> bool:
        try:
            await http.get("/health", timeout_seconds=2.0)
        except SteelyardError:
            return False
        return True

    await wait_healthy(healthy, settings.engine_start_seconds, clock)
    await engine.start()
    return engine
