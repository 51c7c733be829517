"""The worker's intake threads: prompts are tokenized and checked here, while the engine thread computes.

A long prompt delays only the prompts queued after it, never a running stream and never a cancellation: the reader
thread passes cancellations directly to :class:`Intake`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np
from attrs import evolve

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.errors import (
    EnginehouseError,
    InvalidRequest,
    RequestCancelled,
    UnsupportedTask,
)
from enginehouse.contract.types import EngineRequest, PoolingRequest, PoolText, Resume, Segment
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.media import EncodedPrompt, encode_prompt
from enginehouse.engine.pooling.inputs import PoolInputs
from enginehouse.engine.pooling.loop import PoolEngine
from enginehouse.engine.text.segments import min_tokens
from enginehouse.plugins import Contained, Guard, guard_of
from enginehouse.plugins.guard import current_request
from enginehouse.workers.ipc import FrameTooLarge
from enginehouse.workers.messages import (
    Accepted,
    CallFailed,
    Detokenize,
    Detokenized,
    FromWorker,
    Left,
    Pool,
    PoolAccepted,
    Rejected,
    StageBegan,
    Submit,
    Tokenize,
    Tokenized,
    failure_of,
)
from enginehouse.workers.request_table import NO_CALL

# Tokenized in about 30 ms, even by a tokenizer that needs a microsecond per character.
_LONG_CHARACTERS = 32_768


_Queue = SimpleQueue[Submit | Pool | Tokenize | Detokenize | None]


class Intake:
    """Turns Submit and Pool messages into tokenized requests.

    Long prompts have their own thread, so that short ones do not wait for them. So do requests with a constraint, which
    may take a second to compile.

    Args:
        engine: checks whether a request fits; only its thread-safe methods are used.
        tokenizer: the tokenizer of the model.
        send: sends a message to the server.
        enter: passes a tokenized request to the engine thread.
        enter_pool: passes the inputs of a Pool to it, with the number of the call.
        guard: the guard of the backend, whose tokenizer is called here.
    """

    def __init__(
        self,
        engine: StepEngine | PoolEngine,
        tokenizer: Tokenizer,
        send: Callable[[FromWorker], None],
        enter: Callable[[EngineRequest, EncodedPrompt, Resume | None], None],
        *,
        enter_pool: Callable[[int, PoolInputs], None],
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard if guard is not None else guard_of(tokenizer, "backend")
        self._engine = engine
        self._tokenizer = tokenizer
        self._send = send
        self._enter = enter
        self._enter_pool = enter_pool
        self._queue: _Queue = SimpleQueue()
        self._long: _Queue = SimpleQueue()
        self._constrained: _Queue = SimpleQueue()
        self._queues = {"constrained intake": self._constrained, "long intake": self._long, "intake": self._queue}
        self._lock = threading.Lock()
        # Requests by id, and pools by call number: submitted, not yet handed to the engine thread, not cancelled
        self._waiting: set[str | int] = set()
        self._in_progress: dict[str | int, bool] = {}  # being tokenized or compiled; True if cancelled since then
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=name, daemon=True)
            for name, queue in self._queues.items()
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop after the current tokenization and compilation; blocks until they have finished."""
        self._is_closing = True
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()

    # -- reader thread -----------------------------------------------------------------------------

    def admit(self, message: Submit | Pool) -> None:
        """Queue a request. The server bounds their number, see :mod:`enginehouse.workers.request_queue`."""
        with self._lock:
            self._waiting.add(_work_of(message))
        is_constrained = isinstance(message, Submit) and message.request.constraint is not None
        usual = self._constrained if is_constrained else self._queue
        (self._long if _is_long(message.request) else usual).put(message)

    def call(self, message: Tokenize | Detokenize) -> None:
        """Queue a call; the watchdog's ping passes through all threads, because any of them may hang."""
        usual = self._constrained if message.call == NO_CALL else self._queue
        (self._long if _is_long(message) else usual).put(message)

    def cancel(self, work: str | int) -> bool:
        """Drop a request, and say so if no thread is working on it; False if the engine thread already has it."""
        with self._lock:
            if work not in self._waiting:
                return False
            self._waiting.remove(work)
            is_in_progress = work in self._in_progress
            if is_in_progress:
                self._in_progress[work] = True
        if not is_in_progress:
            self._send(left(work))
        return True

    # -- intake threads ----------------------------------------------------------------------------

    def _run(self, queue: _Queue) -> None:
        while (message := queue.get()) is not None and not self._is_closing:
            # Failures of plugins are logged with the request.
            request = message.request if isinstance(message, Submit | Pool) else None
            current_request.set(partial(str, request.request_id) if request is not None else None)
            if isinstance(message, Submit | Pool):
                self._begin(message)
            elif message.call == NO_CALL and queue is not self._queue:
                (self._long if queue is self._constrained else self._queue).put(message)
            else:
                self._answer(message)

    def _begin(self, message: Submit | Pool) -> None:
        """Take in a request unless it was cancelled while it waited; if cancelled meanwhile, say so afterwards."""
        work = _work_of(message)
        with self._lock:
            if work not in self._waiting:
                return
            self._in_progress[work] = False
        self._send(StageBegan(work, "text"))
        if isinstance(message, Pool):
            self._take_pool(message.call, message.request)
        else:
            self._take(message.request, message.resume)
        with self._lock:
            is_cancelled = self._in_progress.pop(work)
        if is_cancelled:
            self._send(left(work))

    def _take_pool(self, call: int, request: PoolingRequest) -> None:
        with Contained(partial(self._reject, call), "checking the request failed"):
            if isinstance(self._engine, StepEngine):
                raise UnsupportedTask(request.model or "", "generate", request.task)
            with self._guard.of_request(request.request_id).calling("encode of its tokenizer"):
                made = self._engine.make(request)
            self._send(PoolAccepted(call, sum(made.num_tokens)))
            with self._lock:
                if call in self._waiting:
                    self._waiting.remove(call)
                    self._enter_pool(call, made)

    def _take(self, request: EngineRequest, resume: Resume | None) -> None:
        request_id = request.request_id
        with Contained(partial(self._reject, request_id), "checking the request failed"):
            with self._guard.of_request(request_id).calling("encode of its tokenizer"):
                prompt = self._prompt(request)
            if request.constraint is not None:
                self._send(StageBegan(request_id, "constraint"))
            num_tokens = len(prompt.token_ids)
            if isinstance(self._engine, StepEngine):
                self._engine.check(request, num_tokens, prompt.chunks)
            else:
                self._engine.check(request, num_tokens)
            if prompt.chunks:
                request = evolve(request, segments=())  # the chunks replace the pixels, which take much memory
            # Accepted is sent before the engine thread receives the request, so it precedes the request's first event.
            shown = tuple(prompt.token_ids) if request.return_token_ids else None
            self._send(Accepted(request_id, num_tokens, shown))
            with self._lock:
                if request_id in self._waiting:
                    self._waiting.remove(request_id)
                    self._enter(request, prompt, resume)

    def _reject(self, work: str | int, error: EnginehouseError) -> None:
        with self._lock:
            self._waiting.discard(work)
        failure = failure_of(error)
        self._send(Rejected(work, failure) if isinstance(work, str) else CallFailed(work, failure))

    def _prompt(self, request: EngineRequest) -> EncodedPrompt:
        if request.token_ids is not None:
            return EncodedPrompt(list(request.token_ids))
        # A prompt that cannot fit is refused by its text length, which saves the time of tokenizing it.
        self._engine.check_length(min_tokens(self._tokenizer, request.segments), is_lower_bound=True)
        return self._encode(request.segments, request.add_special)

    def _encode(self, segments: Sequence[Segment], add_special: bool) -> EncodedPrompt:
        layout = self._engine.layout if isinstance(self._engine, PoolEngine) else None
        chunk_makers = self._engine.chunk_makers if isinstance(self._engine, StepEngine) else {}
        prompt = encode_prompt(self._tokenizer, segments, add_special and layout is None, chunk_makers, self._guard)
        token_ids = prompt.token_ids
        if add_special and layout is not None:
            prompt = EncodedPrompt([*layout.before, *token_ids, *layout.after])
        if wrong := [kind for kind in set(map(type, token_ids)) if not issubclass(kind, int | np.integer)]:
            what = f"gave {wrong[0].__name__} as a token id"
            raise self._guard.mistake("encode of its tokenizer", what, self._tokenizer.encode)
        return prompt

    def _answer(self, message: Tokenize | Detokenize) -> None:
        if message.call != NO_CALL:
            self._send(StageBegan(message.call, "text"))
        try:
            with self._guard.calling("its tokenizer"):
                if isinstance(message, Tokenize):
                    token_ids = self._encode(message.segments, message.add_special).token_ids
                    answer: FromWorker = Tokenized(message.call, token_ids)
                else:
                    answer = Detokenized(message.call, self._pieces(message.token_ids))
            self._send(answer)
        except FrameTooLarge:
            self._send(CallFailed(message.call, failure_of(InvalidRequest("There are too many tokens to list them."))))
        except EnginehouseError as error:
            self._send(CallFailed(message.call, failure_of(error)))

    def _pieces(self, token_ids: tuple[int, ...]) -> list[bytes]:
        vocab_size = self._tokenizer.vocab_size
        bad_ids = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if bad_ids:
            listed = ", ".join(map(str, bad_ids[:8]))
            raise InvalidRequest(f"Token ids must be in [0, {vocab_size}); got {listed}.", "tokens")
        return [self._tokenizer.token_bytes[token_id] for token_id in token_ids]


def _work_of(message: Submit | Pool) -> str | int:
    return message.call if isinstance(message, Pool) else message.request.request_id


def left(work: str | int) -> FromWorker:
    """Return the message that a cancelled request (by its id) or pool (by its call) is dropped."""
    if isinstance(work, str):
        return Left(work)
    return CallFailed(work, failure_of(RequestCancelled("The request was cancelled.")))


def _is_long(asked: EngineRequest | PoolingRequest | Tokenize | Detokenize) -> bool:
    """True if tokenizing, preparing images or listing the bytes of token ids may take more than a few milliseconds."""
    if isinstance(asked, Detokenize):
        return len(asked.token_ids) > _LONG_CHARACTERS
    if isinstance(asked, PoolingRequest):
        return sum(map(_num_characters, asked.inputs)) > _LONG_CHARACTERS
    has_images = any(segment.media is not None for segment in asked.segments)
    return has_images or sum(len(segment.text) for segment in asked.segments) > _LONG_CHARACTERS


def _num_characters(one: PoolText) -> int:
    return len(one.text) + len(one.second or "") + len(one.token_ids or ())
