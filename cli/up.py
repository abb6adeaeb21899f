"""`steelyard up`: a whole cluster on this machine, until Ctrl-C."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from calibrator.check import check_cluster
from localcluster.cluster import Addresses, LocalCluster
from localcluster.pace_machine import MachineWatch
from localcluster.pace_records import read_validity
from localcluster.spec import DEFAULT_PORT_BASE, ClusterSpec, Pools
from servicekit.clock import clock_at
from servicekit.errors import SettingsInvalid
from servicekit.signals import stop_on_signals

_CHECK_SECONDS = 0.5
_PACED_DILATION = 3.0
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


def up(
    *,
    engine: Literal["emulated", "vllm", "paced"] = "emulated",
    pools: str = "2P4D",
    profile: str = "a40-qwen2.5-3b",
    policy: str = "",
    port_base: int = DEFAULT_PORT_BASE,
    time_scale: float | None = None,
    dilation: float | None = None,
    routers: int = 1,
    model: str = "",
    vllm_python: Path = Path(".venv-vllm/bin/python"),
    redis_url: Annotated[str, Parameter(help="An existing Redis; left out, one of its own.")] = "",
    log_level: str = "INFO",
) -> None:
    """Bring up Redis, control plane, agents with engines, and routers; Ctrl-C takes all down.

    Args:
        engine: emulated needs nothing else; vllm runs real vLLM and NIXL on this CPU; paced runs
            them too, as fast as a profile says, slowed down by a dilation.
        pools: How many of each role, as in 2P4D.
        profile: Whose step times emulated and paced engines have.
        policy: Placement policy of the routers.
        port_base: First port; the router listens there, the rest above. 0 takes free ports.
        time_scale: Engine seconds a real second, 1 where left out; inf is full speed, for emulated
            engines only.
        dilation: The same the other way round: real seconds an engine second; 3 for paced engines
            where left out.
        routers: Router processes.
        model: Served name of emulated engines, or model folder of vLLM; left out, a small one.
        vllm_python: Python of the vLLM environment.
        redis_url: An existing Redis.
        log_level: Lowest level shown.
    """
    if model and engine == "paced":
        raise SettingsInvalid("--model: paced engines serve a small model of their own")
    agent_settings: dict[str, object] = {}
    if engine == "emulated":
        agent_settings = {"profile": profile}
        if model:
            agent_settings["model"] = model
    spec = ClusterSpec(
        engine=engine,
        pools=Pools.parse(pools),
        port_base=port_base,
        routers=routers,
        redis_url=redis_url,
        time_scale=_time_scale(engine, time_scale, dilation),
        profile=profile,
        agent_settings=agent_settings,
        router_settings={"policy": policy} if policy else {},
        vllm_python=vllm_python,
        vllm_model=model if engine == "vllm" else "",
        log_level=log_level,
    )
    asyncio.run(_run(spec))


async def _run(spec: ClusterSpec) -> None:
    console = Console(highlight=False)
    stop = asyncio.Event()
    with stop_on_signals(stop):
        running = asyncio.create_task(_stay_up(spec, console))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    console.print("[bold]down[/bold]: nothing is left running")


def _time_scale(engine: str, time_scale: float | None, dilation: float | None) -> float:
    """Return engine seconds a real second; a dilation is one over it.

    Raises:
        SettingsInvalid: Both are given, one is not positive, or engines cannot be scaled.
    """
    if time_scale is not None and dilation is not None:
        raise SettingsInvalid("--time-scale and --dilation say the same: give one of them")
    for name, value in (("--time-scale", time_scale), ("--dilation", dilation)):
        if value is not None and not value > 0:
            raise SettingsInvalid(f"{name}: {value:g} is not positive")
        if value is not None and engine == "vllm":
            raise SettingsInvalid(f"{name}: engine vllm runs as fast as it can; paced has a pace")
    if dilation is None and time_scale is None:
        dilation = _PACED_DILATION if engine == "paced" else 1.0
    return 1.0 / dilation if dilation is not None else time_scale or 1.0


async def _stay_up(spec: ClusterSpec, console: Console) -> None:
    started_at = time.monotonic()
    async with LocalCluster(spec, _LineWriter(console)) as cluster:
        if spec.engine == "paced":
            await _warm(spec, cluster.addresses.control[0], console)
        seconds = time.monotonic() - started_at
        console.print(f"[bold]up[/bold] in {seconds:.1f} s: {spec.pools} {spec.engine}")
        console.print(where_to_look(cluster.addresses), soft_wrap=True)
        began_unix = time.time()
        async with MachineWatch() as watch:
            try:
                while True:
                    await asyncio.sleep(_CHECK_SECONDS)
                    cluster.processes.check()
            finally:
                if spec.engine == "paced":
                    load = await watch.so_far()
                    verdict = read_validity(spec.directory, began_unix, time.time(), load)
                    console.print(f"[bold]what ran is {verdict.text()}[/bold]", soft_wrap=True)


async def _warm(spec: ClusterSpec, control_plane: str, console: Console) -> None:
    """Let every pair hand over once, and say what each gate found: the first time takes longer."""
    for gate in await check_cluster(control_plane, clock_at(spec.time_scale)):
        detail = f": {gate.detail}" if gate.detail else ""
        console.print(f"gate {gate.name} {'passed' if gate.passed else 'FAILED'}{detail}")


def where_to_look(addresses: Addresses) -> str:
    """Return the lines that say what to try next."""
    cli = " ".join(addresses.redis_cli)
    router = addresses.routers[0]
    return "\n".join(
        [
            f"  router        {', '.join(addresses.routers)} (gRPC)",
            f"  OpenAI API    {', '.join(f'http://{a}/v1' for a in addresses.gateways)}",
            f"  control plane {', '.join(addresses.control)} (gRPC)",
            f"  page          http://{addresses.control_http[0]}/",
            f"  state         {cli} hgetall steelyard:instance:decode-0",
            f"  prompt        steelyard generate 'Weigh first, then send.' --router {router}",
            f"  services      grpcurl -plaintext {router} list steelyard.v1.RouterService",
        ]
    )


class _LineWriter:
    """Writes each part's lines under its name, a colour a part."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours: dict[str, str] = {}

    def __call__(self, name: str, line: str) -> None:
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._console.print(f"[{colour}]{name:>10}[/{colour}] ", end="")
        self._console.print(line, markup=False, soft_wrap=True)
