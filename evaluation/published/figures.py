"""Numbers as the document writes them, and what a cell of a table says of its rows."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeAlias

from evaluation.errors import EvaluationError
from evaluation.published.results import field_of
from evaluation.rows import Row
from evaluation.stats import paired_difference
from evaluation.tables import OURS, Contest, contests

Value: TypeAlias = Callable[[Sequence[Row]], str]
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
DIVIDED = "\N{DIVISION SIGN}"
# Goodput of a cell in which nothing was late, rounding aside.
ALL_IN_TIME = 0.99999


def share(value: float) -> str:
    """Return a share of 0 to 1 with three decimals and no leading zero."""
    return f"{value:.3f}".removeprefix("0")


def short_share(value: float) -> str:
    """Likewise, but plainly 1 where it is 1."""
    text = share(value)
    return "1" if text == "1.000" else text


def signed(value: float, decimals: int = 4) -> str:
    """Return a difference of shares with its sign."""
    digits = f"{abs(value):.{decimals}f}"
    sign = MINUS if value < 0 and float(digits) else "+"
    return sign + digits.removeprefix("0")


def points(value: float) -> str:
    """Return a difference of shares in percentage points."""
    return signed(100.0 * value, 1)


def factor(value: float) -> str:
    """Return a multiple of the saturation rate, as in `1.3 x`."""
    text = f"{value:g}" if value != int(value) else f"{value:.1f}"
    return f"{text.removeprefix('0')} {TIMES}"


def seconds(value: float | None) -> str:
    """Return seconds with three digits that count; a dash where there is no such value."""
    return share(value) if value is not None and value < 1.0 else short_seconds(value)


def short_seconds(value: float | None) -> str:
    """Return seconds with two decimals below ten, one from there on."""
    if value is None:
        return "-"
    return f"{value:.2f}".removeprefix("0") if value < 10.0 else f"{value:.1f}"


def mean(values: Iterable[float]) -> float:
    """Return the mean."""
    numbers = list(values)
    return sum(numbers) / len(numbers)


def place(row: Row) -> str:
    """Return what a row's cell is called: workload, pool, load and what is special about it."""
    seats, kv_tokens = field_of(row, "seats"), field_of(row, "kv_tokens")
    special = [
        f"{seats:g} seats" if isinstance(seats, float) else "",
        f"{kv_tokens:,.0f} tokens" if isinstance(kv_tokens, float) else "",
        str(field_of(row, "variant")),
    ]
    where = f"{row.workload} {field_of(row, 'pool')} {factor(row.load)}"
    return ", ".join([where, *(word for word in special if word)])


# ---- of rows of which the mean is meant


def goodput(rows: Sequence[Row]) -> str:
    """Mean goodput."""
    return share(mean(row.goodput for row in rows))


def ceiling(rows: Sequence[Row]) -> str:
    """Mean ceiling."""
    return share(mean(row.ceiling for row in rows))


# ---- of a single row


def short_ceiling(rows: Sequence[Row]) -> str:
    """Ceiling, plainly 1 where it is 1."""
    return short_share(rows[0].ceiling)


def goodput_range(rows: Sequence[Row]) -> str:
    """Goodput with its range over seeds."""
    row = rows[0]
    low, high = short_share(row.goodput_min), short_share(row.goodput_max)
    return f"{share(row.goodput)} ({low}-{high})"


def p50(rows: Sequence[Row]) -> str:
    """Median TTFT, seconds."""
    return seconds(rows[0].ttft_p50_seconds)


def p99(rows: Sequence[Row]) -> str:
    """P99 TTFT, seconds."""
    return seconds(rows[0].ttft_p99_seconds)


def slowest(rows: Sequence[Row]) -> str:
    """Largest TTFT, seconds."""
    return seconds(rows[0].ttft_max_seconds)


def far_beyond(rows: Sequence[Row]) -> str:
    """Share of requests beyond three times their target."""
    return share(rows[0].beyond_3x)


def classes(rows: Sequence[Row]) -> str:
    """Goodput of tight and of loose requests."""
    by_class = rows[0].goodput_by_class
    return f"{share(by_class['tight'])} / {share(by_class['loose'])}"


