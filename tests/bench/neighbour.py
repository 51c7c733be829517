"""A neighbour on the machine: one process that does nothing but occupy one core."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from .machine import on_cores, usable_cores

__all__ = ["busy_neighbour"]

# The alarm ends the loop even when the benchmark was killed and could not.
_BUSY_LOOP = "import signal; signal.alarm(900)\nwhile True: pass"


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """A busy loop, pinned to the last of this machine's cores, for as long as the context lasts."""
    with on_cores(usable_cores()[-1:]):
        process = subprocess.Popen([sys.executable, "-c", _BUSY_LOOP])
    try:
        yield
    finally:
        process.kill()
        process.wait()
