"""Process setup for commands: standard streams, termination signals, and the limit of open files; resident memory.

Imports only the standard library, so that it is active before slow imports begin.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_STDOUT, _STDERR = 1, 2

_END_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_FORCED_END_S = 1.0
"""Delay in seconds after the second signal until the process is terminated unconditionally."""


def prepare_process() -> None:
    """Prepare the process for serving. Must be called first; idempotent.

    Closed standard streams are opened on the null device: otherwise the next files and sockets would get their
    descriptors, and output to a standard stream would be written into those. Signals terminate the command also during
    its imports, and as process 1 of a container, for which the system has no default action. In a server, garbage is
    collected from :func:`begin_collection` on.
    """
    _open_closed_streams()
    if _is_server():
        gc.disable()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_early)
        if _is_server():  # other commands handle KeyboardInterrupt
            signal.signal(signal.SIGINT, _end_early)


def _is_server() -> bool:
    return sys.argv[1:2] == ["serve"]


def _end_early(number: int, _: FrameType | None) -> None:
    """Exit immediately: nothing has started. A server exits with the code of a server stopped by a signal."""
    os._exit(0 if _is_server() else 128 + number)


def _open_closed_streams() -> None:
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "r" if name == "stdin" else "w"
        try:
            os.fstat(descriptor)
        except OSError:
            # open() returns the lowest free descriptor, which is this one, as all below it are open.
            os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            os.set_inheritable(descriptor, True)  # for workers
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115 - stays open
            setattr(sys, name, stream)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Suspend garbage collection. Imports create many objects and no garbage: they take a seventh less time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def begin_collection() -> None:
    """Collect garbage from now on, except among what exists: modules and plugins stay as long as the process.

    They are most objects of a server: looking through them takes a seventh of the time of its start, and again a tenth
    of a second in each full collection, for which all requests wait.
    """
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def standard_output_as_error() -> Iterator[None]:
    """Write to standard error what is written to standard output in the block, also by libraries in C.

    Concerns the whole process: the caller must see to it that one block runs at a time. Commands write their results,
    such as JSON, to standard output, and what they call may print.
    """
    with contextlib.redirect_stdout(sys.stderr):
        try:
            kept = os.dup(_STDOUT)
        except OSError:  # it is closed
            yield
            return
        try:
            _flush_output()
            os.dup2(_STDERR, _STDOUT)
            yield
        finally:
            _flush_output()
            os.dup2(kept, _STDOUT)
            os.close(kept)


def _flush_output() -> None:
    """Write what Python and the C library have buffered for standard output to where it now goes."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        sys.__stdout__.flush()  # type: ignore[union-attr]
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def raise_file_limit() -> None:
    """Raise the limit of open files to the system's maximum: each connection and each worker needs some."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - only on Unix

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS allows less than its hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def rss_bytes() -> int:
    """Resident memory of this process in bytes; 0 where the system does not report it cheaply."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class EndSignals:
    """Handler of SIGINT and SIGTERM in a ``with`` block: the first requests shutdown, the second forces it.

    Uses Python signal handlers, not those of an event loop, so they also work before it runs and after it is closed.
    After the second signal the process ends within ``_FORCED_END_S``, even if the block does not; workers end with
    their server.
    """

    def __init__(self) -> None:
        self._count = 0
        self._on_signal: Callable[[int], None] | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> EndSignals:
        self._former = {number: signal.signal(number, self._handle) for number in _END_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._on_signal = None
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def call(self, on_signal: Callable[[int], None]) -> None:
        """Call ``on_signal`` with the ordinal of each signal, starting at 1, including signals already received."""
        self._on_signal = on_signal
        for number in range(1, self._count + 1):
            on_signal(number)

    def note(self) -> None:
        """Count a signal."""
        self._count += 1
        if self._count == 2:
            forced = threading.Timer(_FORCED_END_S, os._exit, (0,))
            forced.daemon = True
            forced.start()
        if self._on_signal is not None:
            self._on_signal(self._count)

    def _handle(self, _: int, __: FrameType | None) -> None:
        self.note()
