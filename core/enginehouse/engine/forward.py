"""One forward pass with its failures: full caches, interruptions, and runners that raise.

Whatever goes wrong, at most the requests at fault end; the others go on. Called by the loop on the engine
thread; knows nothing of sampling or text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from enginehouse.backend import ForwardOutput, Span
from enginehouse.engine.scheduler import Batch, Scheduler
from enginehouse.engine.sequence import ActiveRequest, Sequence
from enginehouse.errors import CacheFull, EnginehouseError, GenerationFailed, StepAborted

__all__ = ["Fail", "Rows", "forward"]

Rows = list[tuple[Sequence, NDArray[np.float32]]]
"""Sequences that got logits, each with its rows in order of position: (num_rows, vocab_size) float32."""

Fail = Callable[[ActiveRequest, EnginehouseError], None]
"""Ends a request with an error."""


def forward(scheduler: Scheduler, batch: Batch, fail: Fail) -> Rows:
    """Run ``batch``, or what can be run of it, and return the rows to sample from."""
    while batch.spans:
        try:
            return _collect(batch, scheduler.runner.forward(batch.spans))
        except CacheFull as error:
            if not scheduler.make_room():
                fail(batch.sequences[0].owner, GenerationFailed(f"The model ran out of memory: {error}"))
            batch = scheduler.schedule()
        except StepAborted:
            scheduler.resync()
            break
        except Exception as error:  # noqa: BLE001 - a runner's fault must not end the other requests
            scheduler.resync()
            if len(batch.spans) > 1:
                return _forward_one_by_one(scheduler, batch, fail)
            fail(batch.sequences[0].owner, _runner_failure(error))
            break
    return []


def _forward_one_by_one(scheduler: Scheduler, batch: Batch, fail: Fail) -> Rows:
    """After a failed batch: find out which sequences the runner fails on, and fail only those."""
    rows: Rows = []
    for sequence, span in zip(batch.sequences, batch.spans, strict=True):
        if sequence.num_computed != span.start or sequence not in scheduler.running:
            continue
        try:
            output = scheduler.runner.forward([span])
            rows += [(s, some.copy()) for s, some in _collect(Batch((sequence,), (span,)), output)]
        except CacheFull:
            continue
        except Exception as error:  # noqa: BLE001 - see above
            scheduler.resync()
            fail(sequence.owner, _runner_failure(error))
    return rows


def _collect(batch: Batch, output: ForwardOutput) -> Rows:
    for sequence, span in zip(batch.sequences, batch.spans, strict=True):
        sequence.num_computed += len(span.input)  # type: ignore[arg-type]  # core sends ids only
    rows: Rows = []
    logits = output.host() if output.num_rows else np.empty((0, 0), np.float32)
    start = 0
    for sequence, span in zip(batch.sequences, batch.spans, strict=True):
        end = start + _num_rows(span)
        if end > start:
            rows.append((sequence, logits[start:end]))
        start = end
    return rows


def _num_rows(span: Span) -> int:
    return {"none": 0, "last": 1, "all": len(span.input)}[span.outputs]  # type: ignore[arg-type]  # ids only


def _runner_failure(error: Exception) -> EnginehouseError:
    reason = error.message if isinstance(error, EnginehouseError) else f"{type(error).__name__}: {error}"
    return GenerationFailed(f"The model failed on this request: {reason}")
