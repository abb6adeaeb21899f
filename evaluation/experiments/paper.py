"""The paper's tables and figures, on the simulated A40 pool."""

from evaluation.cells import Cell, Conditions, Pool
from evaluation.experiments.base import Context, Variant

MIXED = "mixed"
# 64 seats and 20,000 tokens of KV a decode engine: decode is scarce, which the paper's 60,000 were not.
SCARCE = {"max_num_seqs": 64.0, "kv_total_tokens": 20_000.0}
MISCALIBRATION = 7.4


def table2(context: Context) -> list[Cell]:
    """Mixed bursty load on 2P4D where round robin is in mid-collapse: every policy."""
    pool = Pool()
    rate = context.saturation.rate(MIXED, pool)
    return [context.cell("table2", v, MIXED, pool, rate, load=1.0) for v in context.variants]


def calibration(context: Context) -> list[Cell]:
    """Constants right, 7.4 times too large and too small: what calibration is worth.

    For marginal_cost also the paper's own case, in which only the price of decode is wrong.
    """
    pools = [Pool(), Pool(prefill=1, decode=2, overrides=SCARCE), Pool(overrides=SCARCE)]
    variants = context.only("marginal_cost", "late_binding", "least_loaded")
    cells = []
    for pool in pools[:1] if context.quick else pools:
        rate = context.saturation.rate(MIXED, pool)
        for variant in variants:
            for factor in (1.0, MISCALIBRATION, 1.0 / MISCALIBRATION):
                label = f"{variant.label} x{factor:.2f}"
                conditions = Conditions(believed_factor=factor)
                cells.append(
                    context.cell(
                        "calibration",
                        variant,
                        MIXED,
                        pool,
                        rate,
                        label=label,
                        load=1.0,
                        conditions=conditions,
                    )
                )
        for variant in [v for v in variants if v.policy == "marginal_cost"]:
            settings = dict(variant.settings) | {"decode_cost_factor": 1.0 / MISCALIBRATION}
            wrong = Variant(f"{variant.label} decode x0.14", variant.policy, settings)
            cells.append(context.cell("calibration", wrong, MIXED, pool, rate, load=1.0))
    return cells


def heterogeneity(context: Context) -> list[Cell]:
    """Each kind of load alone, and engines that are not alike (told to the routers, or not)."""
    cells = []
    for workload in context.workloads:
        rate = context.saturation.rate(workload, Pool())
        cells += [
            context.cell("heterogeneity", v, workload, Pool(), rate, load=1.0)
            for v in context.variants
        ]
    slow = {"d00": 1.5, "p00": 1.3}
    rate = 0.85 * context.saturation.rate(MIXED, Pool())
    for pool, name in ((Pool(slower=slow), "told"), (Pool(slower_untold=slow), "untold")):
        cells += [
            context.cell(
                "heterogeneity", v, MIXED, pool, rate, load=0.85, label=f"{v.label} slow {name}"
            )
            for v in context.variants
        ]
    return cells[:: 4 if context.quick else 1]


def width(context: Context) -> list[Cell]:
    """The decode pool narrower and wider than the load asks for."""
    rate = context.saturation.rate(MIXED, Pool())
    widths = (3, 6) if context.quick else (3, 4, 6)
    return [
        context.cell("width", v, MIXED, Pool(decode=decode), rate, load=1.0)
        for decode in widths
        for v in context.variants
    ]


def frontier(context: Context) -> list[Cell]:
    """Goodput by number of engines, each policy at its best split; the report picks the best."""
    base = context.saturation.rate(MIXED, Pool())
    cells = []
    for load in (1.0,) if context.quick else (1.0, 1.4):
        for total in (3, 5, 7) if context.quick else range(3, 9):
            for prefill in range(1, total):
                if not 0.25 <= prefill / total <= 0.67:
                    continue
                pool = Pool(prefill=prefill, decode=total - prefill)
                cells += [
                    context.cell("frontier", v, MIXED, pool, load * base, load=load)
                    for v in context.variants
                ]
    return cells


def load(context: Context) -> list[Cell]:
    """From half of saturation to twice."""
    loads = (0.7, 1.3) if context.quick else (0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0)
    base = context.saturation.rate(MIXED, Pool())
    return [
        context.cell("load", v, MIXED, Pool(), factor * base, load=factor)
        for factor in loads
        for v in context.variants
    ]


def burst_train(context: Context) -> list[Cell]:
    """A square wave of load; the rolling P95 shows who recovers."""
    rate = context.saturation.rate(MIXED, Pool())
    return [
        context.cell("burst-train", v, "burst-train", Pool(), rate, load=1.0, keep_series=True)
        for v in context.variants
    ]


ABLATIONS: dict[str, list[tuple[str, dict[str, object]]]] = {
    "marginal_cost": [
        ("full", {}),
        ("no prediction", {"use_prediction": False}),
        ("no own work", {"own_work": 0.0}),
        ("no backlog", {"backlog": 0.0}),
        ("no queue", {"queue_seconds": 0.0}),
        ("no pressure", {"pressure": 0.0}),
        ("no SLO class", {"use_slo": False}),
    ],
    "late_binding": [
        ("full", {}),
        ("prefill bound on arrival", {"dispatch_ahead_seconds": 9.0}),
        ("30 ms ahead", {"dispatch_ahead_seconds": 0.03}),
        ("first come first served", {"order_by_laxity": False}),
        ("no batch fill", {"batch_seconds": 0.0, "batch_seconds_overloaded": 0.0}),
        ("no gate", {"gate": False}),
        ("no reservation", {"doomed_share": 1.0}),
        ("no ageing", {"fairness": "goodput_first"}),
        ("hand-off not learned", {"learn_handoff": False}),
        ("constants not corrected", {"learn_constants": False}),
    ],
}


def ablation(context: Context) -> list[Cell]:
    """Each term of marginal_cost and each part of late_binding taken out, at 1.0 and 1.3 times."""
    places = [(MIXED, Pool())]
    if not context.quick:
        places += [("chat", Pool()), ("documents", Pool()), ("reasoning", Pool())]
        places += [(MIXED, Pool(decode=2))]
    cells = []
    for workload, pool in places:
        base = context.saturation.rate(workload, pool)
        for factor in (1.0,) if context.quick else (1.0, 1.3):
            for policy, parts in ABLATIONS.items():
                for name, settings in parts:
                    variant = Variant(f"{policy}: {name}", policy, settings)
                    cells.append(
                        context.cell(
                            "ablation", variant, workload, pool, factor * base, load=factor
                        )
                    )
    return cells


def noise(context: Context) -> list[Cell]:
    """Injected error of the output length prediction, 0 to 150 %."""
    errors = (0.0, 1.5) if context.quick else (0.0, 0.25, 0.5, 1.0, 1.5)
    rate = context.saturation.rate(MIXED, Pool())
    return [
        context.cell(
            "noise",
            variant,
            MIXED,
            Pool(),
            rate,
            label=f"{variant.label} error {error:.2f}",
            load=1.0,
            conditions=Conditions(prediction="true", prediction_error=error),
        )
        for variant in context.only("marginal_cost", "late_binding")
        for error in errors
    ]
