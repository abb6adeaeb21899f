"""One JSON line a step, written at once: a reader never waits for a buffer of an idle engine.

| field | |
|--|--|
| `end_unix` | when the step ended |
| `modelled_seconds`, `real_seconds`, `late_seconds`, `busy_seconds`, `carried` | as in `PacedStep`, real seconds |
| `sequences`, `kv_tokens`, `chunks` | its shape; chunks are [tokens, context tokens] |
| `queue_wait_seconds` | how long the engine's thread waited for a core since the last record |
| `pulls_held` | hand-offs that have arrived and are held back |

A line costs about 10 microseconds.
"""

import json
import os
from pathlib import Path

from steelyard_enginekit.paced.pacer import PacedStep


class StepRecord:
    """Appends to the record of one engine."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(
        self, step: PacedStep, *, end_unix: float, queue_wait_seconds: float, pulls_held: int
    ) -> None:
        """Append a step."""
        line = {
            "end_unix": round(end_unix, 6),
            "modelled_seconds": round(step.modelled_seconds, 6),
            "real_seconds": round(step.real_seconds, 6),
            "late_seconds": round(step.late_seconds, 6),
            "busy_seconds": round(step.busy_seconds, 6),
            "carried": step.carried,
            "sequences": step.shape.sequences,
            "kv_tokens": step.shape.kv_tokens,
            "chunks": step.shape.chunks,
            "queue_wait_seconds": round(queue_wait_seconds, 6),
            "pulls_held": pulls_held,
        }
        os.write(self._descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
