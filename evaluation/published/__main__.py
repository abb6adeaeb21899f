"""Renews the tables of docs/results-simulator.md and docs/results.md: `python -m evaluation.published`."""

import sys
from pathlib import Path

import cyclopts
from rich.console import Console

from evaluation.errors import EvaluationError
from evaluation.published.document import rewrite
from evaluation.published.facts import listing
from evaluation.published.measured import MeasuredResults
from evaluation.published.results import Results
from evaluation.published.tables import BLOCKS as SIMULATED
from evaluation.published.tables_measured import BLOCKS as MEASURED


def main(
    *,
    results: Path = Path("out/simulator"),
    docs: Path = Path("docs"),
    check: bool = False,
    facts: bool = False,
) -> int:
    """Write the tables of the documents anew from result files.

    Args:
        results: Folder with NAME.jsonl of every run that `tools/simulate.sh` makes.
        docs: Folder of results-simulator.md, of results.md, and of the runs behind that one;
            tables stand between `<!-- table: NAME -->` and `<!-- end -->`.
        check: Write nothing; exit with 1 where a table is not as the results are.
        facts: Write nothing; print what the simulator's sentences state, heading by heading.
    """
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    found = Results(results)
    if facts:
        Console(soft_wrap=True, highlight=False, markup=False).print(listing(found))
        return 0
    documents = (
        (docs / "results-simulator.md", SIMULATED, found),
        (docs / "results.md", MEASURED, MeasuredResults(docs / "results")),
    )
    stale = False
    for document, blocks, of in documents:
        text = document.read_text("utf-8")
        try:
            renewed = rewrite(text, blocks, of)
        except EvaluationError as error:
            console.print(f"error: {document}: {error}")
            return 2
        for name, why in renewed.missing.items():
            console.print(f"left as it is: {name} ({why})")
        for name in renewed.stale:
            console.print(f"{'stale' if check else 'renewed'}: {name}")
        stale = stale or bool(renewed.stale)
        if not check:
            document.write_text(renewed.text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    app = cyclopts.App(name="evaluation.published", help=main.__doc__)
    app.default(main)
    sys.exit(app())
