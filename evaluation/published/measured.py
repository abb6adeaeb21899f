"""Runs on real engines, kept one by one in seeds files, as rows of one run each."""

from pathlib import Path

from evaluation.cells import SeedResult
from evaluation.published.results import Results
from evaluation.rows import Row, make_row
from evaluation.runner import ResultFile


class MeasuredResults(Results):
    """Seeds files of a folder; every run is a row.

    Args:
        folder: Holds NAME.seeds.jsonl.
    """

    _suffix = ".seeds.jsonl"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._runs: dict[str, list[SeedResult]] = {}

    def names(self) -> list[str]:
        """Return the names of all seeds files."""
        paths = sorted(self._folder.glob(f"*{self._suffix}"))
        return [path.name.removesuffix(self._suffix) for path in paths]

    def _read(self, name: str, path: Path) -> list[Row]:
        """Return all runs of a file, by cell and seed."""
        found = ResultFile(path)
        self._runs[name] = list(found.finished.values())
        return [
            make_row(found.cells[key], [result])
            for (key, _), result in sorted(found.finished.items())
        ]

    def runs(self, name: str) -> list[SeedResult]:
        """Return a file's runs with what is known of their pace.

        Raises:
            MissingResultsError: There is no such file.
        """
        self.file(name)
        return self._runs[name]
