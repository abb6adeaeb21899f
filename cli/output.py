"""What commands write: errors as one line, tables and JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import grpc
from rich.console import Console
from rich.table import Table

from calibrator.errors import CalibrationError
from dataplane.core.errors import InvalidSettingError, UnknownPolicyError
from localcluster.errors import ClusterError, PoolsError
from servicekit.errors import ChildFailed, SettingsInvalid, SteelyardError
from servicekit.status import from_rpc_error

Output = Literal["table", "json"]
_NOBODY = "failed to connect to all addresses"
"""How gRPC begins to say that nobody listens there."""
_PIPE_WIDTH = 320
_OURS = (
    CalibrationError,
    ChildFailed,
    ClusterError,
    InvalidSettingError,
    OSError,
    PoolsError,
    SettingsInvalid,
    SteelyardError,
    UnknownPolicyError,
)


def fail(error: Exception) -> NoReturn:
    """Explain an error on stderr and exit with 1; what nobody foresaw keeps its traceback.

    Raises:
        SystemExit: Always, for errors that have a meaning.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        remote = from_rpc_error(error)
        if remote.message.startswith(_NOBODY):
            where = remote.message.rpartition("UNKNOWN: ")[2]
            sys.exit(f"steelyard: {remote.reason}: {where}; bring a cluster up, or say where it is")
        lines = [f"steelyard: {remote.reason}: {remote.message}"]
        lines += [f"  {v.field}: {v.description}" for v in remote.violations]
        sys.exit("\n".join(lines))
    if isinstance(error, _OURS):
        sys.exit(f"steelyard: {error}")
    raise error


def show(rows: Sequence[Mapping[str, Any]], output: Output) -> None:
    """Write rows as a table or as a JSON list."""
    if output == "json":
        print(json.dumps([dict(row) for row in rows], indent=2))
        return
    if not rows:
        print("nothing there")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, value in rows[0].items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    # Piped output is for other programs: it is never cut to a terminal's width.
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
