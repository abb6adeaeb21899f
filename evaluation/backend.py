"""The seam between experiments and what they run on."""

from typing import Protocol

from evaluation.cells import Cell, SeedResult


class Backend(Protocol):
    """Runs one seed of one cell."""

    def run(self, cell: Cell, seed: int) -> SeedResult:
        """Return what came of it; the same cell and seed give the same requests on every backend."""
        ...
