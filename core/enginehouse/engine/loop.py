"""StepEngine: makes an engine of any runner. The serving loop is ``step``.

One thread (the engine thread) calls ``add``, ``cancel``, ``step`` and ``close``; ``check`` and ``is_full``
may be called from any thread. Text, token ids and log-probabilities leave as events; nothing here knows
HTTP, messages, templates or processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from enginehouse.backend import ForwardOutput, Runner
from enginehouse.engine.sampling import Sampled, SequenceSampler, build_steps
from enginehouse.engine.scheduler import Batch, Scheduler
from enginehouse.engine.sequence import ActiveRequest, Sequence
from enginehouse.errors import (
    CacheFull,
    ContextLengthExceeded,
    EngineDead,
    EnginehouseError,
    GenerationFailed,
    InvalidRequest,
    StepAborted,
)
from enginehouse.output.text_stream import Piece, TextStream
from enginehouse.sampler import SamplerPlugin
from enginehouse.types import (
    ChoiceFinished,
    EngineRequest,
    EngineSettings,
    EngineStats,
    Event,
    FinishReason,
    RequestFinished,
    TextDelta,
    TokenLogprob,
    TopLogprob,
)

__all__ = ["EngineOutput", "StepEngine"]

EngineOutput = tuple[str, Event | EnginehouseError]
"""A request id and what happened to it; an error is the last thing that happens."""


class StepEngine:
    """Continuous batching over a runner: schedule, forward, sample, postprocess.

    Args:
        runner: an opened model; closed by ``close``.
        settings: slots, queue and chunk sizes.
        samplers: plugins whose fields requests may carry in ``sampling.extensions``, by name.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        samplers: Mapping[str, SamplerPlugin],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._tokenizer = runner.tokenizer
        self._settings = settings
        self._samplers = samplers
        self._clock = clock
        self._scheduler = Scheduler(runner, settings)
        self._requests: dict[str, ActiveRequest] = {}
        self._outputs: list[EngineOutput] = []
        self._num_arrivals = 0
        self._num_steps = 0

    # -- the loop ----------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """One scheduler turn: at most one forward pass over everything that can run."""
        self._admit()
        batch = self._scheduler.schedule()
        if batch.spans:
            rows = self._forward(batch)
            for sequence, row in rows:
                self._sample(sequence, row)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _admit(self) -> None:
        now = self._clock()
        for sequence in self._scheduler.admit():
            if sequence.owner.started_s is None:
                sequence.owner.started_s = now

    def _forward(self, batch: Batch) -> list[tuple[Sequence, NDArray[np.float32]]]:
        """Run the batch; the sequences that got a row of logits, with their rows."""
        self._num_steps += 1
        while batch.spans:
            try:
                return self._collect(batch, self._runner.forward(batch.spans))
            except CacheFull as error:
                if not self._scheduler.make_room():
                    self._fail(batch.sequences[0].owner, GenerationFailed(f"The model ran out of memory: {error}"))
                batch = self._scheduler.schedule()
            except StepAborted:
                self._scheduler.resync()
                break
            except Exception as error:  # noqa: BLE001 - a runner's fault must not end the other requests
                self._scheduler.resync()
                if len(batch.spans) == 1:
                    self._fail(batch.sequences[0].owner, _runner_failure(error))
                    break
                return self._forward_one_by_one(batch)
        return []

    def _forward_one_by_one(self, batch: Batch) -> list[tuple[Sequence, NDArray[np.float32]]]:
        """After a failed batch: find out which sequence the runner fails on, and fail only that one."""
        rows: list[tuple[Sequence, NDArray[np.float32]]] = []
        for sequence, span in zip(batch.sequences, batch.spans, strict=True):
            if sequence.num_computed != span.start or sequence not in self._scheduler.running:
                continue
            single = Batch((sequence,), (span,))
            try:
                rows += [(s, row.copy()) for s, row in self._collect(single, self._runner.forward(single.spans))]
            except CacheFull:
                continue
            except Exception as error:  # noqa: BLE001 - see above
                self._scheduler.resync()
                self._fail(sequence.owner, _runner_failure(error))
        return [(sequence, row) for sequence, row in rows if sequence in self._scheduler.running]

    def _collect(self, batch: Batch, output: ForwardOutput) -> list[tuple[Sequence, NDArray[np.float32]]]:
        for sequence, span in zip(batch.sequences, batch.spans, strict=True):
            sequence.num_computed += len(span.input)  # type: ignore[arg-type]  # core sends ids only
        finished = [s for s, span in zip(batch.sequences, batch.spans, strict=True) if span.outputs == "last"]
        return list(zip(finished, output.host(), strict=True)) if finished else []

    # -- one token ---------------------------------------------------------------------------------

    def _sample(self, sequence: Sequence, row: NDArray[np.float32]) -> None:
        """Draw the next token of a sequence and pass on what it makes visible."""
        if sequence not in self._scheduler.running:
            return  # its request failed earlier in this step
        try:
            sampled = sequence.sampler.sample(row, sequence.num_generated)
            sequence.sampler.accept(sampled.token_id)
        except EnginehouseError as error:
            self._fail(sequence.owner, error)
            return
        except Exception as error:  # noqa: BLE001 - one request's sampling must not end the others
            self._fail(sequence.owner, GenerationFailed(f"Sampling failed: {error!r}"))
            return
        owner = sequence.owner
        if owner.first_token_s is None:
            owner.first_token_s = self._clock()
        owner.num_completion_tokens += 1
        sequence.append(sampled.token_id)
        is_end = sampled.token_id in self._tokenizer.end_token_ids
        if is_end and not owner.request.stopping.ignore_eos:
            self._finish(sequence, sequence.text.flush(), "stop", sampled.token_id)
            return
        if sampled.logprob is not None:
            sequence.pending_logprobs.append(self._token_logprob(sampled))
        piece = sequence.text.push(sampled.token_id)
        if piece.stop is not None:
            self._finish(sequence, piece, "stop", piece.stop)
        elif sequence.length == sequence.max_length:
            self._emit(sequence, piece)
            self._finish(sequence, sequence.text.flush(), "length", None)
        else:
            self._emit(sequence, piece)

    def _token_logprob(self, sampled: Sampled) -> TokenLogprob:
        token_bytes = self._tokenizer.token_bytes
        top: tuple[TopLogprob, ...] = ()
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            pairs = zip(sampled.top_ids.tolist(), sampled.top_logprobs.tolist(), strict=True)
            top = tuple(TopLogprob(token_id, token_bytes[token_id], logprob) for token_id, logprob in pairs)
        assert sampled.logprob is not None
        return TokenLogprob(sampled.token_id, token_bytes[sampled.token_id], sampled.logprob, top)

    def _emit(self, sequence: Sequence, piece: Piece) -> None:
        if not piece.token_ids and not piece.text:
            return
        logprobs = None
        if sequence.owner.request.sampling.num_logprobs is not None:
            logprobs = tuple(sequence.pending_logprobs.popleft() for _ in piece.token_ids)
        event = TextDelta(sequence.choice, piece.text, piece.token_ids, logprobs)
        self._outputs.append((sequence.owner.request.request_id, event))

    def _finish(self, sequence: Sequence, piece: Piece, reason: FinishReason, stop_reason: str | int | None) -> None:
        self._emit(sequence, piece)
        owner = sequence.owner
        request_id = owner.request.request_id
        finished = ChoiceFinished(sequence.choice, reason, sequence.num_generated, stop_reason)
        self._outputs.append((request_id, finished))
        self._scheduler.release(sequence, keep=True)
        owner.num_unfinished -= 1
        if owner.num_unfinished == 0:
            del self._requests[request_id]
            self._outputs.append((request_id, self._summary(owner)))

    def _summary(self, owner: ActiveRequest) -> RequestFinished:
        now = self._clock()
        started = owner.started_s if owner.started_s is not None else now
        first = owner.first_token_s if owner.first_token_s is not None else now
        return RequestFinished(
            num_prompt_tokens=len(owner.prompt),
            num_cached_tokens=owner.num_cached_tokens or 0,
            num_completion_tokens=owner.num_completion_tokens,
            queue_s=started - owner.received_s,
            prefill_s=first - started,
            decode_s=now - first,
        )

    # -- requests ----------------------------------------------------------------------------------

    def check(self, request: EngineRequest, num_prompt_tokens: int) -> None:
        """Refuse what cannot be served. Any thread.

        Raises:
            ContextLengthExceeded: prompt and one token do not fit.
            InvalidRequest: empty prompt, or token ids outside the vocabulary.
        """
        max_context = self._runner.capabilities.max_context
        vocab_size = self._tokenizer.vocab_size
        if num_prompt_tokens < 1:
            raise InvalidRequest("The prompt is empty: it has no tokens.", "prompt")
        if num_prompt_tokens + 1 > max_context:
            raise ContextLengthExceeded(num_prompt_tokens, max_context)
        bad_ids = [token_id for token_id in request.token_ids or () if not 0 <= token_id < vocab_size]
        if bad_ids:
            message = f"Token ids must lie in [0, {vocab_size}); got {', '.join(map(str, bad_ids[:8]))}."
            raise InvalidRequest(message, "prompt")
        bad_keys = [key for key in request.sampling.logit_bias if not 0 <= key < vocab_size]
        if bad_keys:
            message = f"logit_bias keys must be token ids in [0, {vocab_size}); got {', '.join(map(str, bad_keys))}."
            raise InvalidRequest(message, f"logit_bias.{bad_keys[0]}")
        build_steps(request.sampling, self._samplers)

    def is_full(self, num_more: int = 1) -> bool:
        """Whether ``num_more`` further requests would overflow the queue. Any thread."""
        return self._scheduler.num_waiting_requests + num_more > self._settings.max_queue

    def add(self, request: EngineRequest, prompt_token_ids: list[int]) -> None:
        """Queue a checked request."""
        prompt = np.array(prompt_token_ids, np.int32)
        room = self._runner.capabilities.max_context - len(prompt)
        limit = request.stopping.max_tokens
        max_length = len(prompt) + (room if limit is None else min(limit, room))
        owner = ActiveRequest(request, prompt, self._num_arrivals, self._clock())
        self._num_arrivals += 1
        owner.sequences = [self._new_sequence(owner, choice, max_length) for choice in range(request.num_choices)]
        owner.num_unfinished = len(owner.sequences)
        self._requests[request.request_id] = owner
        self._scheduler.enqueue(owner.sequences)

    def _new_sequence(self, owner: ActiveRequest, choice: int, max_length: int) -> Sequence:
        request, tokenizer = owner.request, self._tokenizer
        buffer = np.empty(max_length, np.int32)
        buffer[: len(owner.prompt)] = owner.prompt
        sampler = SequenceSampler(
            request.sampling,
            choice=choice,
            vocab_size=tokenizer.vocab_size,
            prompt_token_ids=owner.prompt,
            steps=build_steps(request.sampling, self._samplers),
        )
        text = TextStream(tokenizer.token_bytes, tokenizer.control_token_ids, request.stopping.stop)
        return Sequence(owner, choice, buffer, len(owner.prompt), sampler, text)

    def cancel(self, request_id: str) -> None:
        """Drop a request in any phase; what it has computed stays in the prefix cache. Unknown ids are ignored."""
        owner = self._requests.pop(request_id, None)
        if owner is not None:
            self._scheduler.drop(owner, keep=True)

    def _fail(self, owner: ActiveRequest, error: EnginehouseError) -> None:
        if self._requests.pop(owner.request.request_id, None) is None:
            return
        self._scheduler.drop(owner, keep=False)
        self._outputs.append((owner.request.request_id, error))

    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._requests or self._outputs)

    def stats(self) -> EngineStats:
        """What is going on now."""
        scheduler = self._scheduler
        return EngineStats(
            num_waiting=scheduler.num_waiting_requests,
            num_running=len(scheduler.running),
            max_sequences=scheduler.slots,
            free_tokens=self._runner.free_tokens(),
            cached_tokens=scheduler.cache.num_tokens,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
        )

    def close(self) -> list[EngineOutput]:
        """End every request with EngineDead and close the runner."""
        for owner in list(self._requests.values()):
            self._fail(owner, EngineDead("The server is shutting down."))
        self._scheduler.cache.clear()
        self._runner.close()
        outputs, self._outputs = self._outputs, []
        return outputs


def _runner_failure(error: Exception) -> EnginehouseError:
    if isinstance(error, EnginehouseError):
        return GenerationFailed(f"The model failed on this request: {error.message}")
    return GenerationFailed(f"The model failed on this request: {type(error).__name__}: {error}")
