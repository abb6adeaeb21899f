"""structlog, and the standard library's logging through it: colours on a terminal, else JSON."""

import logging
import sys
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import Processor

LogFormat = Literal["auto", "console", "json"]


def configure_logging(
    level: str = "INFO", log_format: LogFormat = "auto", stream: TextIO | None = None
) -> None:
    """Set the process's logging up; call once, in an app.py.

    Args:
        level: lowest level written, by name.
        log_format: "auto" takes colours where `stream` is a terminal and JSON elsewhere.
        stream: where lines go; standard output by default.

    Raises:
        ValueError: no such level.
    """
    stream = stream or sys.stdout
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"no such log level: {level}")
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if console
        else [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer(_to_json)]
    )
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING) if number > logging.DEBUG else number)


def _to_json(value: Any, **_: Any) -> str:
    """Serialize a line; what JSON does not know is written as its repr."""
    return msgspec.json.encode(value, enc_hook=repr).decode()
