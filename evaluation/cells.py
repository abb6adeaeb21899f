"""The unit of an evaluation: one policy on one cluster under one load; and what one seed of it gave."""

from hashlib import sha256
from typing import Any

import msgspec

SCHEMA = 1


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster of one model, as far as experiments change it.

    Attributes:
        prefill: Prefill instances.
        decode: Decode instances.
        profile: Name of the engine profile.
        overrides: Fields of the profile that differ, constants included.
        slower: Slowness by instance id, told to the routers.
        slower_untold: Slowness by instance id, of which the routers know nothing.
    """

    prefill: int = 2
    decode: int = 4
    profile: str = "a40-qwen2.5-3b"
    overrides: dict[str, float] = {}
    slower: dict[str, float] = {}
    slower_untold: dict[str, float] = {}

    @property
    def name(self) -> str:
        """For example 2P4D."""
        return f"{self.prefill}P{self.decode}D"


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """An instance lost during the run."""

    at_seconds: float
    instance_id: str


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What else differs between cells; the defaults are those of the main tables.

    Attributes:
        routers: Front ends.
        dispatcher: One of them decides for all.
        telemetry_seconds: Between snapshots.
        staleness_seconds: Age of a snapshot when it arrives.
        wire_seconds: One way between router and engine.
        hop_seconds: One way between front end and dispatcher.
        jitter_sigma: Of step times.
        stall_probability: Of a step.
        believed_factor: Of the constants that the routers are told.
        prediction: "mean" (by tenant), "learned", "constant" or "true".
        prediction_error: Injected relative error.
        tight_share: Of requests; None for the workload's.
        arrivals: In place of the workload's arrival process.
        slo_scale: Multiplies every target.
        incidents: Losses of instances.
    """

    routers: int = 1
    dispatcher: bool = False
    telemetry_seconds: float = 0.05
    staleness_seconds: float = 5e-3
    wire_seconds: float = 1.5e-3
    hop_seconds: float = 1e-3
    jitter_sigma: float = 0.04
    stall_probability: float = 1e-3
    believed_factor: float = 1.0
    prediction: str = "mean"
    prediction_error: float = 0.0
    tight_share: float | None = None
    arrivals: dict[str, Any] = {}
    slo_scale: float = 1.0
    incidents: list[Incident] = []


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of an experiment's table.

    Attributes:
        experiment: It belongs to.
        label: What a reader calls this variant; the policy's name unless settings differ.
        policy: Registered name.
        settings: Of the policy.
        workload: Name or TOML path.
        pool: The cluster.
        rate: Requests a second in the mean.
        load: Of the saturation rate, where the rate was found so; 0 otherwise.
        seconds: Of arrivals.
        warmup_seconds: Of arrivals at the start that are not scored.
        conditions: All else.
        keep_series: Whether rolling percentiles over time are kept.
    """

    experiment: str
    label: str
    policy: str
    workload: str
    rate: float
    settings: dict[str, Any] = {}
    pool: Pool = Pool()
    load: float = 0.0
    seconds: float = 90.0
    warmup_seconds: float = 5.0
    conditions: Conditions = Conditions()
    keep_series: bool = False

    def key(self) -> str:
        """Return a digest of everything that decides the result but the seed."""
        return sha256(msgspec.json.encode((SCHEMA, self), order="deterministic")).hexdigest()[:20]


class SeedResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one seed of a cell gave, over requests that arrived in the scored window.

    Attributes:
        seed: The seed.
        requests: Scored requests.
        goodput: Share that met both targets of its class.
        ceiling: Share that could on an idle cluster.
        completed: Share that finished.
        shed: Requests turned away.
        beyond_3x: Share whose first token took more than three times its target.
        preemptions: On all engines, over the whole run.
        ttft_p50_seconds: Over all scored requests; None where that request has no first token.
        tpot_p99_seconds: Over all scored requests.
        goodput_by_class: Likewise by class.
        goodput_by_tenant: Likewise by tenant.
        ttft_p99_by_tenant: Seconds.
        longest_wait_over_target: Largest TTFT over its target.
        valid: Every request ended exactly once and left nothing behind.
        virtual_seconds: Until the last request ended.
        series: (second, P95 of TTFT over the last seconds) where kept.
        validity: How well paced engines kept their pace, and who used the machine; empty elsewhere.
        why_invalid: What is wrong with the pace or the machine; empty where nothing is.
    """

    seed: int
    requests: int
    goodput: float
    ceiling: float
    completed: float
    shed: int
    beyond_3x: float
    preemptions: int
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    ttft_max_seconds: float | None
    tpot_p99_seconds: float | None
    goodput_by_class: dict[str, float]
    goodput_by_tenant: dict[str, float]
    ttft_p99_by_tenant: dict[str, float | None]
    longest_wait_over_target: float | None
    valid: bool
    virtual_seconds: float
    series: list[tuple[float, float]] = []
    validity: dict[str, float] = {}
    why_invalid: str = ""
