"""Every request of every run of real processes, one JSON line each."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from evaluation.cells import Cell
from evaluation.scoring import finite
from simulator.values import Outcome


class RunJournal:
    """Writes a file a run into a folder; into none, nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def write(self, cell: Cell, seed: int, outcomes: Sequence[Outcome]) -> None:
        """Write one run's outcomes in order of arrival."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = sorted(outcomes, key=lambda outcome: outcome.arrival.number)
        lines = [msgspec.json.encode(_row(outcome)) for outcome in rows]
        path = self._folder / f"{cell.key()}-{seed}.jsonl"
        head = msgspec.json.encode({"cell": cell, "seed": seed})
        path.write_bytes(b"\n".join([head, *lines]) + b"\n")


def _row(outcome: Outcome) -> dict[str, object]:
    arrival = outcome.arrival
    return {
        "number": arrival.number,
        "at_seconds": arrival.at_seconds,
        "tenant": arrival.tenant,
        "slo_class": arrival.slo_class,
        "prompt_tokens": arrival.prompt_tokens,
        "output_tokens": arrival.output_tokens,
        "end": outcome.end.value,
        "ttft_seconds": finite(outcome.ttft_seconds),
        "tpot_seconds": finite(outcome.tpot_seconds),
        "prefill": outcome.prefill,
        "decode": outcome.decode,
    }
