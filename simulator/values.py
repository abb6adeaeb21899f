"""What goes into a simulation and what comes out of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from enginemodel.model import NOTICE_SHARE
from enginemodel.profiles import REFERENCE, EngineProfile


class Arrival(NamedTuple):
    """One request as a client sends it, with what only the future knows.

    Attributes:
        number: Counts arrivals; with the workload's name and seed it identifies the request.
        at_seconds: When the client sends it.
        prompt_tokens: Prompt, > 0.
        output_tokens: What it will generate; no scheduler sees it.
        max_tokens: The cap that the client states.
        slo_class: "tight" or "loose", or what else the SLO policy names.
        tenant: Who sends it: an application, as far as a router can tell.
        session: Requests of one session share a prefix of `prefix_tokens`.
        prefix_tokens: Of the prompt, shared with the session's earlier requests.
        error_z: A standard normal number that injected prediction errors are made from.
        cancel_after_seconds: The client leaves this long after sending; infinity if it stays.
    """

    number: int
    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    slo_class: str
    tenant: str
    session: int = 0
    prefix_tokens: int = 0
    error_z: float = 0.0
    cancel_after_seconds: float = float("inf")

    @property
    def request_id(self) -> str:
        """The id that schedulers see."""
        return f"r{self.number}"


class End(Enum):
    """How a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class Outcome(NamedTuple):
    """One ended request as its client saw it.

    Attributes:
        arrival: The request.
        end: How it ended.
        ttft_seconds: From sending to the first token; infinity without one.
        tpot_seconds: Mean gap between tokens after the first; infinity if it did not finish.
        ended_at_seconds: When.
        prefill: Name of the instance that prefilled it last; empty if none.
        decode: Name of the instance that decoded it last; empty if none.
        preemptions: How often it lost its KV to others.
        attempts: Times a leg was started anew, the first included.
    """

    arrival: Arrival
    end: End
    ttft_seconds: float
    tpot_seconds: float
    ended_at_seconds: float
    prefill: str
    decode: str
    preemptions: int
    attempts: int


class Collector(Protocol):
    """Takes outcomes as they happen, so that a run needs no memory for them."""

    def record(self, outcome: Outcome) -> None:
        """Take one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Delays outside the engines, seconds.

    Attributes:
        overhead_seconds: From a client's send to the scheduler: HTTP, tokenising, validation.
        wire_seconds: One way between router and engine; a dispatch round trip is two of them.
        hop_seconds: One way between a front end and the dispatcher.
        telemetry_seconds: Between two snapshots.
        staleness_seconds: Age of a snapshot when a router gets it.
        loss_notice_seconds: From an instance's loss to a roster without it.
    """

    overhead_seconds: float = 5e-3
    wire_seconds: float = 1.5e-3
    hop_seconds: float = 1e-3
    telemetry_seconds: float = 0.05
    staleness_seconds: float = 5e-3
    loss_notice_seconds: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What step times are multiplied by and stalled for.

    Attributes:
        jitter_sigma: Sigma of the lognormal factor on every step (mean 1); 0 for none.
        stall_probability: Chance of a host stall in a step.
        stall_seconds: Length of a stall, uniform between the two.
    """

    jitter_sigma: float = 0.04
    stall_probability: float = 1e-3
    stall_seconds: tuple[float, float] = (0.01, 0.03)


SILENT = Noise(jitter_sigma=0.0, stall_probability=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine of the simulated cluster.

    Attributes:
        role: "prefill", "decode" or "mixed".
        profile: What its steps cost and what it holds.
        scale: How many times slower than its profile it is.
        scale_known: False where the roster claims 1 all the same.
        notice_share: When in a step it looks for finished pulls, as a share of the step.
    """

    role: str
    profile: EngineProfile = REFERENCE
    scale: float = 1.0
    scale_known: bool = True
    notice_share: float = NOTICE_SHARE


class Change(Enum):
    """What happens to an instance during a run."""

    KILL = "kill"
    DRAIN = "drain"
    JOIN = "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something that happens to the cluster at a time.

    Attributes:
        at_seconds: When.
        change: What.
        instance_id: To whom; for JOIN the id of the newcomer.
        engine: The newcomer's description; JOIN only.
    """

    at_seconds: float
    change: Change
    instance_id: str
    engine: EngineSpec | None = None


class Routing(Enum):
    """How front ends share decisions."""

    INDEPENDENT = "independent"
    """Every front end decides alone over its own ledger and the telemetry."""
    DISPATCHER = "dispatcher"
    """One decides for all, one hop away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """A scheduler by name, with its settings."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Everything about a simulated cluster but the load.

    Attributes:
        engines: By instance id; ids sort in roster order.
        believed: The profile whose constants schedulers are told; None for the true ones.
        believed_factor: Multiplies the constants that schedulers are told.
        routers: Front ends.
        report_stride_tokens: Steps between two progress reports of a stream to its scheduler.
        seed: Of everything random in the cluster.
    """

    engines: Mapping[str, EngineSpec]
    scheduler: SchedulerSpec
    timing: Timing = Timing()
    noise: Noise = Noise()
    serial_link: bool = True
    routers: int = 1
    routing: Routing = Routing.INDEPENDENT
    believed_factor: float = 1.0
    incidents: tuple[Incident, ...] = ()
    report_stride_tokens: int = 16
    seed: int = 1


def pool_of(prefill: int, decode: int, profile: EngineProfile = REFERENCE) -> dict[str, EngineSpec]:
    """Return the engines of a pool of equals: p00, p01 and so on, d00 and so on."""
    engines = {f"p{i:02d}": EngineSpec(role="prefill", profile=profile) for i in range(prefill)}
    engines |= {f"d{i:02d}": EngineSpec(role="decode", profile=profile) for i in range(decode)}
    return engines
