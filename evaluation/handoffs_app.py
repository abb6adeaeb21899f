"""`steelyard evaluate handoffs`: how many steps a hand-off takes on paced real engines."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from enginemodel.model import NOTICE_SHARE, handoff_seconds
from enginemodel.profiles import REFERENCE
from evaluation.errors import EvaluationError
from evaluation.handoff_steps import Handoff, cut_out, explain, step_counts
from localcluster.pace_records import steps_by_engine

SHARES = (0.0, 0.05, NOTICE_SHARE, 0.25, 0.5, 0.75, 1.0)
WIDTH = 120


class JournalRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed of a request's row in the router's journal; seconds are engine seconds."""

    arrived_unix: float
    decode_id: str = ""
    decode_sent_seconds: float | None = None
    ttft_seconds: float | None = None
    prompt_tokens: int = 0
    attempts: int = 1


def handoffs(
    directory: Annotated[Path, Parameter(help="Of the cluster: its journal and step records.")],
    *,
    dilation: Annotated[float, Parameter(help="That the cluster had.")] = 3.0,
    way_ms: Annotated[float, Parameter(help="From router to vLLM's scheduler, real ms.")] = 7.0,
) -> int:
    """Count the steps from hand-off to first token and say when pulls must have been noticed.

    Args:
        directory: Of the cluster: `router.jsonl` and `engines/*.steps.jsonl` of the reference
            profile's engines.
        dilation: Real seconds an engine second.
        way_ms: From the router to vLLM's scheduler, real milliseconds.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        found = read_handoffs(directory, dilation)
    except EvaluationError as error:
        console.print(f"[red]error:[/red] {error}")
        return 2
    console.print(counts_table(found))
    console.print(shares_table(found, way_ms / 1e3))
    back_ms = 1e3 * median(handoff.way_back_seconds for handoff in found)
    console.print(
        f"{len(found)} hand-offs to busy engines; way back {back_ms:.1f} ms (median, real)"
    )
    return 0


def read_handoffs(directory: Path, dilation: float) -> list[Handoff]:
    """Read journal and step records of a paced cluster.

    Raises:
        EvaluationError: Something is not there, or no hand-off met a busy engine.
    """
    journal = directory / "router.jsonl"
    if not journal.is_file():
        raise EvaluationError(f"{journal}: no such file; `evaluate --backend paced` leaves one")
    steps = steps_by_engine(directory)
    ends = {name: [row.end_unix for row in rows] for name, rows in steps.items()}
    carried = {name: [row.carried for row in rows] for name, rows in steps.items()}
    found = []
    for row in _rows(journal):
        if row.decode_sent_seconds is None or row.ttft_seconds is None or row.attempts != 1:
            continue
        transfer = handoff_seconds(
            REFERENCE.constants, row.prompt_tokens, REFERENCE.kv_bytes_per_token
        )
        handoff = cut_out(
            ends.get(row.decode_id, []),
            carried.get(row.decode_id, []),
            sent_at=row.arrived_unix + dilation * row.decode_sent_seconds,
            token_at=row.arrived_unix + dilation * row.ttft_seconds,
            transfer_seconds=dilation * transfer,
        )
        if handoff is not None:
            found.append(handoff)
    if not found:
        raise EvaluationError(f"{directory}: no hand-off to a busy engine in journal and records")
    return found


def _rows(journal: Path) -> list[JournalRow]:
    decoder = msgspec.json.Decoder(JournalRow)
    lines = journal.read_bytes().splitlines(keepends=True)
    return [
        decoder.decode(line)
        for line in lines
        if line.endswith(b"\n") and line.startswith(b'{"type":"request"')
    ]


def counts_table(found: Sequence[Handoff]) -> Table:
    """Return how many step ends lie between, a row for each length of the transfer."""
    counts = step_counts(found)
    columns = sorted({steps for row in counts.values() for steps in row})
    table = Table(title="step ends until the first token", box=None, header_style="bold")
    for column in ("transfer, steps", "hand-offs", *map(str, columns)):
        table.add_column(column, justify="right")
    for whole, row in counts.items():
        cells = (str(row[steps] or "") for steps in columns)
        table.add_row(f"{whole}-{whole + 1}", str(row.total()), *cells)
    return table


def shares_table(found: Sequence[Handoff], way_seconds: float) -> Table:
    """Return how well each time of looking explains them."""
    table = Table(title="when engines look for pulls", box=None, header_style="bold")
    for column in ("share of the step", "token in the expected step", "expected - real, steps"):
        table.add_column(column, justify="right")
    for share in SHARES:
        row = explain(found, share, way_seconds=way_seconds)
        table.add_row(f"{share:.2f}", f"{100 * row.same:.0f} %", f"{row.mean_off:+.2f}")
    return table
