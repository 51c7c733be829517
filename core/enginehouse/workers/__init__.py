"""An engine in a worker process (or thread): what the model manager needs of it.

The modules, in the order in which a request passes them: ``client`` and ``connection`` (server side),
``messages`` and ``link`` (between), ``host`` and ``intake`` (worker side), and back to ``generation`` (server
side), from which its events are read. ``carrier`` starts and ends the process, ``handshake`` makes sure that both
sides speak the same language, ``load_watch`` notices a load that does not get on and ``watchdog`` a worker that hangs,
``endings`` says how one ended, ``backlog`` knows what is to be done.
"""

from __future__ import annotations

from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.generation import Recorder, WorkerGeneration, WorkObserver
from enginehouse.workers.health import LoadWatch
from enginehouse.workers.messages import DrafterLoad, ExitPolicyLoad, Load, ModelLoad, PrefixDiskLoad, Stage
from enginehouse.workers.queue_estimate import Backlog

__all__ = [
    "Backlog",
    "DrafterLoad",
    "ExitPolicyLoad",
    "Load",
    "LoadWatch",
    "ModelLoad",
    "PrefixDiskLoad",
    "Recorder",
    "Stage",
    "WorkObserver",
    "WorkerEngine",
    "WorkerGeneration",
]
