"""Runs experiments: the function behind `steelyard evaluate`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Annotated

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dataplane.core.schedulers import SCHEDULERS
from evaluation.backends import PACED, SIMULATED, BackendOptions, make_backend
from evaluation.errors import EvaluationError
from evaluation.experiments.base import WORKLOADS, Context, SaturationRate, parse_variant
from evaluation.experiments.registry import find_experiment
from evaluation.report import write_report
from evaluation.rows import Row
from evaluation.runner import ResultFile, run_cells
from evaluation.saturation import Saturation
from evaluation.tables import print_rows
from localcluster.errors import ClusterError

REPORTING_SEEDS_FROM = 31
PLAIN_WIDTH = 150
NO_OPTIONS = BackendOptions()


def run(
    experiment: str,
    *,
    policies: Sequence[str] = (),
    seeds: Sequence[int] = tuple(range(REPORTING_SEEDS_FROM, REPORTING_SEEDS_FROM + 4)),
    backend: str = SIMULATED,
    options: BackendOptions | None = None,
    jobs: int = 1,
    seconds: float = 90.0,
    workloads: Sequence[str] = (),
    quick: bool = False,
    results: Path | None = None,
    cache: Path | None = None,
    saturation: SaturationRate | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Run an experiment and return its rows.

    Args:
        experiment: Its name.
        policies: `name` or `name:setting=value`; all that there are by default.
        seeds: Of every cell.
        backend: By name.
        options: What it is told.
        jobs: Processes.
        seconds: Of arrivals a cell.
        workloads: Of experiments that go over several; all by default.
        quick: A part of the cells.
        results: JSONL of finished seeds; what is in there is not run again.
        cache: JSON file of saturation rates.
        saturation: Finds saturation rates, in place of searching for them.
        progress: Called with (done, total).
        tell: Told what takes long besides.

    Raises:
        EvaluationError: Something named is not there.
    """
    make_cells = find_experiment(experiment)
    context = Context(
        variants=[parse_variant(text) for text in policies or SCHEDULERS],
        saturation=saturation or Saturation(cache, tell=tell),
        seconds=seconds,
        workloads=workloads or WORKLOADS,
        quick=quick,
    )
    if backend == PACED and jobs != 1:
        raise EvaluationError("paced engines run one cell at a time: leave --jobs out")
    with ExitStack() as stack:
        return run_cells(
            make_cells(context),
            seeds,
            make_backend(backend, options or NO_OPTIONS, stack),
            jobs=jobs,
            results=ResultFile(results),
            shuffle=Random(seeds[0]) if backend == PACED else None,
            progress=progress,
        )


def evaluate(
    experiment: str,
    *,
    backend: str = "sim",
    policies: str = "",
    seeds: int = 4,
    first_seed: int = REPORTING_SEEDS_FROM,
    jobs: int = 1,
    seconds: float = 90.0,
    workloads: str = "",
    quick: bool = False,
    json: Path | None = None,
    resume: Path | None = None,
    report: Path | None = None,
    cache: Path = Path(".steelyard/saturation.json"),
    options: Annotated[BackendOptions, Parameter(name="*")] = NO_OPTIONS,
    bar: bool = True,
) -> int:
    """Run an experiment on simulated or real processes, compare policies, write a report.

    Args:
        experiment: By name; a wrong one is answered with all that there are.
        backend: sim (virtual time), emulated (real processes), paced (real vLLM at a GPU's pace).
        policies: Comma-separated, each with settings as name:setting=value; all by default.
        seeds: How many.
        first_seed: From this one on; those below 31 are for tuning.
        jobs: Processes.
        seconds: Of arrivals in a cell.
        workloads: Comma-separated, of experiments that go over several; all by default.
        quick: A part of the cells.
        json: Rows go here, one a line.
        resume: Keeps finished seeds, which are not run again; else beside the rows.
        report: A folder for report.html, report.md and the plots.
        cache: Saturation rates that were searched for.
        options: Of real processes.
        bar: Show progress.
    """
    console = Console(stderr=True)
    try:
        with _progress(console, experiment, shown=bar) as progress:
            rows = run(
                experiment,
                policies=_words(policies),
                seeds=range(first_seed, first_seed + seeds),
                backend=backend,
                options=options,
                jobs=jobs,
                seconds=seconds,
                workloads=_words(workloads),
                quick=quick,
                results=resume or (json.with_suffix(".seeds.jsonl") if json else None),
                cache=cache,
                progress=progress,
                tell=console.log,
            )
    except (EvaluationError, ClusterError) as error:
        console.print(f"[red]error:[/red] {error}")
        return 2
    publish(experiment, rows, json, report)
    return 0


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def publish(experiment: str, rows: Sequence[Row], json: Path | None, report: Path | None) -> None:
    """Print rows; write them and a report where these are wanted."""
    print_rows(rows, Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH))
    if json is not None:
        write_rows(rows, json)
    if report is not None:
        write_report(experiment, rows, report)


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write rows, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(row, order="deterministic") for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")


@contextmanager
def _progress(
    console: Console, experiment: str, *, shown: bool
) -> Iterator[Callable[[int, int], None]]:
    """Give a function that is told (done, total) and, if wanted, shows a bar."""
    if not shown:
        yield lambda _done, _total: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task(experiment, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


app = cyclopts.App(name="evaluate", help="Run experiments.")
app.default(evaluate)
app.command("evaluation.fidelity_app:fidelity", help="Compare real engines with the simulator.")
app.command("evaluation.handoffs_app:handoffs", help="Count the steps that a hand-off takes.")
