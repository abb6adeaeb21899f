"""Rows of result files, found by what they are of."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from evaluation.errors import MissingResultsError
from evaluation.rows import Row

_BASE = re.compile(r"[ ,:(]")

Where: TypeAlias = Mapping[str, object]
"""What a row has to be: see `field_of`; `file` names the result file in place of the table's."""


def field_of(row: Row, name: str) -> object:
    """Return a field of a row, or one of what tables say of it besides.

    `pool` is like 2P4D, `engines` counts both kinds, `seats` and `kv_tokens` are what a decode
    engine has where that is not the profile's own. A label, as in `late_binding (h100)`, has a
    `base` and a `variant`.
    """
    if name == "pool":
        return f"{row.prefill}P{row.decode}D"
    if name == "engines":
        return row.prefill + row.decode
    if name == "seats":
        return row.overrides.get("max_num_seqs")
    if name == "kv_tokens":
        return row.overrides.get("kv_total_tokens")
    if name in ("base", "variant"):
        base = _BASE.split(row.policy, maxsplit=1)[0]
        return base if name == "base" else row.policy.removeprefix(base).strip(" ,:()")
    value: object = getattr(row, name)
    return value


class Results:
    """Result files of a folder, read when they are first asked for.

    Args:
        folder: Holds NAME.jsonl, one row a line.
    """

    _suffix = ".jsonl"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, list[Row]] = {}

    def names(self) -> list[str]:
        """Return the names of all files of rows."""
        paths = sorted(self._folder.glob("*.jsonl"))
        return [path.stem for path in paths if not path.stem.endswith(".seeds")]

    def file(self, name: str) -> list[Row]:
        """Return all rows of a file.

        Raises:
            MissingResultsError: There is no such file.
        """
        if name not in self._files:
            path = self._folder / f"{name}{self._suffix}"
            if not path.is_file():
                raise MissingResultsError(f"no {path}")
            self._files[name] = self._read(name, path)
        return self._files[name]

    def _read(self, name: str, path: Path) -> list[Row]:  # noqa: ARG002  others keep more by name
        """Return the rows of a file that is there."""
        decoder = msgspec.json.Decoder(Row)
        return [decoder.decode(line) for line in path.read_bytes().splitlines()]

    def select(self, files: Sequence[str], where: Where) -> list[Row]:
        """Return the rows of some files that are as wanted.

        Raises:
            MissingResultsError: A file is not there.
        """
        wanted = {name: value for name, value in where.items() if name != "file"}
        files = [str(where["file"])] if "file" in where else files
        return [
            row
            for file in files
            for row in self.file(file)
            if all(field_of(row, name) == value for name, value in wanted.items())
        ]

    def one(self, file: str, **where: object) -> Row:
        """Return the row that is as wanted.

        Raises:
            MissingResultsError: There is none, or more than one.
        """
        rows = self.select([file], where)
        if len(rows) != 1:
            raise MissingResultsError(f"{file} has {len(rows)} rows of {where}")
        return rows[0]
