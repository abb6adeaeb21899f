"""`steelyard up`: a whole cluster on this machine, until Ctrl-C."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from localcluster.cluster import Addresses, LocalCluster
from localcluster.spec import DEFAULT_PORT_BASE, ClusterSpec, Pools
from servicekit.signals import stop_on_signals

_CHECK_SECONDS = 0.5
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


def up(
    *,
    engine: Literal["emulated", "vllm"] = "emulated",
    pools: str = "2P4D",
    profile: str = "a40-qwen2.5-3b",
    policy: str = "",
    port_base: int = DEFAULT_PORT_BASE,
    time_scale: float = 1.0,
    routers: int = 1,
    model: str = "",
    vllm_python: Path = Path(".venv-vllm/bin/python"),
    redis_url: Annotated[str, Parameter(help="An existing Redis; left out, one of its own.")] = "",
    log_level: str = "INFO",
) -> None:
    """Bring up Redis, control plane, agents with engines, and routers; Ctrl-C takes all down.

    Args:
        engine: emulated needs nothing else; vllm runs real vLLM and NIXL on this CPU.
        pools: How many of each role, as in 2P4D.
        profile: Whose step times emulated engines have.
        policy: Placement policy of the routers.
        port_base: First port; the router listens there, the rest above. 0 takes free ports.
        time_scale: Engine seconds a real second, emulated engines only; inf is full speed.
        routers: Router processes.
        model: Served name of emulated engines, or model folder of vLLM; left out, a small one.
        vllm_python: Python of the vLLM environment.
        redis_url: An existing Redis.
        log_level: Lowest level shown.
    """
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
        time_scale=time_scale,
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


async def _stay_up(spec: ClusterSpec, console: Console) -> None:
    started_at = time.monotonic()
    async with LocalCluster(spec, _LineWriter(console)) as cluster:
        seconds = time.monotonic() - started_at
        console.print(f"[bold]up[/bold] in {seconds:.1f} s: {spec.pools} {spec.engine}")
        console.print(where_to_look(cluster.addresses), soft_wrap=True)
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            cluster.processes.check()


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
