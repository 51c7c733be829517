"""Entry point of a worker process: ``python -m enginehouse.workers [NOTES] LINK``; started by ``launch``."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys

from enginehouse.process import no_collection

with no_collection():
    from enginehouse.plugins.call_notes import CallNotes
    from enginehouse.workers.host import WorkerHost
    from enginehouse.workers.ipc import become_child

    gc.freeze()  # modules stay as long as the process

# The engine thread reacquires the GIL after each call into its library. While an intake thread tokenizes in Python,
# each time takes one switch interval; with the default of 5 ms, a step of 5 ms took 62 ms.
_SWITCH_INTERVAL_S = 0.0002


def _end_at_once() -> None:
    """Exit immediately because the server is gone; also kills every process that this one started."""
    if os.getpgrp() == os.getpid():
        with contextlib.suppress(OSError):
            os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _main() -> None:
    link = become_child()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    faulthandler.enable()  # an abort in a library leaves a traceback in the log
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s worker %(process)d %(name)s: %(message)s")
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR2)  # sent to a worker that hangs, before it is killed
    notes = CallNotes(int(sys.argv[-2])) if len(sys.argv) > 2 else None
    is_clean = WorkerHost(link, on_server_gone=_end_at_once, notes=notes).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit handlers of libraries may hang or crash once the model is freed; all our own resources are closed.
    os._exit(0 if is_clean else 1)


if __name__ == "__main__":
    _main()
