"""Recovery of requests from worker deaths: a stream continues in the next worker at the point where it was.

The pipeline gives requests and calls to :class:`Recovery` instead of a model's engine. Both are *work items*
(``work``). ``generation`` is what the pipeline and the API read across workers, with the record of its request and the
attempts at it. ``model_work`` holds the work items of one model, ``fleet_work`` those of one with several workers;
``quarantine`` identifies those that kill workers, and ``work`` recognises them when they are sent again.

The worker's engine resumes the request: it receives the prompt and the answer so far, and continues from there
(:mod:`enginehouse.engine.sequence_factory`). Does not know HTTP, prompts or processes.
"""

from __future__ import annotations

from enginehouse.recovery.generation import Generation
from enginehouse.recovery.recovery import Recovery

__all__ = ["Generation", "Recovery"]
