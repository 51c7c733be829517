"""One forward pass with error handling: full caches, aborted passes, and runners that raise.

An error ends at most the requests that cause it; the others continue. Called by the loop on the engine thread; does not
know sampling or text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from contextlib import suppress

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import DeviceOutput, ForwardOutput, Runner, Span
from enginehouse.contract.errors import CacheFull, EnginehouseError, GenerationFailed, PluginFailed, StepAborted
from enginehouse.contract.exit_policy import ExitOutput
from enginehouse.contract.media import MediaRunner
from enginehouse.engine.scheduler import Batch, Scheduler
from enginehouse.engine.sequence import ActiveRequest, Sequence
from enginehouse.plugins import Guard
from enginehouse.plugins.guard import passed

_log = logging.getLogger(__name__)

Rows = list[tuple[Sequence, NDArray[np.float32]]]
"""Sequences with logits, each with its rows in order of position: (num_rows, vocab_size) float32."""

Fail = Callable[[ActiveRequest, EnginehouseError], None]
"""Ends a request with an error."""


@frozen(eq=False)
class Computed:
    """Results of one forward pass.

    Attributes:
        on_host: rows read by the host, to sample from or to score a prompt.
        on_device: sequences whose next tokens the runner samples, each with its rows of ``output``.
        output: all rows; None if no rows stay on the device.
    """

    on_host: Rows = field(factory=list)
    on_device: list[tuple[Sequence, range]] = field(factory=list)
    output: ForwardOutput | None = None


def forward(
    scheduler: Scheduler, batch: Batch, fail: Fail, end_drafting: Callable[[Sequence], None], guard: Guard
) -> Computed:
    """Run ``batch``, or the part of it that can run, and return the rows to sample from.

    Args:
        guard: the guard of the backend, which names it if the runner fails.
    """
    while batch.spans:
        done = _attempt(scheduler.runner, batch, guard)
        if isinstance(done, Computed):
            return done
        if scheduler.has_pending:
            scheduler.postpone(is_in_doubt=not isinstance(done, CacheFull))
            break
        if isinstance(done, CacheFull):
            if not scheduler.drop_drafts() and not scheduler.make_room():
                fail(batch.sequences[0].owner, GenerationFailed(f"The model ran out of memory: {done}"))
            batch = scheduler.schedule()
            continue
        scheduler.resync()
        if isinstance(done, StepAborted):
            break
        if drafted := [sequence for sequence in batch.sequences if sequence.drafts]:
            _log.warning("a forward pass with drafts failed; it is done again without them", exc_info=done)
            for sequence in drafted:
                end_drafting(sequence)
            scheduler.drop_drafts()
            batch = scheduler.schedule()
            continue
        if len(batch.spans) > 1:
            return _forward_one_by_one(scheduler, batch, fail, guard)
        fail(batch.sequences[0].owner, _runner_failure(done, batch.sequences[0], guard))
        break
    return Computed()


def skip(scheduler: Scheduler) -> Computed:
    """Do not run a scheduled pass, as if it had been aborted before it computed anything."""
    if scheduler.has_pending:
        scheduler.postpone(is_in_doubt=True)
    else:
        scheduler.resync()
    return Computed()


def encode(scheduler: Scheduler, sequence: Sequence) -> None:
    """Encode the image that is the next part of a prompt; aborted, it is encoded again unless it was cancelled."""
    placed, runner = sequence.next_chunk, scheduler.runner
    assert placed is not None and isinstance(runner, MediaRunner)
    with suppress(StepAborted):
        sequence.embedding = runner.encode(placed.chunk)
        scheduler.embeddings.put(sequence.owner.request.namespace, placed.chunk.key, sequence.embedding)


def _attempt(runner: Runner, batch: Batch, guard: Guard, reads_all: bool = False) -> Computed | BaseException:
    """Guard of forward passes: run one, and return an error so that it does not end the other requests."""
    guard.enter("forward")
    try:
        return _collect(batch, runner.forward(batch.spans), runner, guard, reads_all)
    except passed():
        raise
    except BaseException as error:  # noqa: BLE001 - guard of forward passes: its caller tells whose failure it is
        return error
    finally:
        guard.leave()


def _forward_one_by_one(scheduler: Scheduler, batch: Batch, fail: Fail, guard: Guard) -> Computed:
    """Run a failed batch one span at a time, and fail only the sequences for which the runner raises."""
    rows: Rows = []
    for sequence, span in zip(batch.sequences, batch.spans, strict=True):
        if sequence.num_computed != span.start or sequence not in scheduler.running:
            continue
        done = _attempt(scheduler.runner, Batch((sequence,), (span,)), guard, reads_all=True)
        if isinstance(done, Computed):
            rows += [(s, some.copy()) for s, some in done.on_host]
        elif not isinstance(done, CacheFull):
            scheduler.resync()
            fail(sequence.owner, _runner_failure(done, sequence, guard))
    return Computed(rows)


def _collect(batch: Batch, output: ForwardOutput, runner: Runner, guard: Guard, reads_all: bool = False) -> Computed:
    """Update the computed lengths and assign the rows; with ``reads_all`` the host samples every token."""
    if not hasattr(output, "num_rows"):
        what = f"gave {type(output).__name__}, ForwardOutput was expected"
        raise guard.mistake("forward", what, runner.forward)
    on_host: list[tuple[Sequence, range]] = []
    on_device: list[tuple[Sequence, range]] = []
    start = 0
    for sequence, span in zip(batch.sequences, batch.spans, strict=True):
        size = span.num_tokens
        sequence.num_surplus, sequence.embedding = len(sequence.drafts), None
        sequence.num_computed += size - sequence.num_surplus
        if sequence.num_surplus:
            sequence.owner.usage.add_drafts(sequence.drafter, num_drafted=sequence.num_surplus)
        rows = range(start, start + {"none": 0, "last": 1, "all": size}[span.outputs])
        if rows and sequence.on_device and not reads_all and _can_stay(sequence, span):
            on_device.append((sequence, rows))
        elif rows:
            on_host.append((sequence, rows))
        start = rows.stop
    found = read_rows(output, on_host, guard)
    for (sequence, _), exit_layer in zip(on_host, read_exit_layers(output, on_host, guard), strict=True):
        sequence.exit_layer = exit_layer
    return Computed(found, on_device, output if on_device else None)


def _can_stay(sequence: Sequence, span: Span) -> bool:
    """Return True if the device can sample everything that the rows of a span are needed for."""
    if sequence.num_surplus:
        return not sequence.needs_history  # otherwise drafts must be sampled one after the other
    return span.outputs == "last"


def read_rows(output: ForwardOutput, wanted: list[tuple[Sequence, range]], guard: Guard) -> Rows:
    """Return the wanted rows in host memory; from a device output, only these are copied."""
    if not wanted:
        return []
    num_rows = sum(len(rows) for _, rows in wanted)
    if num_rows < output.num_rows and isinstance(output, DeviceOutput):
        output = guard.call("select of its logits", output.select, [row for _, rows in wanted for row in rows])
    logits = guard.call("host of its logits", output.host)
    vocab_size = wanted[0][0].sampler.vocab_size
    if getattr(logits, "dtype", None) != np.float32 or logits.shape != (output.num_rows, vocab_size):
        name = f"{logits.dtype} of shape {logits.shape}" if isinstance(logits, np.ndarray) else type(logits).__name__
        what = f"gave {name}, float32 of shape {(output.num_rows, vocab_size)} was expected"
        raise guard.mistake("host of its logits", what, output.host)
    start, found = 0, []
    for sequence, rows in wanted:
        start = start if output.num_rows == num_rows else rows.start
        found.append((sequence, logits[start : start + len(rows)]))
        start += len(rows)
    return found


def read_exit_layers(output: ForwardOutput, wanted: Tokens[tuple[Sequence, range]], guard: Guard) -> list[int | None]:
    """Return the number of layers computed for the last row of each; None without early exit.

    Waits until the pass has got there: called when rows or tokens are needed, not right after the launch.
    """
    if not wanted:
        return []
    with guard.calling("exit_layers of its logits"):
        layers = output.exit_layers if isinstance(output, ExitOutput) else None
        return [layers[rows[-1]] if layers is not None else None for _, rows in wanted]


def _runner_failure(error: BaseException, sequence: Sequence, guard: Guard) -> EnginehouseError:
    if isinstance(error, PluginFailed):
        return error
    if isinstance(error, EnginehouseError):
        return GenerationFailed(f"The model failed on this request: {error.message}")
    return guard.of_request(sequence.owner.request.request_id).failed("forward", error)
