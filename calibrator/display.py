"""Shows a running calibration: a bar over the budget with the current fit, and the table at the end."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from calibrator.campaign import Plan
from calibrator.cluster import Target
from calibrator.profile import ProfileFit

_SHORT = {
    "p0_seconds": ("p0", 1e3, "ms"),
    "p1_seconds": ("p1", 1e3, "ms"),
    "p2_seconds_per_token": ("p2", 1e6, "us"),
    "p3_seconds_per_token_squared": ("p3", 1e9, "ns"),
    "d0_seconds": ("d0", 1e3, "ms"),
    "d1_seconds_per_sequence": ("d1", 1e6, "us"),
    "d2_seconds_per_kv_token": ("d2", 1e9, "ns"),
    "h0_seconds": ("h0", 1e3, "ms"),
    "handoff_bytes_per_second": ("bw", 1e-9, "GB/s"),
}


class Display:
    """`with Display(console) as display:` draws until the block ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} s"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[fit]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("waiting", total=None, fit="", start=False)
        self._stage = "starting"

    def __enter__(self) -> Self:
        """Start drawing."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop drawing."""
        self._bar.stop()

    def begin(self, ready: Sequence[Target], plan: Plan) -> None:
        """Say what is measured."""
        names = ", ".join(target.instance_id for target in ready)
        self._say(f"{len(ready)} READY instances: {names}")
        self._bar.update(self._task, total=plan.budget_seconds)
        self._bar.start_task(self._task)

    def announce(self, stage: str) -> None:
        """Say what begins."""
        self._stage = stage
        self._bar.update(self._task, description=stage)
        self._say(f"{stage} …")

    def fitted(self, profile: str, found: ProfileFit | None, observations: int) -> None:
        """Show the current fit."""
        if found is None:
            return
        text = f"{profile}: {observations} points, {summary(found)}"
        elapsed = self._bar.tasks[0].elapsed or 0.0
        self._bar.update(self._task, completed=elapsed, fit=text)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def summary(found: ProfileFit) -> str:
    """Return the measured constants in one line, with their relative errors."""
    parts = []
    for name, constant in found.measured.items():
        label, factor, unit = _SHORT[name]
        error = f"±{constant.relative_error:.0%}" if constant.relative_error < 10 else "?"
        parts.append(f"{label} {constant.value * factor:.3g} {unit} {error}")
    return ", ".join(parts)