def goodput_and_p99(rows: Sequence[Row]) -> str:
    """Goodput and P99 TTFT, seconds."""
    return f"{share(rows[0].goodput)}, {short_seconds(rows[0].ttft_p99_seconds)}"


def largest_rolling_p95(rows: Sequence[Row]) -> str:
    """The largest P95 of TTFT over the last seconds, seconds."""
    return seconds(max(value for _, value in rows[0].series))


# ---- of rows that compete


def at_loads(*loads: float) -> Value:
    """Mean goodput at each of these loads."""

    def value(rows: Sequence[Row]) -> str:
        return " / ".join(goodput([r for r in rows if r.load == load]) for load in loads)

    return value


def best_split(rows: Sequence[Row]) -> str:
    """Best goodput of these pools, with the pool and its P99 TTFT."""
    best = max(rows, key=lambda row: row.goodput)
    pool, tail = field_of(best, "pool"), short_seconds(best.ttft_p99_seconds)
    return f"{share(best.goodput)} ({pool}, {tail} s)"


def against_best(rows: Sequence[Row]) -> str:
    """Late binding's goodput and that of the best other policy of its cell."""
    (contest,) = contests(rows)
    return f"{share(contest.ours.goodput)} / {share(contest.best.goodput)}"


def cells_behind(rows: Sequence[Row]) -> str:
    """In how many cells late binding is behind the best other policy."""
    found = contests(rows)
    return f"{sum(c.difference.mean < 0 for c in found)} of {len(found)}"


def interval(contest: Contest) -> str:
    """Return the 95 % interval of a difference."""
    low, high = contest.difference.low, contest.difference.high
    return f"{signed(low, 3)} to {signed(high, 3)}"


def smallest_lead(rows: Sequence[Row]) -> str:
    """Late binding's smallest lead over the best other policy of a cell not all in time."""
    found = closest(rows, 1)
    return f"{signed(found[0].difference.mean)} ({place(found[0].ours)})" if found else "-"


def closest(rows: Sequence[Row], most: int) -> list[Contest]:
    """Return the cells of late binding's smallest leads, without those that nobody can lose."""
    open_ones = [c for c in contests(rows) if c.best.goodput < ALL_IN_TIME]
    return sorted(open_ones, key=lambda c: c.difference.mean)[:most]


def tail_ratios(rows: Sequence[Row]) -> list[tuple[float, Row]]:
    """Return late binding's P99 TTFT over least_loaded's, cell by cell, with late binding's row."""
    other = {
        (row.workload, row.prefill, row.decode, row.load): row.ttft_p99_seconds
        for row in rows
        if row.policy == "least_loaded"
    }
    ratios = []
    for row in rows:
        theirs = other.get((row.workload, row.prefill, row.decode, row.load))
        if row.policy == OURS and theirs and row.ttft_p99_seconds is not None:
            ratios.append((row.ttft_p99_seconds / theirs, row))
    return ratios


def median_tail_ratio(rows: Sequence[Row]) -> str:
    """Median over cells of late binding's P99 TTFT over least_loaded's."""
    return f"{median(ratio for ratio, _ in tail_ratios(rows)):.2f}".removeprefix("0")


def largest_tail_ratio(rows: Sequence[Row]) -> str:
    """The largest such ratio, and where it is."""
    ratio, row = max(tail_ratios(rows), key=lambda pair: pair[0])
    return f"{ratio:.1f} ({row.workload} {field_of(row, 'pool')})"


def on_seeds(rows: Sequence[Row], seeds: Sequence[int]) -> Contest:
    """Return the contest of one cell on some of its seeds only.

    Raises:
        EvaluationError: The rows have not got these seeds.
    """
    cut: list[tuple[float, list[float], Row]] = []
    for row in rows:
        by_seed = dict(zip(row.seeds, row.goodput_by_seed, strict=True))
        if not set(seeds) <= set(by_seed):
            raise EvaluationError(f"{row.policy} has not run on {list(seeds)}")
        values = [by_seed[seed] for seed in seeds]
        cut.append((mean(values), values, row))
    (ours,) = [entry for entry in cut if entry[2].policy.startswith(OURS)]
    best = max((e for e in cut if e is not ours), key=lambda entry: entry[0])
    return Contest(ours[2], best[2], paired_difference(ours[1], best[1]))
