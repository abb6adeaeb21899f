"""What is measured on real engines: few cells, each worth its minutes.

Rates are those at which round robin is in mid-collapse in the simulator; round robin's measured
goodput in the first table says whether it is there as well.
"""

from collections.abc import Sequence

from evaluation.cells import Cell, Conditions, Pool
from evaluation.experiments.base import Context, Variant
from evaluation.experiments.paper import MISCALIBRATION, MIXED

CONTENDERS = ("round_robin", "least_loaded", "late_binding")
PAPER = ("round_robin", "least_loaded", "length_threshold", "marginal_cost", "late_binding")
PRICING = ("marginal_cost", "late_binding")


def table2(context: Context) -> list[Cell]:
    """Mixed bursty load, round robin in mid-collapse: the paper's policies and ours on 2P4D.

    The quick version has two of them on 1P2D: enough to see gates, engines and scores at work.
    """
    pool = Pool(prefill=1, decode=2) if context.quick else Pool()
    variants = context.only(*(("least_loaded", "late_binding") if context.quick else PAPER))
    rate = context.saturation.rate(MIXED, pool)
    return _cells(context, variants, MIXED, pool, rate)


def others(context: Context) -> list[Cell]:
    """More load, wrong constants, wrong predictions, other pools; the first table has the rest.

    1P2D is where the paper's router fell behind round robin; 2P2D shows what late binding does
    with four engines under the load of round robin's six.
    """
    rate = context.saturation.rate(MIXED, Pool())
    contenders, pricing = context.only(*CONTENDERS), context.only(*PRICING)
    all_four = [*contenders, *context.only("marginal_cost")]
    narrow = Pool(prefill=1, decode=2)
    cells = _cells(context, all_four, MIXED, Pool(), 1.3 * rate, load=1.3)
    wrong = Conditions(believed_factor=MISCALIBRATION)
    cells += _cells(
        context, pricing, MIXED, Pool(), rate, suffix=f" x{MISCALIBRATION}", conditions=wrong
    )
    noisy = Conditions(prediction_error=1.5)
    cells += _cells(context, pricing, MIXED, Pool(), rate, suffix=" error 1.50", conditions=noisy)
    cells += _cells(context, contenders, MIXED, Pool(decode=3), rate)
    cells += _cells(
        context,
        all_four,
        MIXED,
        narrow,
        context.saturation.rate(MIXED, narrow),
    )
    cells += _cells(context, context.only("late_binding"), MIXED, Pool(prefill=2, decode=2), rate)
    return cells


def saturation(context: Context) -> list[Cell]:
    """Round robin at and below the rate that the first table was measured at.

    Where its goodput crosses .8 of the ceiling is its saturation rate on real engines, as
    `evaluation.saturation` has it of simulated ones.
    """
    rate = context.saturation.rate(MIXED, Pool())
    variants = context.only("round_robin")
    return [
        cell
        for load in (0.85, 0.92, 1.0)
        for cell in _cells(context, variants, MIXED, Pool(), load * rate, load=load)
    ]


def workloads(context: Context) -> list[Cell]:
    """Each kind of load alone; mixed is in the first table."""
    cells = []
    for workload in context.workloads:
        if workload != MIXED:
            rate = context.saturation.rate(workload, Pool())
            cells += _cells(context, context.only(*CONTENDERS), workload, Pool(), rate)
    return cells


def _cells(
    context: Context,
    variants: Sequence[Variant],
    workload: str,
    pool: Pool,
    rate: float,
    *,
    load: float = 1.0,
    suffix: str = "",
    conditions: Conditions | None = None,
) -> list[Cell]:
    return [
        context.cell(
            "measured",
            variant,
            workload,
            pool,
            rate,
            label=variant.label + suffix,
            load=load,
            conditions=conditions,
        )
        for variant in variants
    ]
