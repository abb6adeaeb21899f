"""Request traces that others published, and our own journal, read into one form.

Known formats: Azure LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake
(JSONL: timestamp in milliseconds, input_length, output_length), BurstGPT (CSV: Timestamp in
seconds, Request tokens, Response tokens, optionally Session ID), and the router's journal (JSONL:
rows of type "request" with arrived_unix, prompt_tokens, completion_tokens, slo_class, tenant).
"""

import csv
import json
from collections.abc import Callable, Container, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

from evaluation.errors import TraceFormatError

Row = TypeVar("Row")


class TraceRow(NamedTuple):
    """One request of a trace; classes and tenants only where the trace has them."""

    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    slo_class: str = ""
    tenant: str = ""
    session: int = 0


def _azure(row: Mapping[str, str]) -> TraceRow:
    # Seven decimals of a second, one more than the parser takes.
    stamp = row["TIMESTAMP"].strip()[:26]
    at = datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp()
    return TraceRow(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _burstgpt(row: Mapping[str, str]) -> TraceRow:
    session = row.get("Session ID") or "0"
    return TraceRow(
        float(row["Timestamp"]),
        int(row["Request tokens"]),
        int(row["Response tokens"]),
        session=int(float(session)),
    )


def _mooncake(row: Mapping[str, object]) -> TraceRow:
    return TraceRow(
        float(str(row["timestamp"])) / 1000.0,
        int(str(row["input_length"])),
        int(str(row["output_length"])),
    )


def _journal(row: Mapping[str, object]) -> TraceRow:
    return TraceRow(
        float(str(row["arrived_unix"])),
        int(str(row["prompt_tokens"])),
        int(str(row["completion_tokens"])),
        str(row.get("slo_class", "")),
        str(row.get("tenant", "")),
    )


CSV_FORMATS: tuple[tuple[str, Callable[[Mapping[str, str]], TraceRow]], ...] = (
    ("ContextTokens", _azure),
    ("Request tokens", _burstgpt),
)
JSONL_FORMATS: tuple[tuple[str, Callable[[Mapping[str, object]], TraceRow]], ...] = (
    ("input_length", _mooncake),
    ("arrived_unix", _journal),
)


def read_trace(path: Path) -> list[TraceRow]:
    """Read a trace, in order of time, the first request at 0; requests without output are left out.

    Raises:
        TraceFormatError: The format is not known, a row cannot be read, or nothing is left.
    """
    rows: list[TraceRow] = []
    read = 0
    try:
        for row in _rows(path):
            read += 1
            if row.prompt_tokens > 0 and row.output_tokens > 0:
                rows.append(row)
    except TraceFormatError:
        raise
    except (KeyError, ValueError) as error:
        raise TraceFormatError(f"{path}, row {read + 1}: {error!r}") from error
    if not rows:
        raise TraceFormatError(f"{path}: no request with a prompt and an output")
    rows.sort()
    first = rows[0].at_seconds
    return [row._replace(at_seconds=row.at_seconds - first) for row in rows]


def _rows(path: Path) -> Iterator[TraceRow]:
    with path.open(newline="", encoding="utf-8") as file:
        if path.suffix == ".csv":
            reader = csv.DictReader(file)
            make = _format(path, reader.fieldnames or (), CSV_FORMATS)
            for row in reader:
                yield make(row)
            return
        make_json = None
        for line in file:
            if not line.strip():
                continue
            record = json.loads(line)
            if record.get("type", "request") != "request":
                continue
            if make_json is None:
                make_json = _format(path, record, JSONL_FORMATS)
            yield make_json(record)


def _format(
    path: Path, columns: Container[str], formats: tuple[tuple[str, Callable[[Row], TraceRow]], ...]
) -> Callable[[Row], TraceRow]:
    for column, make in formats:
        if column in columns:
            return make
    raise TraceFormatError(f"{path}: none of the columns {[name for name, _ in formats]}")
