"""Entry point of a worker process: ``python -m enginehouse.workers --descriptor N``; started by ``process``."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys

from enginehouse.workers.host import WorkerHost
from enginehouse.workers.ipc import Link

__all__: list[str] = []

# prctl(2): signal sent to this process when the thread that started it ends.
_PR_SET_PDEATHSIG = 1

# The engine thread reacquires the GIL after each call into its library. While an intake thread tokenizes in Python,
# each time takes one switch interval; with the default of 5 ms, a step of 5 ms took 62 ms.
_SWITCH_INTERVAL_S = 0.0002


def _die_with_server() -> None:
    """Ask Linux to kill this process when the server dies; a fallback for the end of the link."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_at_once() -> None:
    """Exit immediately because the server is gone; also kills every process that this one started."""
    if os.getpgrp() == os.getpid():
        with contextlib.suppress(OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _main(descriptor: int) -> None:
    _die_with_server()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    faulthandler.enable()  # an abort in a library leaves a traceback in the log
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Service managers signal every process of a service at once. The server decides when to end, so that streams
        # can finish. Unlike SIG_IGN, a handler is not inherited by the processes that libraries start.
        signal.signal(number, lambda *_: None)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s worker %(process)d %(name)s: %(message)s")
    os.set_inheritable(descriptor, False)  # a process started here must not keep the link open
    host = WorkerHost(Link(socket.socket(fileno=descriptor)), on_server_gone=_end_at_once)
    is_clean = host.run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit handlers of libraries may hang or crash once the model is freed; all our own resources are closed.
    os._exit(0 if is_clean else 1)


if __name__ == "__main__":
    _main(int(sys.argv[sys.argv.index("--descriptor") + 1]))
