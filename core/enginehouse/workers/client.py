"""Server side of a worker: an :class:`enginehouse.contract.engine.Engine` that forwards to a worker over a link.

Used on the event loop. Each engine step is one message and wakes each of its requests once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve
from msgspec.structs import replace

from enginehouse.contract.adapters import Adapter
from enginehouse.contract.backend import Progress
from enginehouse.contract.errors import (
    EngineDead,
    InvalidRequest,
    ModelLoadError,
    ModelOverloaded,
    Overloaded,
    PluginError,
    WorkerDied,
)
from enginehouse.contract.inspection import EngineMetrics, EngineView
from enginehouse.contract.types import (
    EngineRequest,
    EngineStats,
    ModelInfo,
    PoolingRequest,
    PoolingResult,
    Resume,
    Segment,
)
from enginehouse.plugins.call_notes import NotedCall
from enginehouse.settings.limits import LimitsSettings
from enginehouse.workers.health import LoadWatch, Watchdog, lost_request, with_failures
from enginehouse.workers.launch import Worker, check_hello, explain, start_worker
from enginehouse.workers.media_bytes import MediaSender
from enginehouse.workers.messages import (
    Accepted,
    CallFailed,
    Cancel,
    Close,
    Detokenize,
    Detokenized,
    Died,
    Entered,
    FromWorker,
    GetCached,
    GetStats,
    GetView,
    Hello,
    Left,
    Load,
    LoadAdapter,
    LoadFailed,
    LoadProgress,
    MetricsReport,
    PoolAccepted,
    Pooled,
    Ready,
    Rejected,
    StageBegan,
    Started,
    Stats,
    StepOutputs,
    StopThinking,
    Submit,
    ThinkingStopped,
    Tokenize,
    Tokenized,
    ToWorker,
    View,
    decode_from_worker,
    pack,
)
from enginehouse.workers.pool_calls import PoolCalls
from enginehouse.workers.process import Connection, ExitStatus
from enginehouse.workers.remote import RemoteWorker
from enginehouse.workers.request_queue import RequestQueue
from enginehouse.workers.request_table import NO_CALL, Calls, RequestTable, WorkerStream, WorkObserver, settle

# Maximum time for a worker to close its model before it is killed; nothing is lost if it is killed.
_CLOSE_S = 2.0
_CLOSE_WITH_DISK_S = 15.0  # sequences that are only in memory are saved first

# After the link broke: time to wait for the exit status, which gives the reason. After the process ended: time to wait
# for its last messages, in case a process that it started keeps the link open.
_EXIT_STATUS_GRACE_S = 2.0

_KILL_S = 1.0  # time to wait for a killed worker, or for a worker thread, which cannot be killed

_DUMP_S = 0.2  # time for a hanging worker to write the tracebacks of its threads

_HELLO_S = 60.0  # time limit for Hello, which a worker sends as soon as it has imported enginehouse

# Limit of unsent bytes for a worker that does not read; new requests are refused to bound the memory.
_MAX_UNSENT_BYTES = 64 * 1024 * 1024

UNBLAMED = frozenset({"sampler", "logits processor", "drafter", "exit policy"})
"""Kinds of plugin objects whose calls do not depend on what clients wrote, as prompts and constraints do."""


class WorkerEngine:
    """An engine in a worker. Create one with :meth:`open`.

    Attributes:
        info: information about the loaded model.
        died: the reason, once the worker has ended without having been asked to.
        is_killed_from_outside: True if another process killed the worker, so that its work did not cause the end.
        has_died_working: True if it ended by itself while it worked on requests or calls.
        ended_by: the call into a plugin that ended it or hung, if it is not for the request to answer for.
        ended_in: the call into a plugin of another distribution in which it ended or hung, if it was in no other one.
        metrics: the last statistics that the worker reported.
        request_queue: the queue of its model, which outlives the worker.
        place: name of the replica, if there are several.
    """

    info: ModelInfo

    def __init__(self, worker: Worker, request_queue: RequestQueue, step_timeout_s: float = 0.0) -> None:
        self._loop = asyncio.get_running_loop()
        self.place = worker.place if isinstance(worker, RemoteWorker) else ""
        self._worker = worker
        self._load_watch: LoadWatch | None = None
        self._connection = Connection(pack, decode_from_worker, self._handle, self._on_lost)
        self.metrics = EngineMetrics()
        self.died: asyncio.Future[EngineDead] = self._loop.create_future()
        self.is_killed_from_outside = self.has_died_working = False
        self.ended_by: NotedCall | None = None
        self.ended_in: NotedCall | None = None
        self._greeted: asyncio.Future[Hello] = self._loop.create_future()
        self._loaded: asyncio.Future[ModelInfo] = self._loop.create_future()
        self.request_queue = request_queue
        self._requests = RequestTable(self.request_queue)
        self._calls = Calls()
        self._pools = PoolCalls(self._calls, request_queue, self._connection.send)
        self._media = MediaSender(self._connection, self._begin_sending)
        self._reason: str | None = None  # exit reason reported by the worker
        self._step_watchdog = Watchdog(
            step_timeout_s,
            lambda: bool(self._requests or self._pools),
            lambda: self._connection.send(GetStats(NO_CALL)),
            lambda: self._end_hung(f"a step took longer than {step_timeout_s:g} s"),
        )
        self._intake_watchdog = Watchdog(
            step_timeout_s,
            lambda: bool(self._calls or self._media.num_open or not all(one.is_accepted for one in self._requests)),
            lambda: self._connection.send(Detokenize(NO_CALL, ())),
            lambda: self._end_hung(f"tokenizing took longer than {step_timeout_s:g} s"),
        )
        self._is_ready = self._is_closing = False
        self._close_s = _CLOSE_S
        worker.ended.add_done_callback(lambda _: self._loop.call_later(_EXIT_STATUS_GRACE_S, self._on_exit))

    @property
    def is_open(self) -> bool:
        """True if it accepts requests, as far as the server knows."""
        return self._is_ready and not self._is_closing and not self.died.done() and self._connection.is_open

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None if it is a thread."""
        return self._worker.pid

    @property
    def num_open(self) -> int:
        """Number of requests and calls that have not ended."""
        return len(self._requests) + len(self._calls)

    # -- lifecycle ---------------------------------------------------------------------------------

    @classmethod
    async def open(
        cls,
        load: Load,
        *,
        isolation: str,
        python: str | None,
        on_progress: Progress,
        request_queue: RequestQueue | None = None,
        step_timeout_s: float = 0.0,
        load_timeout_s: float = 0.0,
        remote: RemoteWorker | None = None,
    ) -> WorkerEngine:
        """Start a worker and wait until it has loaded the model; cancelling this ends the worker.

        Args:
            load: the model to load.
            isolation: ``process`` or ``thread``.
            python: interpreter for the process; None is the current one.
            on_progress: called on the event loop while the model loads.
            request_queue: the queue of the model; None is one of its own, with the default limits.
            step_timeout_s: maximum time of a step, or of tokenizing one prompt, before the worker is killed; 0: none.
            load_timeout_s: maximum time without load progress before the worker is killed; 0 disables the limit.
            remote: a worker elsewhere, which is taken instead of starting one.

        Raises:
            ModelLoadError, MissingDependency, ConfigError: the worker cannot load the model and says why, or the load
                makes no progress.
            EngineDead: the worker died while loading.
        """
        path = f"{load.options_path}.python"
        try:
            worker = remote or start_worker(isolation, python)
        except ModelLoadError as error:
            raise error if python is None else type(error)(f"{path}: {error.message}") from error
        if request_queue is None:
            request_queue = RequestQueue(load.engine.slots, LimitsSettings())
        engine = cls(worker, request_queue, step_timeout_s)
        if load.prefix_disk is not None:
            engine._close_s = _CLOSE_WITH_DISK_S
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(engine.close)
            undo.callback(worker.kill)
            try:
                await engine._connection.open(worker.socket)
                await engine._greet(python, path)
                engine._connection.send(load)
                engine.info = await engine._wait_loaded(load_timeout_s, on_progress, load.options_path)
            except (PluginError, ModelLoadError) as error:
                if python is None or path in error.message:
                    raise
                raise ModelLoadError(f"{error.message} (in the environment of {path}: {python})") from error
            engine._is_ready = True
            undo.pop_all()
        return engine

    async def _greet(self, python: str | None, path: str) -> None:
        """Wait for the worker's Hello and check that its versions match."""
        try:
            async with asyncio.timeout(_HELLO_S):
                hello = await self._greeted
        except TimeoutError:
            raise ModelLoadError(f"{path}: {python or 'the worker'} sent nothing for {_HELLO_S:g} s") from None
        except EngineDead as error:
            if python is None:
                raise
            raise await explain(python, path, error.message) from error
        check_hello(hello, path)

    async def _wait_loaded(self, timeout_s: float, on_progress: Progress, path: str) -> ModelInfo:
        """Wait until the model is loaded; a load without progress fails, and its worker is killed."""

        def refuse(why: str) -> None:
            settle(self._loaded, ModelLoadError(f"{why}; if it needs longer, raise {path}.load_timeout_s"))

        self._load_watch = watch = LoadWatch(timeout_s, on_progress, refuse)
        try:
            return await self._loaded
        finally:
            watch.end()

    def _end_hung(self, reason: str) -> None:
        """Kill the worker because one of its threads hangs; only the end of the process stops that."""
        self._reason = reason
        self._worker.dump_threads()
        self._loop.call_later(_DUMP_S, self._kill)

    def _kill(self) -> None:
        self._worker.kill()
        self._connection.abort()

    async def close(self) -> None:
        """Stop the worker; running requests end with EngineDead."""
        self._is_closing = True
        self._end_everything(EngineDead("The server is shutting down."))
        if self._is_ready and self._connection.is_open:
            self._connection.send(Close())
            await self._wait_ended(self._close_s)
        self._worker.kill()
        self._connection.abort()
        await self._wait_ended(_KILL_S)
        if self._worker.notes is not None:
            self._worker.notes.close()

    async def _wait_ended(self, timeout_s: float) -> None:
        await asyncio.wait([self._worker.ended], timeout=timeout_s)

    def _on_lost(self, reason: str | None) -> None:
        """Handle the end of the link: wait a limited time for the exit status."""
        self._reason = self._reason or reason
        if self._worker.ended.done():
            self._on_exit()
        else:
            self._worker.ended.add_done_callback(lambda _: self._on_exit())
            self._loop.call_later(_EXIT_STATUS_GRACE_S, self._on_exit)

    def _on_exit(self) -> None:
        """Handle the death of the worker, or the loss of its link: fail everything that waits for it."""
        if self._is_closing or self.died.done():
            return
        status = self._worker.ended.result() if self._worker.ended.done() else ExitStatus("closed its link")
        reason = self._reason or f"the worker {status.text}"
        reason = self._load_watch.explain(reason) if self._load_watch is not None else reason
        self.is_killed_from_outside = status.is_from_outside and self._reason is None
        noted = [] if self.is_killed_from_outside or self._worker.notes is None else self._worker.notes.read()
        if noted := [replace(one, request_id=self._requests.request_id(one.request_id)) for one in noted]:
            reason = f"{reason}, {', '.join(map(str, noted))}"
            self.ended_by = next((call for call in noted if call.kind in UNBLAMED), None)
            self.ended_in = noted[0] if len({one.plugin for one in noted}) == 1 and not noted[0].is_own else None
            self.metrics = with_failures(self.metrics, noted)
        is_working = bool(self._calls) or self._requests.is_any_begun
        self.has_died_working = is_working and self.ended_by is None
        self._worker.kill()
        self._connection.abort()
        self.died.set_result(EngineDead(reason))
        self._end_everything(WorkerDied(lost_request(reason) if self._is_ready else reason))

    def _end_everything(self, error: EngineDead) -> None:
        self._step_watchdog.end()
        self._intake_watchdog.end()
        self._requests.fail_all(error)
        self._pools.clear()
        self._calls.fail_all(error)
        for future in (self._greeted, self._loaded):
            settle(future, error)

    # -- requests ----------------------------------------------------------------------------------

    async def submit(
        self, request: EngineRequest, *, resume: Resume | None = None, observer: WorkObserver | None = None
    ) -> WorkerStream:
        """Queue a request; returns when the worker has accepted it.

        Args:
            request: the request to serve.
            resume: progress of the answer so far, made by another worker or earlier by this one.
            observer: called with every event of the request.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: too many requests or tokens wait.
            EngineDead: the worker is gone.
        """
        request_id = request.request_id
        if request_id in self._requests:
            raise InvalidRequest(f"A request with the id {request_id!r} is running.", "request_id")
        link_id = self._requests.link_id(request_id, is_resumed=resume is not None)
        stream = WorkerStream(request_id, self._loop, lambda: self._cancel(link_id), observer)
        media_call = self._calls.next_number()
        async with self._media.sent(media_call, request.segments) as segments:
            self._check_room(is_returning=resume is not None)
            if resume is None and request_id not in self.request_queue:
                self.request_queue.check(request.caller, request.priority)
            request = evolve(request, segments=segments)
            if resume is not None:
                # A request that has once started must not time out in the queue again.
                request = evolve(request, request_id=link_id, queue_timeout_s=None)
            self._connection.send(Submit(request, resume, media_call))
        self._requests.add(link_id, stream)
        self.request_queue.enter(stream.request_id, request.caller, request.priority)
        self._begin_watch()
        try:
            await stream.wait_accepted()
        except asyncio.CancelledError:
            stream.cancel()
            raise
        if resume is None:
            await self._check_tokens(stream)
        return stream

    async def _check_tokens(self, stream: WorkerStream) -> None:
        """Take a request back if it is too long to wait with the others, which is known once it is tokenized."""
        try:
            self.request_queue.check_tokens(stream.request_id, stream.num_prompt_tokens)
        except Overloaded:
            stream.cancel()
            await stream.left  # until then it may be the reason for the worker's death
            self._check_room()
            raise

    def _cancel(self, link_id: str) -> None:
        if self._requests.cancel(link_id):
            self._connection.send(Cancel(link_id))

    def _begin_watch(self) -> None:
        self._step_watchdog.begin()
        self._intake_watchdog.begin()

    def _begin_sending(self) -> None:
        self._check_room(is_returning=True)
        self._intake_watchdog.begin()

    async def pool(self, request: PoolingRequest, observer: WorkObserver | None = None) -> PoolingResult:
        """Return the rows of a request, see :meth:`PoolCalls.answer_to`."""
        self._check_room()
        return await self._pools.answer_to(request, observer, self._begin_watch)

    async def tokenize(
        self, segments: Sequence[Segment], add_special: bool, observer: WorkObserver | None = None
    ) -> list[int]:
        """Return the token ids of a prompt, exactly as ``submit`` would encode it."""
        number = self._calls.next_number()
        async with self._media.sent(number, segments) as rest:
            self._check_room()
            self._connection.send(Tokenize(number, rest, add_special))
        self._begin_watch()
        token_ids: list[int] = await self._calls.answer_to(number, observer)
        return token_ids

    async def detokenize(self, token_ids: Sequence[int], observer: WorkObserver | None = None) -> str:
        """Return the text of token ids; raises InvalidRequest for ids outside the vocabulary."""
        return b"".join(await self.pieces(token_ids, observer)).decode("utf-8", "replace")

    async def pieces(self, token_ids: Sequence[int], observer: WorkObserver | None = None) -> list[bytes]:
        """Return the bytes of each token id; raises InvalidRequest for ids outside the vocabulary."""
        pieces: list[bytes] = await self._call(lambda call: Detokenize(call, tuple(token_ids)), observer)
        return pieces

    async def stats(self) -> EngineStats:
        """Return the engine's current statistics; answered after the running step."""
        stats: EngineStats = await self._call(GetStats)
        return stats

    async def view(self, observer: WorkObserver | None = None) -> EngineView:
        """Return a snapshot of running and waiting requests and of the cache; answered after the running step."""
        view: EngineView = await self._call(GetView, observer)
        requests = tuple(
            replace(request, request_id=self._requests.request_id(request.request_id)) for request in view.requests
        )
        return replace(view, requests=requests)

    async def cached_tokens(
        self, token_ids: Sequence[int], namespace: str, observer: WorkObserver | None = None
    ) -> int:
        """Return how much of a prompt the prefix cache holds for a namespace; answered after the running step."""
        num_tokens: int = await self._call(lambda call: GetCached(call, tuple(token_ids), namespace), observer)
        return num_tokens

    async def stop_thinking(self, request_id: str) -> int:
        """Force the end of the reasoning of a request's choices; return their number, 0 if none is in its reasoning."""
        link_id, stream = self._requests.find(request_id)
        num_choices: int = await self._call(lambda call: StopThinking(call, link_id))
        if num_choices and stream is not None:
            stream.observer.thinking_stopped()
        return num_choices

    async def change_adapter(self, adapter: Adapter, *, removes: bool = False) -> None:
        """Load an adapter if there is a place for it, or unload it after its last use. Raises AdapterRefused."""
        await self._call(lambda call: LoadAdapter(call, adapter, removes))

    async def _call(self, message_for: Callable[[int], ToWorker], observer: WorkObserver | None = None) -> Any:
        """Send the message that ``message_for`` creates for a new call number, and wait for its answer."""
        number = self._calls.next_number()
        self._check_room()
        self._connection.send(message_for(number))
        self._begin_watch()
        return await self._calls.answer_to(number, observer)

    def _check_room(self, *, is_returning: bool = False) -> None:
        if self.died.done():
            raise WorkerDied(lost_request(self.died.result().message))
        if self._is_closing:
            raise EngineDead(lost_request("its worker is gone"))
        if not self._connection.is_open:
            raise WorkerDied(lost_request("its worker is gone"))
        # A new worker gets all requests that return at once; they were accepted before, so their memory is bounded.
        if not is_returning and self._connection.num_unsent_bytes > _MAX_UNSENT_BYTES:
            raise ModelOverloaded("The model's worker does not take requests at the moment; try again.")

    # -- messages of the worker --------------------------------------------------------------------

    def _handle(self, message: FromWorker) -> None:
        if isinstance(message, StepOutputs):
            self._step_watchdog.heard()
            self._requests.distribute(message)
            return
        self._hear(message)
        match message:
            case Accepted() | Rejected() | Entered() | Started() | Left() | StageBegan(work=str()):
                self._requests.handle(message)
            case MetricsReport():
                self.metrics = message.metrics
            case Hello():
                settle(self._greeted, message)
            case LoadProgress():
                if self._load_watch is not None:
                    self._load_watch.heard(message.share, message.text)
            case Ready():
                settle(self._loaded, message.info)
            case LoadFailed():
                settle(self._loaded, message.failure.to_error())
            case Died():
                self._on_lost(message.reason)  # its link may stay open until all of its threads have finished
            case PoolAccepted():
                self._pools.accepted(message)
            case _:
                self._pools.note(message)
                self._calls.handle(message)

    def _hear(self, message: FromWorker) -> None:
        """Tell the watchdog of the thread that has sent a message."""
        if isinstance(message, Entered | Started | Pooled | Stats | View | ThinkingStopped):
            self._step_watchdog.heard()
        elif isinstance(message, Accepted | Rejected | PoolAccepted | Tokenized | Detokenized | CallFailed):
            self._intake_watchdog.heard()
