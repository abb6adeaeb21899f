"""Linux process plumbing: nobody outlives the one who started it.

A vLLM server is a tree. SIGKILL on the API process alone leaves its engine core running: 500 MB, the
NIXL side channel still answering. Three kernel features together prevent it here:

- every server leads a session, so one `killpg` reaches all of it;
- every process asks for SIGKILL when the one that forked it dies (`die_with_parent`), so SIGKILL on
  the launcher brings the API processes down and those bring their engine cores down;
- the launcher is a child subreaper, so that orphaned engine cores become its children and "the group
  is gone" is a fact that it can wait for before it starts a successor on the same ports.
"""

import ctypes
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel for `signal_number` when the parent dies; exit at once if it already has.

    The kernel means the *thread* that forked, not the process: fork from a thread that lives as long
    as the parent does.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def tie_forks_to_their_parent() -> None:
    """Make every later fork, here and in descendants, die with the process that forked it.

    Forks from other threads than the main one are left alone, see `die_with_parent`. Subprocesses
    that are executed, not forked, do not pass here.
    """
    forker_pid = [0]

    def before() -> None:
        in_main = threading.current_thread() is threading.main_thread()
        forker_pid[0] = os.getpid() if in_main else 0

    def in_child() -> None:
        if forker_pid[0]:
            die_with_parent(forker_pid[0])

    os.register_at_fork(before=before, after_in_child=in_child)


@contextmanager
def scratch_directory() -> Iterator[None]:
    """Point TMPDIR at a directory that goes when the process does.

    Every server leaves sockets and a file store in the temporary directory, killed or not.
    """
    with tempfile.TemporaryDirectory(prefix="steelyard-", ignore_cleanup_errors=True) as path:
        os.environ["TMPDIR"] = path
        tempfile.tempdir = None  # forget the cached answer
        yield


def group_exists(group_id: int) -> bool:
    """Whether any process of the group is left, zombies included."""
    try:
        os.killpg(group_id, 0)
    except ProcessLookupError:
        return False
    return True


def signal_group(group_id: int, signal_number: int) -> None:
    """Signal every process of a group; a group that is gone already is no error."""
    try:
        os.killpg(group_id, signal_number)
    except ProcessLookupError:
        return


def reap() -> dict[int, int]:
    """Collect every dead child: pid to exit code, negative for a signal as in subprocess."""
    dead: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return dead
        if pid == 0:
            return dead
        dead[pid] = os.waitstatus_to_exitcode(status)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
