"""One measurement with its aim."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured, how much it is, and how much it should be at most."""

    what: str
    value: float
    unit: str
    aim: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Value over aim; below 1 is within it."""
        return None if self.aim is None else self.value / self.aim


def show(title: str, rows: Sequence[Row]) -> None:
    """Print rows as a table."""
    table = Table(title=title, box=None, title_justify="left", header_style="bold")
    for name in ("what", "measured", "aim", "ratio", "note"):
        table.add_column(name, justify="left" if name in {"what", "note"} else "right")
    for row in rows:
        aim = "" if row.aim is None else f"{row.aim:g} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.what, f"{row.value:.4g} {row.unit}", aim, ratio, row.note)
    Console(width=120).print(table)
