"""Reads what paced engines wrote down."""

from math import inf
from pathlib import Path

import msgspec

from localcluster.pace_check import MachineLoad, StepRow, Validity, judge

_SUFFIX = ".steps.jsonl"
_DECODER = msgspec.json.Decoder(StepRow)


def read_steps(path: Path, since_unix: float, until_unix: float) -> list[StepRow]:
    """Return an engine's steps that ended between two times; the line under way is left out."""
    rows = [
        _DECODER.decode(line)
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]
    return [row for row in rows if since_unix <= row.end_unix <= until_unix]


def steps_by_engine(
    directory: Path, since_unix: float = 0.0, until_unix: float = inf
) -> dict[str, list[StepRow]]:
    """Return the steps of a cluster's engines that ended between two times, by instance.

    Args:
        directory: The cluster's, as in its spec.
        since_unix: Steps that ended before do not count.
        until_unix: Nor do those that ended after.
    """
    return {
        path.name.removesuffix(_SUFFIX): read_steps(path, since_unix, until_unix)
        for path in sorted((directory / "engines").glob(f"*{_SUFFIX}"))
    }


def read_validity(
    directory: Path, since_unix: float, until_unix: float, machine: MachineLoad | None = None
) -> Validity:
    """Judge what ran on a cluster between two times.

    Args:
        directory: The cluster's, as in its spec.
        since_unix: Steps that ended before do not count.
        until_unix: Nor do those that ended after.
        machine: From a `MachineWatch` over the same time.
    """
    return judge(steps_by_engine(directory, since_unix, until_unix), machine)
