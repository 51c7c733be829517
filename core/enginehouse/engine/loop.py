"""The serving loop: ``StepEngine`` turns any runner into an engine, driven by calls of ``step``.

One thread (the engine thread) calls ``add``, ``cancel``, ``step`` and ``close``; ``check`` and ``interrupt``
may be called from any thread. Text, token ids and log-probabilities leave as events. Does not know HTTP,
messages, templates or processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.adapters import Adapter
from enginehouse.contract.backend import Runner, Sampled
from enginehouse.contract.drafter import BoundDrafter
from enginehouse.contract.errors import EngineDead, EnginehouseError, PluginFailed, QueueTimeout
from enginehouse.contract.exit_policy import LayerAccess
from enginehouse.contract.inspection import EngineMetrics, EngineView
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.structured import StructuredDecoder
from enginehouse.contract.types import (
    ChoiceFinished,
    EngineCapabilities,
    EngineRequest,
    EngineSettings,
    EngineStats,
    Event,
    FinishReason,
    ModelInfo,
    Resume,
)
from enginehouse.engine.constraints import Masks
from enginehouse.engine.disk import DiskTier
from enginehouse.engine.forward import Computed, encode, forward, skip
from enginehouse.engine.media import ChunkMakers, PlacedChunk, chunk_makers_of
from enginehouse.engine.outputs import (
    StepCounts,
    prompt_progress,
    score_prompt,
    summary,
    text_delta,
    token_logprob,
    view_engine,
)
from enginehouse.engine.sampling.device_draws import DeviceDraws, InFlightStep, launch, read_drawn, valid
from enginehouse.engine.scheduler import Batch, Scheduler
from enginehouse.engine.sequence import ActiveRequest, Sequence
from enginehouse.engine.sequence_factory import SequenceFactory
from enginehouse.engine.speculation.speculation import Speculation
from enginehouse.engine.text.text_stream import TextPiece
from enginehouse.plugins import Contained, guard_of, guarded

EngineOutput = tuple[str, Event | EnginehouseError]
"""A request id with an event or error of that request; an error is always the last output of a request."""


class StepEngine:
    """Continuous batching over a runner: schedule, forward, sample, postprocess.

    Args:
        runner: an opened model; closed by ``close``.
        settings: number of slots, queue and chunk sizes.
        samplers: plugins whose fields requests may set in ``sampling.extensions``, by name.
        decoders: plugins that enforce ``EngineRequest.constraint``.
        clock: seconds, monotonic.
        drafters: drafters by name, in order of preference; shut down by ``close``.
        on_start: called before the runner works on a request: it may end the process.
        on_started: called when a request has left the queue and its cached tokens are known, before any of it is
            computed.
        disk: disk tier that saves finished sequences; closed by ``close``.

    Attributes:
        guard: the guard of ``runner``, which names its backend.
    """

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        samplers: Mapping[str, SamplerPlugin],
        decoders: Iterable[StructuredDecoder] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        drafters: Mapping[str, BoundDrafter] = MappingProxyType({}),
        on_start: Callable[[ActiveRequest], None] = lambda request: None,
        on_started: Callable[[ActiveRequest], None] = lambda request: None,
        disk: DiskTier | None = None,
    ) -> None:
        self.guard = guard_of(runner, "backend")
        self._runner = runner = guarded(runner, Runner, self.guard)
        self._tokenizer = runner.tokenizer
        self._clock = clock
        self._on_start = on_start
        self._on_started = on_started
        self._masks = Masks()
        self._scheduler = Scheduler(runner, settings, disk)
        self._disk = disk
        self._speculation = Speculation(drafters, runner, clock)
        self._sequence_factory = SequenceFactory(runner, samplers, decoders)
        self._num_layers = runner.num_layers if isinstance(runner, LayerAccess) else 0
        self._requests: dict[str, ActiveRequest] = {}
        self._computing: tuple[Sequence, ...] = ()
        self._leaving: set[str] = set()
        self._in_flight = InFlightStep()
        self._taken: dict[tuple[str, int], Sequence] = {}  # with tokens whose text is not emitted yet
        self._outputs: list[EngineOutput] = []
        self._num_arrivals = 0
        self._steps = StepCounts()

    # -- the loop ----------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """Run one scheduler turn: launch at most one forward pass, then process the tokens of the previous one."""
        if self._scheduler.is_in_doubt:
            self._scheduler.resync()
        self._admit()
        self._speculation.prepare(self._scheduler.running)
        batch, began = self._scheduler.schedule(), self._clock()
        computed = self._forward(batch)
        self._report_progress(batch)
        self._show_taken()  # while the device computes
        self._collect(self._in_flight)
        self._in_flight = launch(self._runner, computed, self._fail, self.guard)
        if self._in_flight.is_synchronous:
            self._collect(self._in_flight)
            self._in_flight = InFlightStep()
        seconds = self._clock() - began
        self._speculation.observe(batch, seconds)
        if self._disk is not None:
            self._disk.after_step(sum(span.num_tokens for span in batch.spans), seconds)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _forward(self, batch: Batch) -> Computed:
        """Run the forward pass; on a device, it is only launched."""
        if batch.encodes is not None:
            self._show_taken()  # encoding may take seconds
            self._computing = (batch.encodes,)
            if not self._is_unwanted():
                self._contained(batch.encodes, encode, self._scheduler, batch.encodes)
            self._computing = ()
        if not batch.spans:
            return Computed()
        self._steps.add(len(batch.sequences))
        masks = self._masks.begin([s.constraint for s in batch.sequences if s.constraint and not s.is_reasoning])
        self._computing = batch.sequences
        if self._is_unwanted():  # cancelled after the last messages were read, when no pass could be aborted
            computed = skip(self._scheduler)
        else:
            computed = forward(self._scheduler, batch, self._fail, self._speculation.close, self.guard)
        self._computing = ()
        if masks is not None:
            masks.result()
        return computed

    def _report_progress(self, batch: Batch) -> None:
        """Report the prefill of requests that ask for it; other choices start when the first one is done."""
        for sequence in batch.sequences:
            if (event := prompt_progress(sequence, self._clock())) is not None:
                self._outputs.append((sequence.owner.request.request_id, event))

    def _collect(self, step: InFlightStep) -> None:
        """Process the results of a forward pass; results of sequences that have ended since are discarded."""
        try:
            for draws, sampled, exit_layer in read_drawn(step, self.guard):
                self._contained(draws.sequence, self._read, draws, sampled, exit_layer)
        except EnginehouseError as error:
            for draws in step.on_device:
                self._fail(draws.sequence.owner, error)
        for sequence, rows in step.on_host:
            self._contained(sequence, self._receive, sequence, rows)

    def _admit(self) -> None:
        now = self._clock()
        for owner in self._scheduler.overdue(now):
            self._fail(owner, _overdue(owner))
        for sequence in self._scheduler.admit(self._on_start):
            self._speculation.open(sequence)
            if sequence.owner.started_s is None:
                sequence.owner.started_s = now
                self._on_started(sequence.owner)
        for owner, error in self._scheduler.take_refused():
            self._fail(owner, error)

    # -- one token ---------------------------------------------------------------------------------

    def _read(self, draws: DeviceDraws, sampled: list[Sampled], exit_layer: int | None) -> None:
        """Accept tokens sampled on the device."""
        sequence = draws.sequence
        if sequence.handle is None or not (draws.is_checking or sequence.num_pending):
            return  # the sequence has ended since
        sequence.exit_layer = exit_layer
        shows_later = sequence.reads_at_once and sequence.ends_by_token
        if draws.is_checking:
            taken = sequence.take_drafts([one.token_id for one in sampled]) if shows_later else 0
            self._verify(sequence, lambda ahead: self._accept(sequence, valid(sampled[taken + ahead]), shows_later))
            return
        sequence.num_pending -= 1
        self._accept(sequence, valid(sampled[0]), shows_later)

    def _receive(self, sequence: Sequence, rows: NDArray[np.float32]) -> None:
        """Process the logits of a sequence: score its prompt, sample its next token."""
        if sequence.handle is None:
            return  # the request failed earlier in this step
        if sequence.scores_prompt:
            self._score(sequence, rows)
        if sequence.num_remaining:
            return
        if sequence.length == sequence.max_length:
            self._finish(sequence, sequence.flush(), "length", None)  # a prompt that is only scored
        elif sequence.num_surplus:
            self._verify(sequence, lambda ahead: self._sample(sequence, rows[ahead]))
        else:
            self._sample(sequence, rows[-1])

    def _score(self, sequence: Sequence, rows: NDArray[np.float32]) -> None:
        """Report the log-probabilities of the prompt tokens that follow the computed ones."""
        scored = score_prompt(sequence, rows, self._tokenizer.token_bytes)
        if scored is not None:
            self._outputs.append((sequence.owner.request.request_id, scored))

    def _verify(self, sequence: Sequence, take: Callable[[int], None]) -> None:
        """Accept tokens one by one while they match the drafted tokens, whose logits are already computed."""
        first = sequence.num_computed
        while not sequence.num_remaining:
            take(sequence.num_computed - first)
            if sequence.handle is None:
                return  # the sequence has ended
            sequence.confirm_drafts()
        if not self._scheduler.trim(sequence):
            self._speculation.close(sequence)  # this model cannot drop single tokens

    def _sample(self, sequence: Sequence, row: NDArray[np.float32]) -> None:
        """Sample the next token of a sequence."""
        self._accept(sequence, sequence.sampler.sample(row, sequence.num_generated, sequence.mask()))

    def _accept(self, sequence: Sequence, sampled: Sampled, shows_later: bool = False) -> None:
        """Accept a sampled token, then the tokens that a constraint forces after it."""
        if sequence.owner.first_token_s is None:
            sequence.owner.first_token_s = self._clock()
        if sampled.logprob is not None:
            details = sequence.details(sampled.token_id)
            sequence.pending_logprobs.append(token_logprob(sampled, self._tokenizer.token_bytes, details))
        exit_layer = sequence.exit_layer
        if exit_layer is not None and exit_layer < self._num_layers:
            sequence.owner.usage.early_exit_tokens += 1
            sequence.owner.usage.skipped_layers += self._num_layers - exit_layer
        if self._take(sequence, sampled.token_id, shows_later=shows_later):
            self._take_forced(sequence)

    def _take_forced(self, sequence: Sequence) -> None:
        """Append all forced tokens without reading the logits; the next step computes them in one span."""
        while forced := sequence.forced_token_ids():
            for token_id in forced:
                if not self._take(sequence, token_id, is_forced=True):
                    return

    def _take(self, sequence: Sequence, token_id: int, *, is_forced: bool = False, shows_later: bool = False) -> bool:
        """Append a token and emit the text it makes visible; returns False if the next token is not to follow now.

        The sequence has ended then, or its constraint has taken tokens back. With ``shows_later`` the text of a token
        that is not the last is emitted while the next forward pass is computed.
        """
        if not sequence.append(token_id, is_forced=is_forced):
            self._speculation.reopen(sequence)
            self._scheduler.rewind(sequence)
            return False
        if shows_later and not sequence.is_at_end:
            self._taken[sequence.owner.request.request_id, sequence.choice] = sequence
            return True
        return self._show(sequence, token_id)

    def _show_taken(self) -> None:
        """Emit the text of tokens that were only appended, so that the next pass could be launched."""
        taken, self._taken = self._taken, {}
        for sequence in taken.values():
            if self._scheduler.holds(sequence):
                self._contained(sequence, self._show, sequence, int(sequence.buffer[sequence.length - 1]))

    def _show(self, sequence: Sequence, token_id: int) -> bool:
        """Emit the text that the last tokens make visible; returns False if the last one, ``token_id``, is the end."""
        for _ in range(sequence.num_unshown - 1):
            piece = sequence.show()
            assert piece is not None and piece.stop is None, "such a sequence ends with its last token or later"
            self._emit(sequence, piece)
        piece = sequence.show()
        if piece is None:
            return self._finish(sequence, sequence.flush(), "stop", token_id)
        if piece.stop is not None:
            return self._finish(sequence, piece, "stop", None)
        self._emit(sequence, piece)
        if sequence.constraint is not None and sequence.constraint.is_finished():
            return self._finish(sequence, sequence.flush(), "stop", None)
        if sequence.length == sequence.max_length:
            return self._finish(sequence, sequence.flush(), "length", None)
        return True

    def _emit(self, sequence: Sequence, piece: TextPiece) -> None:
        event = text_delta(sequence, piece)
        if event is not None:
            self._outputs.append((sequence.owner.request.request_id, event))

    def _finish(
        self, sequence: Sequence, piece: TextPiece, reason: FinishReason, stop_reason: str | int | None
    ) -> bool:
        """End a sequence, and its request if it was the last one. Returns False, the result of :meth:`_take`."""
        if piece.stop is not None:
            reason, stop_reason = "stop", piece.stop
        self._emit(sequence, piece)
        owner = sequence.owner
        request_id = owner.request.request_id
        usage = sequence.usage()
        owner.usage += usage
        hidden = sequence.hidden_token_ids if owner.request.return_token_ids else ()
        self._outputs.append((request_id, ChoiceFinished(sequence.choice, reason, usage, stop_reason, hidden)))
        self._speculation.close(sequence)
        self._scheduler.release(sequence, keep=True)
        owner.num_unfinished -= 1
        if owner.num_unfinished == 0:
            self._forget(request_id)
            self._outputs.append((request_id, summary(owner, self._clock())))
        return False

    # -- requests ----------------------------------------------------------------------------------

    @property
    def capabilities(self) -> EngineCapabilities:
        """Request features that this engine supports."""
        return self._sequence_factory.capabilities

    @property
    def info(self) -> ModelInfo:
        """Information about the model; its metadata names truncation to checkpoints, with which only a head drafts."""
        info, truncate = self._runner.info, self._runner.capabilities.truncate
        if truncate != "checkpoint":
            return info
        return msgspec.structs.replace(info, metadata={**info.metadata, "truncation": truncate})

    @property
    def chunk_makers(self) -> ChunkMakers:
        """See :func:`enginehouse.engine.media.chunk_makers_of`."""
        return chunk_makers_of(self._runner)

    def check(self, request: EngineRequest, num_prompt_tokens: int, chunks: tuple[PlacedChunk, ...] = ()) -> None:
        """Reject a request that cannot be served; see :meth:`SequenceFactory.check`. Any thread."""
        self._sequence_factory.check(request, num_prompt_tokens, chunks)

    def check_length(self, num_prompt_tokens: int, is_lower_bound: bool = False) -> None:
        """Reject a prompt that is too long; see :meth:`SequenceFactory.check_length`. Any thread."""
        self._sequence_factory.check_length(num_prompt_tokens, is_lower_bound)

    def add(
        self,
        request: EngineRequest,
        prompt_token_ids: list[int],
        resume: Resume | None = None,
        chunks: tuple[PlacedChunk, ...] = (),
    ) -> None:
        """Queue a checked request with the images in its prompt; ``resume`` continues one that was partly answered."""
        owner = self._sequence_factory.make(
            request, prompt_token_ids, self._num_arrivals, self._clock(), resume=resume, chunks=chunks
        )
        owner.activation = self._scheduler.adapters.activation(request.adapters, owner.prompt)
        self._num_arrivals += 1
        what = f"sampling a token of request {request.request_id} failed"
        owner.contained = Contained(partial(self._fail, owner), what)
        self._requests[request.request_id] = owner
        self._scheduler.embeddings.hold(owner.num_media_bytes)
        self._scheduler.enqueue(owner.sequences)
        with contextlib.ExitStack() as undo:
            undo.callback(self.cancel, request.request_id)  # the caller expects no further outputs after an error
            for sequence in owner.sequences:
                if sequence.length < sequence.max_length:  # False: only scored, or already complete
                    self._take_forced(sequence)
            undo.pop_all()

    def cancel(self, request_id: str) -> None:
        """Cancel a request in any phase; its computed tokens stay in the prefix cache. Unknown ids are ignored."""
        owner = self._forget(request_id)
        if owner is not None:
            self._drop(owner, keep=True)
        self._leaving.discard(request_id)

    def stop_thinking(self, request_id: str) -> int:
        """Force the reasoning of every choice that is inside it to close; return the number of such choices."""
        owner = self._requests.get(request_id)
        num_stopped = 0
        for sequence in owner.sequences if owner is not None else ():
            if sequence.reasoning is None or not self._scheduler.holds(sequence) or not sequence.reasoning.close_now():
                continue
            num_stopped += 1
            self._contained(sequence, self._take_forced, sequence)
        return num_stopped

    def interrupt(self, request_id: str) -> None:
        """Abort the running pass or encoding if it computes only requests that are being cancelled. Any thread.

        One of a long prompt or an image may take seconds, for which the next request would wait; one that is about to
        begin is skipped. Called before a cancellation: :meth:`cancel` follows on the engine thread, and forgets the id.
        """
        self._leaving.add(request_id)
        if self._is_unwanted():
            with contextlib.suppress(PluginFailed):
                self._runner.abort()

    def _is_unwanted(self) -> bool:
        """Return True if a pass runs, or is about to, that computes only requests that are being cancelled."""
        computing = self._computing
        return bool(computing) and all(s.owner.request.request_id in self._leaving for s in computing)

    def _forget(self, request_id: str) -> ActiveRequest | None:
        """Remove a request that has ended; None if it was removed before."""
        owner = self._requests.pop(request_id, None)
        if owner is not None:
            self._scheduler.embeddings.release(owner.num_media_bytes)
        return owner

    def _fail(self, owner: ActiveRequest, error: EnginehouseError) -> None:
        if self._forget(owner.request.request_id) is None:
            return
        self._drop(owner, keep=False)
        self._outputs.append((owner.request.request_id, error))

    def _contained(self, sequence: Sequence, work: Callable[..., object], *arguments: Any) -> None:
        """Guard of sampling: an error in ``work`` fails the sequence's request and no other one."""
        with sequence.owner.contained:
            work(*arguments)

    def _drop(self, owner: ActiveRequest, keep: bool) -> None:
        for sequence in owner.sequences:
            self._speculation.close(sequence)
        self._scheduler.drop(owner, keep)

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter before a request needs it, if there is a place for it. Raises AdapterRefused."""
        self._scheduler.adapters.load(adapter)

    def remove_adapter(self, digest: str) -> None:
        """Unload an adapter once no running sequence uses it."""
        self._scheduler.adapters.remove(digest)

    def has_work(self) -> bool:
        """Return True if ``step`` would do anything."""
        return bool(self._requests or self._outputs)

    def stats(self) -> EngineStats:
        """Return the current state as counts."""
        scheduler, num_free = self._scheduler, 0
        with contextlib.suppress(PluginFailed):
            num_free = self._runner.free_tokens()
        return EngineStats(
            num_waiting=scheduler.num_waiting_requests,
            num_running=len(scheduler.running),
            max_sequences=scheduler.slots,
            free_tokens=num_free,
            cached_tokens=scheduler.cache.num_tokens,
            num_steps=self._steps.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_adapters=len(scheduler.adapters),
        )

    def metrics(self) -> EngineMetrics:
        """Return the statistics since the start."""
        metrics = self._steps.metrics(self.stats(), self._runner.capabilities.cache_tokens)
        return self._scheduler.embeddings.add_to(metrics)

    def view(self) -> EngineView:
        """Return a snapshot of running and waiting requests and of the prefix cache."""
        return view_engine(self._scheduler, self._requests.values(), self._clock())

    def cached_tokens(self, token_ids: Iterable[int], namespace: str) -> int:
        """Return how much of a prompt the prefix cache holds for requests of a namespace, without its last token."""
        return self._scheduler.cache.reusable_length(np.array([*token_ids][:-1], np.int32), namespace)

    def close(self) -> list[EngineOutput]:
        """End every request with EngineDead and close the runner."""
        for owner in list(self._requests.values()):
            self._fail(owner, EngineDead("The server is shutting down."))
        if self._disk is not None:
            self._disk.close()
        self._scheduler.cache.clear()
        self._masks.close()
        self._speculation.shutdown()
        with contextlib.suppress(PluginFailed):
            self._runner.close()
        outputs, self._outputs = self._outputs, []
        return outputs


def _overdue(owner: ActiveRequest) -> QueueTimeout:
    waited = f"The request waited {owner.request.queue_timeout_s:g} s for a place (queue_timeout_s)"
    return QueueTimeout(f"{waited}; try again later.")
