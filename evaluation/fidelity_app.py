"""`steelyard evaluate fidelity`: what runs on real engines say of the simulator."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import track
from rich.table import Table

from evaluation.backend import Backend
from evaluation.cells import Cell, SeedResult
from evaluation.errors import EvaluationError
from evaluation.fidelity import Agreement, Runs, compare, dilated_surroundings
from evaluation.runner import ResultFile
from evaluation.simulated import SimulatedBackend

WIDTH = 140


def fidelity(
    paced: Annotated[list[Path], Parameter(help="Seeds files of paced runs.", negative=())],
    *,
    emulated: Annotated[tuple[Path, ...], Parameter(help="Seeds files of emulated runs.")] = (),
    dilation: Annotated[float, Parameter(help="That the paced runs had.")] = 3.0,
    json: Annotated[Path | None, Parameter(help="Residuals go here.")] = None,
    with_invalid: Annotated[bool, Parameter(help="Also use runs that were not valid.")] = False,
) -> int:
    """Compare runs on real engines with the simulator, and with emulated engines where there are.

    Args:
        paced: The `.seeds.jsonl` files of paced runs.
        emulated: Those of emulated runs of the same cells.
        dilation: Real seconds an engine second in the paced runs.
        json: A file for all residuals.
        with_invalid: Also use runs whose pace was not kept; the report counts them.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        real = load_runs(paced, with_invalid=with_invalid)
        played = load_runs(emulated, with_invalid=True)
    except EvaluationError as error:
        console.print(f"[red]error:[/red] {error}")
        return 2
    invalid = sum(not result.valid for _, result in real.values())
    backends: dict[str, Backend] = {
        "sim": SimulatedBackend(),
        "sim, this machine's surroundings": SimulatedBackend(dilated_surroundings(dilation)),
        "the same, pulls seen half a step in": SimulatedBackend(
            dilated_surroundings(dilation, notice_share=0.5)
        ),
        "the same, pulls seen at a step's end": SimulatedBackend(
            dilated_surroundings(dilation, notice_share=1.0)
        ),
    }
    agreements = {
        name: compare(real, simulated(real, backend, name)) for name, backend in backends.items()
    }
    agreements["emulated engines"] = compare(real, played)
    found = {name: agreement for name, agreement in agreements.items() if agreement is not None}
    for name, agreement in found.items():
        console.print(residual_table(name, agreement))
    console.print(summary(found))
    console.print(f"{len(real)} runs, {invalid} of them not valid")
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0


def load_runs(paths: Sequence[Path], *, with_invalid: bool) -> Runs:
    """Read seeds files.

    Raises:
        EvaluationError: A file is not there, or holds no run that may be used.
    """
    runs: dict[tuple[str, int], tuple[Cell, SeedResult]] = {}
    for path in paths:
        if not path.is_file():
            raise EvaluationError(f"{path}: no such file; --resume or --json of evaluate names it")
        file = ResultFile(path)
        usable = {
            key: (file.cells[key[0]], result)
            for key, result in file.finished.items()
            if with_invalid or result.valid
        }
        if not usable:
            raise EvaluationError(f"{path}: no valid run; --with-invalid uses the others")
        runs |= usable
    return runs


def simulated(real: Runs, backend: Backend, name: str) -> Runs:
    """Play the same cells and seeds on the simulator."""
    console = Console(stderr=True)
    return {
        key: (cell, backend.run(cell, result.seed))
        for key, (cell, result) in track(
            list(real.items()), description=name, console=console, transient=True
        )
    }


def residual_table(name: str, agreement: Agreement) -> Table:
    """Return a backend's residuals, a row a run."""
    table = Table(title=f"{name} minus real engines", box=None, header_style="bold")
    for column in ("workload", "pool", "load", "policy", "seed"):
        table.add_column(column)
    for column in ("real", "goodput", "TTFT P50 ms", "P99 ms", "TPOT P99 ms"):
        table.add_column(column, justify="right")
    for row in agreement.residuals:
        table.add_row(
            row.cell.workload,
            row.cell.pool.name,
            f"{row.cell.load:g}",
            row.cell.label,
            str(row.seed),
            f"{row.real:.3f}",
            f"{row.goodput:+.3f}",
            *(
                "-" if value is None else f"{1e3 * value:+.1f}"
                for value in (row.ttft_p50_seconds, row.ttft_p99_seconds, row.tpot_p99_seconds)
            ),
        )
    return table


def summary(agreements: dict[str, Agreement]) -> Table:
    """Return how each backend agrees, a row a backend."""
    table = Table(title="agreement with real engines", box=None, header_style="bold")
    table.add_column("backend")
    for column in ("runs", "mean |goodput|", "worst", "bias", "Kendall tau", "same winner"):
        table.add_column(column, justify="right")
    for name, found in agreements.items():
        table.add_row(
            name,
            str(len(found.residuals)),
            f"{found.mean_absolute:.3f}",
            f"{found.worst:.3f}",
            f"{found.bias:+.3f}",
            "-" if found.tau is None else f"{found.tau:.2f}",
            "{} of {}".format(*found.same_winner),
        )
    return table
