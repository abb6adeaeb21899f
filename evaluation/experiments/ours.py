"""Where late binding has to show that it loses nowhere."""

from evaluation.cells import Cell, Conditions, Pool
from evaluation.experiments.base import FAIRNESS_ORDER, Context, Variant

GRID_POOLS = ((1, 2), (2, 2), (2, 3), (2, 4), (2, 6), (3, 5))
GRID_LOADS = (0.7, 1.0, 1.3)


def grid(context: Context) -> list[Cell]:
    """Four workloads on six pools at .7, 1 and 1.3 times saturation."""
    pools = GRID_POOLS[::3] if context.quick else GRID_POOLS
    workloads = ("mixed", "chat") if context.quick else context.workloads
    cells = []
    for workload in workloads:
        for prefill, decode in pools:
            pool = Pool(prefill=prefill, decode=decode)
            base = context.saturation.rate(workload, pool)
            for factor in GRID_LOADS[1:] if context.quick else GRID_LOADS:
                cells += [
                    context.cell("grid", v, workload, pool, factor * base, load=factor)
                    for v in context.variants
                ]
    return cells


SCARCE_PLACES = (
    ("reasoning", 256, 60_000),
    ("reasoning", 256, 20_000),
    ("reasoning", 64, 60_000),
    ("reasoning", 32, 60_000),
    ("chat-reasoning", 256, 20_000),
    ("chat-reasoning", 64, 60_000),
    ("chat-reasoning", 32, 60_000),
    ("mixed", 256, 20_000),
    ("mixed", 32, 60_000),
)


def scarcity(context: Context) -> list[Cell]:
    """Decode seats and KV small: admission decides."""
    cells = []
    for workload, seats, kv_tokens in SCARCE_PLACES[1::4] if context.quick else SCARCE_PLACES:
        overrides = {"max_num_seqs": float(seats), "kv_total_tokens": float(kv_tokens)}
        pool = Pool(overrides=overrides)
        base = context.saturation.rate(workload, pool)
        for factor in (1.0,) if context.quick else (1.0, 1.3):
            cells += [
                context.cell("scarcity", v, workload, pool, factor * base, load=factor)
                for v in context.variants
            ]
    return cells


def fairness(context: Context) -> list[Cell]:
    """What the tail costs: goodput against P99 over the fairness setting."""
    cells = []
    modes = [Variant(f"late_binding {f}", "late_binding", {"fairness": f}) for f in FAIRNESS_ORDER]
    modes += context.only("least_loaded")
    for workload in ("mixed",) if context.quick else context.workloads:
        base = context.saturation.rate(workload, Pool())
        for factor in (1.3,) if context.quick else (1.0, 1.3, 1.6):
            cells += [
                context.cell("fairness", v, workload, Pool(), factor * base, load=factor)
                for v in modes
            ]
    return cells


def routers(context: Context) -> list[Cell]:
    """One router and four: independent, and with one of them deciding for all."""
    cells = []
    arms = (
        ("1 router", Conditions()),
        ("4 routers", Conditions(routers=4)),
        ("4 routers, dispatcher", Conditions(routers=4, dispatcher=True)),
    )
    variants = context.only("late_binding", "least_loaded")
    for workload in ("mixed",) if context.quick else context.workloads:
        base = context.saturation.rate(workload, Pool())
        for factor in (1.0,) if context.quick else (0.7, 1.0, 1.3):
            for name, conditions in arms:
                cells += [
                    context.cell(
                        "routers",
                        v,
                        workload,
                        Pool(),
                        factor * base,
                        label=f"{v.label}, {name}",
                        load=factor,
                        conditions=conditions,
                    )
                    for v in variants
                ]
    return cells


def staleness(context: Context) -> list[Cell]:
    """Four independent routers on telemetry of growing age."""
    periods = (0.05, 2.0) if context.quick else (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
    rate = context.saturation.rate("mixed", Pool())
    return [
        context.cell(
            "staleness",
            v,
            "mixed",
            Pool(),
            rate,
            label=f"{v.label} {period:g} s",
            load=1.0,
            conditions=Conditions(
                routers=4, telemetry_seconds=period, staleness_seconds=period / 5
            ),
        )
        for v in context.variants
        for period in periods
    ]


def robustness(context: Context) -> list[Cell]:
    """Other engines, links, noise, arrivals and shares of tight requests; each at its saturation."""
    places: list[tuple[str, Pool, Conditions]] = [
        ("h100", Pool(profile="h100-qwen2.5-3b"), Conditions()),
        ("7b", Pool(profile="a40-llama-7b"), Conditions(slo_scale=2.0)),
        (
            "slow link",
            Pool(overrides={"handoff_bytes_per_second": 1e9, "h0_seconds": 0.03}),
            Conditions(),
        ),
        ("stalls", Pool(), Conditions(jitter_sigma=0.15, stall_probability=0.02)),
        ("poisson", Pool(), Conditions(arrivals={"process": "poisson"})),
        ("gamma", Pool(), Conditions(arrivals={"process": "gamma", "gap_cv": 3.0})),
        ("tight 20 %", Pool(), Conditions(tight_share=0.2)),
        ("tight 80 %", Pool(), Conditions(tight_share=0.8)),
        ("round trip 10 ms", Pool(), Conditions(wire_seconds=5e-3)),
    ]
    cells = []
    for name, pool, conditions in places[::4] if context.quick else places:
        for workload in ("mixed",) if context.quick else context.workloads:
            base = context.saturation.rate(workload, pool, conditions)
            for factor in (1.0,) if context.quick else (0.7, 1.0, 1.3):
                cells += [
                    context.cell(
                        "robustness",
                        v,
                        workload,
                        pool,
                        factor * base,
                        label=f"{v.label} ({name})",
                        load=factor,
                        conditions=conditions,
                    )
                    for v in context.variants
                ]
    return cells
