"""The worker's intake threads: prompts are tokenized and checked here, while the engine thread computes.

A long prompt delays only the prompts queued after it, never a running stream and never a cancellation: the reader
thread passes cancellations directly to :class:`Intake`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

import numpy as np

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.errors import EnginehouseError, GenerationFailed, InvalidRequest
from enginehouse.contract.types import EngineRequest, Resume, Segment
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.text.segments import encode_segments, min_tokens
from enginehouse.plugins import Guard, guard_of
from enginehouse.plugins.guard import current_request
from enginehouse.workers.ipc import FrameTooLarge
from enginehouse.workers.messages import (
    Accepted,
    CallFailed,
    Detokenize,
    Detokenized,
    FromWorker,
    Left,
    Rejected,
    StageBegan,
    Submit,
    Tokenize,
    Tokenized,
    failure_of,
)
from enginehouse.workers.requests import NO_CALL

# Tokenized in about 30 ms, even by a tokenizer that needs a microsecond per character.
_LONG_CHARACTERS = 32_768

_log = logging.getLogger(__name__)


_Queue = SimpleQueue[Submit | Tokenize | Detokenize | None]


class Intake:
    """Turns Submit messages into tokenized requests.

    Long prompts have their own thread, so that short ones do not wait for them. So do requests with a constraint, which
    may take a second to compile.

    Args:
        engine: checks whether a request fits; only its thread-safe methods are used.
        tokenizer: the tokenizer of the model.
        send: sends a message to the server.
        enter: passes a tokenized request to the engine thread.
        guard: the guard of the backend, whose tokenizer is called here.
    """

    def __init__(
        self,
        engine: StepEngine,
        tokenizer: Tokenizer,
        send: Callable[[FromWorker], None],
        enter: Callable[[EngineRequest, list[int], Resume | None], None],
        guard: Guard | None = None,
    ) -> None:
        self._guard = guard if guard is not None else guard_of(tokenizer, "backend")
        self._engine = engine
        self._tokenizer = tokenizer
        self._send = send
        self._enter = enter
        self._queue: _Queue = SimpleQueue()
        self._long: _Queue = SimpleQueue()
        self._constrained: _Queue = SimpleQueue()
        self._queues = {"constrained intake": self._constrained, "long intake": self._long, "intake": self._queue}
        self._lock = threading.Lock()
        self._waiting: set[str] = set()  # submitted, not yet handed to the engine thread, not cancelled
        self._in_progress: dict[str, bool] = {}  # being tokenized or compiled; True if cancelled since then
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

    def admit(self, message: Submit) -> None:
        """Queue a request. The server bounds their number, see :mod:`enginehouse.workers.request_queue`."""
        with self._lock:
            self._waiting.add(message.request.request_id)
        usual = self._queue if message.request.constraint is None else self._constrained
        (self._long if _is_long(message.request) else usual).put(message)

    def call(self, message: Tokenize | Detokenize) -> None:
        """Queue a call; the watchdog's ping passes through all threads, because any of them may hang."""
        usual = self._constrained if message.call == NO_CALL else self._queue
        (self._long if _is_long(message) else usual).put(message)

    def cancel(self, request_id: str) -> bool:
        """Drop a request, and send Left if no thread is working on it; False if the engine thread already has it."""
        with self._lock:
            if request_id not in self._waiting:
                return False
            self._waiting.remove(request_id)
            is_in_progress = request_id in self._in_progress
            if is_in_progress:
                self._in_progress[request_id] = True
        if not is_in_progress:
            self._send(Left(request_id))
        return True

    # -- intake threads ----------------------------------------------------------------------------

    def _run(self, queue: _Queue) -> None:
        while (message := queue.get()) is not None and not self._is_closing:
            # Failures of plugins are logged with the request.
            current_request.set(partial(str, message.request.request_id) if isinstance(message, Submit) else None)
            if isinstance(message, Submit):
                self._begin(message.request, message.resume)
            elif message.call == NO_CALL and queue is not self._queue:
                (self._long if queue is self._constrained else self._queue).put(message)
            else:
                self._answer(message)

    def _begin(self, request: EngineRequest, resume: Resume | None) -> None:
        """Take in a request unless it was cancelled while it waited; if cancelled meanwhile, send Left afterwards."""
        request_id = request.request_id
        with self._lock:
            if request_id not in self._waiting:
                return
            self._in_progress[request_id] = False
        self._send(StageBegan(request_id, "text"))
        self._take(request, resume)
        with self._lock:
            is_cancelled = self._in_progress.pop(request_id)
        if is_cancelled:
            self._send(Left(request_id))

    def _take(self, request: EngineRequest, resume: Resume | None) -> None:
        request_id = request.request_id
        with contained(lambda error: self._reject(request_id, error), "checking the request failed"):
            with self._guard.of_request(request_id).calling("encode of its tokenizer"):
                token_ids = self._token_ids(request)
            if request.constraint is not None:
                self._send(StageBegan(request_id, "constraint"))
            self._engine.check(request, len(token_ids))
            # Accepted is sent before the engine thread receives the request, so it precedes the request's first event.
            shown = tuple(token_ids) if request.return_token_ids else None
            self._send(Accepted(request_id, len(token_ids), shown))
            with self._lock:
                if request_id in self._waiting:
                    self._waiting.remove(request_id)
                    self._enter(request, token_ids, resume)

    def _reject(self, request_id: str, error: EnginehouseError) -> None:
        with self._lock:
            self._waiting.discard(request_id)
        self._send(Rejected(request_id, failure_of(error)))

    def _token_ids(self, request: EngineRequest) -> list[int]:
        if request.token_ids is not None:
            return list(request.token_ids)
        # A prompt that cannot fit is refused by its text length, which saves the time of tokenizing it.
        self._engine.check_length(min_tokens(self._tokenizer, request.segments), is_lower_bound=True)
        return self._encode(request.segments, request.add_special)

    def _encode(self, segments: Sequence[Segment], add_special: bool) -> list[int]:
        token_ids = encode_segments(self._tokenizer, segments, add_special)
        if wrong := [kind for kind in set(map(type, token_ids)) if not issubclass(kind, int | np.integer)]:
            what = f"gave {wrong[0].__name__} as a token id"
            raise self._guard.mistake("encode of its tokenizer", what, self._tokenizer.encode)
        return token_ids

    def _answer(self, message: Tokenize | Detokenize) -> None:
        if message.call != NO_CALL:
            self._send(StageBegan(message.call, "text"))
        try:
            with self._guard.calling("its tokenizer"):
                if isinstance(message, Tokenize):
                    token_ids = self._encode(message.segments, message.add_special)
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


def _is_long(asked: EngineRequest | Tokenize | Detokenize) -> bool:
    """True if tokenizing, or listing the bytes of token ids, may take more than a few milliseconds."""
    if isinstance(asked, Detokenize):
        return len(asked.token_ids) > _LONG_CHARACTERS
    return sum(len(segment.text) for segment in asked.segments) > _LONG_CHARACTERS


@contextmanager
def contained(fail: Callable[[EnginehouseError], None], what: str) -> Iterator[None]:
    """Guard of one request: an error in the block fails this request and no other one."""
    try:
        yield
    except EnginehouseError as error:
        fail(error)
    except Exception as error:  # noqa: BLE001 - an error of core itself; those of plugins come from their guards
        _log.error("%s", what, exc_info=error)
        fail(GenerationFailed(f"{what[0].upper()}{what[1:]}: {type(error).__name__}: {error}"))
