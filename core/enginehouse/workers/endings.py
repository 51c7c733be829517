"""How a worker ended, in words, and whether that can be blamed on what it was doing.

A crash ends a process with a signal of its own (SIGSEGV, SIGABRT, SIGBUS) or with an exit code. SIGKILL always comes
from somewhere else: from the server itself when the worker hangs, from the system when memory runs out, from a person
or a service manager. Only the last has nothing to do with the worker; it is left when the others are ruled out.
"""

from __future__ import annotations

import signal
from pathlib import Path

from attrs import frozen

__all__ = ["Ending", "count_memory_kills", "describe_exit", "ending_of"]

_COUNTS = Path("/proc/vmstat")


@frozen
class Ending:
    """The end of a worker.

    Attributes:
        text: what happened.
        is_from_outside: somebody killed it who is neither this server nor a system that was out of memory.
    """

    text: str
    is_from_outside: bool = False


def ending_of(returncode: int, num_memory_kills: int | None, *, is_own: bool) -> Ending:
    """The end of a process.

    Args:
        returncode: as ``subprocess`` gives it; negative is a signal.
        num_memory_kills: how many processes the system has killed for want of memory since this one was started; None
            is not known.
        is_own: this server has killed it.
    """
    is_from_outside = returncode == -signal.SIGKILL and num_memory_kills == 0 and not is_own
    return Ending(describe_exit(returncode, num_memory_kills), is_from_outside)


def describe_exit(returncode: int, num_memory_kills: int | None = None) -> str:
    """How a process ended, in words; the arguments are those of :func:`ending_of`."""
    if returncode >= 0:
        return f"the worker process exited with code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = ""
    if name == "SIGKILL":
        by_someone = " (killed by someone; the system was not out of memory)"
        hint = by_someone if num_memory_kills == 0 else " (out of memory, or killed by someone)"
    return f"the worker process was ended by {name}{hint}"


def count_memory_kills() -> int | None:
    """Processes that the system has killed for want of memory since it started, in containers too; None: not known."""
    try:
        for line in _COUNTS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):  # another system than Linux
        pass
    return None
