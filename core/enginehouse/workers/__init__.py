"""An engine in a worker process or thread, as the model manager uses it.

In the order in which a request passes the modules: ``client`` and ``calls`` (server side), ``messages`` and ``ipc``
(transport and handshake), ``host`` and ``intake`` (worker side), and back to ``requests`` (server side), which
delivers the events. ``process`` starts and ends the worker, ``parts`` opens the optional parts of its engine,
``health`` detects hung threads and loads without progress and describes exit statuses, ``queue_estimate`` estimates the
waiting time, ``stats`` reports the engine's counters.
"""

from __future__ import annotations

from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.health import LoadWatch
from enginehouse.workers.messages import DrafterLoad, ExitPolicyLoad, Load, ModelLoad, PrefixDiskLoad, Stage
from enginehouse.workers.queue_estimate import Backlog
from enginehouse.workers.requests import WorkerStream, WorkObserver

__all__ = [
    "Backlog",
    "DrafterLoad",
    "ExitPolicyLoad",
    "Load",
    "LoadWatch",
    "ModelLoad",
    "PrefixDiskLoad",
    "Stage",
    "WorkObserver",
    "WorkerEngine",
    "WorkerStream",
]
