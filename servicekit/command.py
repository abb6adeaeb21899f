"""The life of a service's process, from its settings to its exit code."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from servicekit.errors import ChildFailed, SettingsInvalid, SteelyardError
from servicekit.logging import configure_logging
from servicekit.settings import ServiceSettings

BAD_SETTINGS, NOT_THERE = 2, 1

S = TypeVar("S", bound=ServiceSettings)
Run = Callable[[S], Coroutine[Any, Any, None]]
Runner = Callable[[Coroutine[Any, Any, None]], None]


@dataclass(frozen=True, slots=True)
class Service(Generic[S]):
    """What a service's process is made of, whichever command starts it."""

    settings: type[S]
    run: Run[S]
    """Serves until it is told to stop."""
    runner: Runner = field(default=asyncio.run)
    """Runs it on the event loop that serves it best."""


def service_main(
    service: Service[S], *, values: Mapping[str, Any] | None = None, print_config: bool = False
) -> int:
    """Run a service set by its environment, as `python -m …` and `steelyard …` do.

    What its operator can mend is one line on stderr, without a traceback.

    Args:
        service: What to run.
        values: Settings that win over the environment, by field name.
        print_config: Print the settings in place of serving.

    Returns:
        The exit code: 2 for settings that make no sense, 1 for what they name not being there.
    """
    try:
        settings = service.settings.load(**(values or {}))
        if print_config:
            sys.stdout.write(settings.print_config())
            return 0
        configure_logging(settings.log_level, settings.log_format)
        service.runner(service.run(settings))
    except SettingsInvalid as error:
        sys.stderr.write(f"steelyard: {error}\n")
        return BAD_SETTINGS
    except (ChildFailed, SteelyardError, OSError) as error:
        sys.stderr.write(f"steelyard: {error}\n")
        return NOT_THERE
    return 0
