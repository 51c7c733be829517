"""The worker process: ``python -m enginehouse.workers --descriptor N``; started by ``carrier``."""

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

# prctl(2): the signal that this process gets when the thread that started it ends.
_PR_SET_PDEATHSIG = 1

# The engine thread takes the interpreter's lock back after each call into its library. While the intake thread
# tokenizes in Python that takes Python's switch interval each time; with the usual 5 ms a step of 5 ms took 62 ms.
_SWITCH_INTERVAL_S = 0.0002


def _die_with_server() -> None:
    """Ask Linux to kill this process when the server dies; a second line behind the end of the link."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_at_once() -> None:
    """The server is gone: end whatever the engine thread is doing, with everything that this process started."""
    if os.getpgrp() == os.getpid():
        with contextlib.suppress(OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _main(descriptor: int) -> None:
    _die_with_server()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    faulthandler.enable()  # an abort in a library leaves a traceback in the log
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Service managers signal every process of a service at once; when to end is the server's decision, which
        # may let streams finish. A handler, unlike SIG_IGN, is not inherited by what libraries start.
        signal.signal(number, lambda *_: None)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s worker %(process)d %(name)s: %(message)s")
    os.set_inheritable(descriptor, False)  # a process started here must not keep the link open
    host = WorkerHost(Link(socket.socket(fileno=descriptor)), on_server_gone=_end_at_once)
    is_clean = host.run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' exit handlers may hang or crash when the model is gone; everything of ours is closed.
    os._exit(0 if is_clean else 1)


if __name__ == "__main__":
    _main(int(sys.argv[sys.argv.index("--descriptor") + 1]))
