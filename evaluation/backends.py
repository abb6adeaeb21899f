"""The backends by name, and what they are told."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from evaluation.backend import Backend
from evaluation.emulated import EmulatedBackend
from evaluation.errors import UnknownBackendError
from evaluation.paced import PacedBackend, PacedOptions
from evaluation.run_journal import RunJournal
from evaluation.simulated import SimulatedBackend

SIMULATED, EMULATED, PACED = "sim", "emulated", "paced"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """What backends on real processes are told.

    Attributes:
        dilation: Real seconds an engine second; 0 takes the backend's own: emulated 1, paced 3.
        journal: Folder for every request of every run; None keeps none.
        vllm_python: Python of the vLLM environment.
    """

    dilation: float = 0.0
    journal: Path | None = None
    vllm_python: Path = Path(".venv-vllm/bin/python")


def _emulated(options: BackendOptions, _stack: ExitStack) -> Backend:
    return EmulatedBackend(
        time_scale=1.0 / (options.dilation or 1.0), journal=RunJournal(options.journal)
    )


def _paced(options: BackendOptions, stack: ExitStack) -> Backend:
    paced = PacedOptions(dilation=options.dilation or 3.0, vllm_python=options.vllm_python)
    return PacedBackend(paced, stack, journal=RunJournal(options.journal))


BACKENDS: Mapping[str, Callable[[BackendOptions, ExitStack], Backend]] = MappingProxyType(
    {
        SIMULATED: lambda _options, _stack: SimulatedBackend(),
        EMULATED: _emulated,
        PACED: _paced,
    }
)


def make_backend(name: str, options: BackendOptions, stack: ExitStack) -> Backend:
    """Construct a backend by name; the stack ends what it holds.

    Raises:
        UnknownBackendError: There is none of that name.
    """
    backend = BACKENDS.get(name)
    if backend is None:
        raise UnknownBackendError(f"no backend {name!r}; there are {', '.join(BACKENDS)}")
    return backend(options, stack)
