"""The life of a service's process, from its settings to its exit code."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from servicekit.errors import SettingsInvalid, SteelyardError
from servicekit.logging import configure_logging
from servicekit.settings import ServiceSettings

S = TypeVar("S", bound=ServiceSettings)
Run = Callable[[S], Coroutine[Any, Any, None]]


def serve(settings: S, run: Run[S], *, print_config: bool = False) -> None:
    """Print the settings, or set logging up and run the service until it ends."""
    if print_config:
        sys.stdout.write(settings.print_config())
        return
    configure_logging(settings.log_level, settings.log_format)
    asyncio.run(run(settings))


def service_main(kind: type[S], run: Run[S], arguments: Sequence[str]) -> int:
    """Run a service set by its environment alone, as `python -m …` does.

    What its operator can mend is one line on stderr, without a traceback.

    Returns:
        The exit code: 2 for settings that make no sense, 1 for what they name not being there.
    """
    try:
        serve(kind.load(), run, print_config="--print-config" in arguments)
    except SettingsInvalid as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except (SteelyardError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
