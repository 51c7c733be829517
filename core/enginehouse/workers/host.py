"""Worker side: loads the model and serves it. The same code runs in a process or in a thread.

The work is divided between these threads. The *engine thread* (the caller of :meth:`WorkerHost.run`) loads the model
and steps the engine; no other thread uses the runner. The *reader thread* receives messages and never waits for the
others, so a cancellation or the end of the server is noticed at once. The *intake threads* tokenize; one of them
handles the requests with constraints, which may take a second to compile.

Statistics are reported about once a second and before the engine becomes idle, so the server knows them without asking.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import msgspec
from attrs import frozen

from enginehouse.contract.backend import Runner
from enginehouse.contract.errors import AdapterRefused, EnginehouseError, ModelLoadError, PluginFailed
from enginehouse.contract.pooler import Pooler
from enginehouse.contract.types import EngineRequest, Resume
from enginehouse.engine.disk import DiskTier
from enginehouse.engine.loop import EngineOutput, StepEngine
from enginehouse.engine.media import EncodedPrompt
from enginehouse.engine.pooling.inputs import PoolInputs
from enginehouse.engine.pooling.loop import PoolEngine, PoolOutput
from enginehouse.engine.sequence import ActiveRequest
from enginehouse.plugins import Contained, PluginFailures, PluginRegistry
from enginehouse.plugins.call_notes import CallNotes
from enginehouse.process import rss_bytes
from enginehouse.workers.intake import Intake, left
from enginehouse.workers.ipc import FrameTooLarge, Link
from enginehouse.workers.media_bytes import ArrivedMedia
from enginehouse.workers.messages import (
    Cached,
    CallFailed,
    Cancel,
    CancelCall,
    Close,
    Detokenize,
    Died,
    Entered,
    FromWorker,
    GetCached,
    GetStats,
    GetView,
    Load,
    LoadAdapter,
    LoadFailed,
    LoadProgress,
    MediaBytes,
    MetricsReport,
    Pool,
    Pooled,
    Ready,
    StageBegan,
    Started,
    Stats,
    StepOutputs,
    StopThinking,
    Submit,
    ThinkingStopped,
    Tokenize,
    ToWorker,
    View,
    decode_to_worker,
    encode,
    failure_of,
    own_hello,
    printable,
)
from enginehouse.workers.parts import (
    bind_drafters,
    find_backend,
    load_adapters,
    open_disk,
    open_model,
    open_pooling,
    shut_down,
    use_exit_policy,
)

_KINDS = ("backends", "samplers", "logits_processors", "structured_decoders", "drafters", "exit_policies")
"""Kinds of plugin objects that work in a worker. It starts faster without the others, such as surfaces."""

_INTERVAL_S = 1.0


class MetricsReports:
    """Sends the statistics of one engine. Used on the engine thread.

    Args:
        is_process: True if the worker is a process, and so has its own memory.
        failures: the failures of plugins in the worker.
    """

    def __init__(
        self,
        engine: StepEngine | PoolEngine,
        send: Callable[[MetricsReport], None],
        *,
        is_process: bool,
        failures: PluginFailures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._send = send
        self._is_process = is_process
        self._failures = failures if failures is not None else PluginFailures()
        self._clock = clock
        self._sent_s = float("-inf")
        self._is_news = True  # the first report contains the size of the cache

    def after_step(self) -> None:
        """A step has ended."""
        self._is_news = True
        if self._clock() - self._sent_s >= _INTERVAL_S:
            self._report()

    def before_rest(self) -> None:
        """The engine is about to become idle."""
        if self._is_news:
            self._report()

    def _report(self) -> None:
        self._sent_s, self._is_news = self._clock(), False
        metrics = self._engine.metrics()
        if counts := self._failures.counts:
            metrics = msgspec.structs.replace(metrics, plugin_failures=dict(counts))
        if self._is_process:
            metrics = msgspec.structs.replace(metrics, rss_bytes=rss_bytes())
        self._send(MetricsReport(metrics))


_log = logging.getLogger(__name__)


@frozen
class _Enter:
    """A tokenized request, passed from an intake thread to the engine thread."""

    request: EngineRequest
    prompt: EncodedPrompt
    resume: Resume | None


@frozen
class _EnterPool:
    """The inputs of a pooling request, passed in the same way."""

    call: int
    made: PoolInputs


_Inbox = (
    Load
    | Cancel
    | CancelCall
    | GetStats
    | GetView
    | GetCached
    | StopThinking
    | LoadAdapter
    | Close
    | _Enter
    | _EnterPool
)


class WorkerHost:
    """Serves one model over one link.

    Args:
        link: the worker's end.
        on_server_gone: called on the reader thread when the server closed its end or died. A process exits here,
            even while the engine thread is busy; a thread can only be asked to end.
        notes: where calls into plugins are noted; None for a thread.
    """

    def __init__(
        self, link: Link, on_server_gone: Callable[[], None] | None = None, notes: CallNotes | None = None
    ) -> None:
        self._link = link
        self._notes = notes
        self._on_server_gone = on_server_gone
        self._inbox: SimpleQueue[_Inbox] = SimpleQueue()
        self._intake: Intake | None = None
        self._engine: StepEngine | PoolEngine | None = None
        self._disk: DiskTier | None = None
        self._failures = PluginFailures()
        self._registry: PluginRegistry | None = None
        self._media = ArrivedMedia()
        self._is_ended = False
        self._last_progress = LoadProgress(0.0, "")

    # -- engine thread -----------------------------------------------------------------------------

    def run(self) -> bool:
        """Load the model and serve until the server sends Close; returns False if the engine failed before."""
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        try:
            self._send(own_hello())
            first = self._inbox.get()
            engine = self._load(first) if isinstance(first, Load) else None
            if engine is not None:
                self._serve(engine)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - guard of the worker, which ends: after any error its state cannot be trusted
            return self._report_failure(error)
        finally:
            try:
                self._close()
            finally:
                self._is_ended = True  # the reader thread sees the end of the link, which the server did not cause
                self._link.close()
        return True

    def _report_failure(self, error: BaseException) -> bool:
        """Send the last message of a worker that fails; returns False if the engine failed, True if loading did."""
        text = f"{type(error).__name__}: {error}"
        if self._engine is None:
            _log.error("loading the model failed", exc_info=error)
            self._send(LoadFailed(failure_of(ModelLoadError(f"loading the model failed: {text}"))))
            return True
        _log.error("the engine failed", exc_info=error)
        self._send(Died(printable(f"the engine failed: {error.message if isinstance(error, PluginFailed) else text}")))
        return False

    def _close(self) -> None:
        """Close the engine, after the intake, whose threads use its tokenizer, and end the threads of plugins."""
        if self._intake is not None:
            self._intake.close()
        if self._engine is not None:
            self._engine.close()
        if self._registry is not None:
            self._registry.end_threads()

    def _load(self, message: Load) -> StepEngine | PoolEngine | None:
        """Open the model and report the result to the server; None if opening failed."""
        try:
            model, engine = self._open(message)
        except PluginFailed as error:
            self._send(LoadFailed(failure_of(_explained(error))))
            return None
        except EnginehouseError as error:
            self._send(LoadFailed(failure_of(error)))
            return None
        self._intake = Intake(
            engine,
            model.tokenizer,
            self._send,
            lambda *item: self._inbox.put(_Enter(*item)),
            enter_pool=lambda *item: self._inbox.put(_EnterPool(*item)),
            guard=engine.guard,
        )
        self._intake.start()
        self._engine = engine
        if self._on_server_gone is not None:  # a process of its own
            _exempt_from_collection()
        self._send(Ready(msgspec.structs.replace(engine.info, engine=engine.capabilities)))
        return engine

    def _open(self, message: Load) -> tuple[Runner | Pooler, StepEngine | PoolEngine]:
        self._registry = registry = PluginRegistry.load(message.plugins, builtin=[message.backend], kinds=_KINDS)
        registry.failures.notes, registry.failures.max_call_s = self._notes, message.plugin_timeout_s
        self._failures = registry.failures
        opened = open_model(find_backend(registry, message.backend), message, self._report)
        with contextlib.ExitStack() as undo:
            undo.callback(_close, opened)
            if isinstance(opened, Pooler) or message.pooling.rerank is not None:
                pooling = open_pooling(opened, message, self._report_turn)
                undo.pop_all()
                return opened, pooling
            runner = opened
            slots = message.engine.slots
            if message.exit_policy is not None:
                use_exit_policy(registry, message.exit_policy, runner, message.backend)
            drafters = bind_drafters(registry, message.drafters, runner, slots, self._report)
            undo.callback(shut_down, drafters)
            if message.prefix_disk is not None:  # after the drafters: a draft head is part of saved sequences
                self._disk = open_disk(message.prefix_disk, message, runner)
            if self._disk is not None:
                undo.callback(self._disk.close)
            engine = StepEngine(
                runner,
                message.engine,
                registry.samplers,
                registry.structured_decoders.values(),
                drafters=drafters,
                on_start=self._report_start,
                on_started=self._report_started,
                disk=self._disk,
            )
            load_adapters(engine, message)
            undo.pop_all()
        return runner, engine

    def _report_turn(self, call: int, is_computing: bool) -> None:
        self._send(StageBegan(call, "request" if is_computing else "waiting"))

    def _report_start(self, request: ActiveRequest) -> None:
        self._send(StageBegan(request.request.request_id, "request"))

    def _report_started(self, request: ActiveRequest) -> None:
        self._send(Started(request.request.request_id, request.usage.snapshot(), request.cache_miss))

    def _report(self, share: float, text: str) -> None:
        """Forward load progress to the server, but only if the text changes or the share changes by 1 %."""
        last = self._last_progress
        if text != last.text or abs(share - last.share) >= 0.01:
            self._last_progress = LoadProgress(share, printable(text))
            self._send(self._last_progress)

    def _serve(self, engine: StepEngine | PoolEngine) -> None:
        """Run the engine thread's loop: handle messages, then run one step; blocks without work."""
        is_process = self._on_server_gone is not None
        reports = MetricsReports(engine, self._send, is_process=is_process, failures=self._failures)
        while self._take_messages(engine, reports):
            if isinstance(engine, PoolEngine):
                self._send_results(engine.step())
            elif outputs := engine.step():
                self._send_outputs(outputs)
            reports.after_step()

    def _take_messages(self, engine: StepEngine | PoolEngine, reports: MetricsReports) -> bool:
        """Handle all queued messages; returns False after Close. Blocks while the engine has nothing to do."""
        while True:
            is_idle = not engine.has_work()
            if is_idle and self._inbox.empty():
                reports.before_rest()
            try:
                message = self._inbox.get(block=is_idle, timeout=self._disk.tends_in_s() if self._disk else None)
            except Empty:
                if not is_idle or self._disk is None:
                    return True
                self._disk.flush_when_idle()
                continue
            if not self._apply(engine, message):
                return False

    def _apply(self, engine: StepEngine | PoolEngine, message: _Inbox) -> bool:
        """Handle one message; returns False after Close."""
        match message:
            case _Enter() if isinstance(engine, StepEngine):
                self._add(engine, message)
            case _EnterPool() if isinstance(engine, PoolEngine):
                self._add_pool(engine, message)
            case Cancel() if isinstance(engine, StepEngine):
                engine.cancel(message.request_id)
                self._send(left(message.request_id))
            case CancelCall() if isinstance(engine, PoolEngine):
                engine.cancel(message.call)
                self._send(left(message.call))
            case GetStats():
                self._send(Stats(message.call, engine.stats()))
            case GetView():
                self._send(StageBegan(message.call, "request"))
                self._send(View(message.call, engine.view()))
            case GetCached():
                self._send(StageBegan(message.call, "request"))
                self._send(Cached(message.call, engine.cached_tokens(message.token_ids, message.namespace)))
            case StopThinking():
                self._send(ThinkingStopped(message.call, engine.stop_thinking(message.request_id)))
            case LoadAdapter():
                self._load_adapter(engine, message)
            case Close():
                return False
        return True

    def _load_adapter(self, engine: StepEngine | PoolEngine, message: LoadAdapter) -> None:
        self._send(StageBegan(message.call, "request"))
        try:
            if not isinstance(engine, StepEngine):
                raise AdapterRefused("a pooling model takes no adapters", "adapters")
            if message.removes:
                engine.remove_adapter(message.adapter.digest)
            else:
                engine.load_adapter(message.adapter)
        except EnginehouseError as error:
            self._send(CallFailed(message.call, failure_of(error)))
        else:
            self._send(Stats(message.call, engine.stats()))

    def _add_pool(self, engine: PoolEngine, entering: _EnterPool) -> None:
        with Contained(lambda error: self._send_results([(entering.call, error)]), "beginning the request failed"):
            engine.add(entering.call, entering.made)

    def _add(self, engine: StepEngine, entering: _Enter) -> None:
        request_id = entering.request.request_id
        self._send(StageBegan(request_id, "request"))
        with Contained(lambda error: self._send_outputs([(request_id, error)]), "beginning the request failed"):
            prompt = entering.prompt
            engine.add(entering.request, prompt.token_ids, entering.resume, prompt.chunks)
            self._send(Entered(request_id))

    def _send_results(self, outputs: list[PoolOutput]) -> None:
        """Send the results of pooling requests, each in a message of its own, because they are large."""
        for call, output in outputs:
            if isinstance(output, EnginehouseError):
                self._send(CallFailed(call, failure_of(output)))
            else:
                self._send(Pooled(call, output))

    def _send_outputs(self, outputs: list[EngineOutput]) -> None:
        """Send the outputs of a step in one message."""
        self._send(
            StepOutputs(
                [
                    (request_id, failure_of(output) if isinstance(output, EnginehouseError) else output)
                    for request_id, output in outputs
                ]
            )
        )

    # -- reader thread -----------------------------------------------------------------------------

    def _read(self) -> None:
        """Receive messages until the server is gone. A worker that can no longer receive ends."""
        with Contained(
            lambda error: self._send(Died(printable(error.message))), "the worker could not receive any more"
        ):
            try:
                while (payload := self._link.receive()) is not None:
                    self._dispatch(decode_to_worker(payload))
            except (FrameTooLarge, msgspec.DecodeError):
                _log.exception("the server sent something that is not a message")
        if self._on_server_gone is not None and not self._is_ended:
            self._on_server_gone()
        self._inbox.put(Close())

    def _dispatch(self, message: ToWorker) -> None:
        intake = self._intake
        match message:
            case Load() | GetStats() | GetView() | GetCached() | StopThinking() | LoadAdapter() | Close():
                self._inbox.put(message)
            case Cancel():
                if intake is None or not intake.cancel(message.request_id):
                    if isinstance(self._engine, StepEngine):
                        self._engine.interrupt(message.request_id)
                    self._inbox.put(message)
            case CancelCall():
                if intake is None or not intake.cancel(message.call):
                    if isinstance(self._engine, PoolEngine):
                        self._engine.interrupt(message.call)
                    self._inbox.put(message)
            case MediaBytes():
                self._media.add(message)
            case Submit() | Pool() if intake is not None:
                intake.admit(self._media.complete(message))
            case Tokenize() | Detokenize() if intake is not None:
                intake.call(self._media.complete(message))
            case _:
                _log.error("the server sent %s before the model was ready", type(message).__name__)

    # -- any thread --------------------------------------------------------------------------------

    def _send(self, message: FromWorker) -> None:
        """Send a message; dropped if the server is gone, which the reader thread notices too, ending the worker."""
        self._link.send(encode(message))


def _exempt_from_collection() -> None:
    """Exempt the loaded libraries from garbage collection, whose full passes would pause all sequences.

    With torch and transformers, a full pass over their objects takes 0.2 to 0.3 s.
    """
    gc.collect()
    gc.freeze()


def _close(model: Runner | Pooler) -> None:
    """Close a model; a failure, which its guard logs, does not hide the reason for closing it."""
    with contextlib.suppress(PluginFailed):
        model.close()


def _explained(error: PluginFailed) -> ModelLoadError:
    """Return the reason why a model cannot be loaded, for its operator: with the exception, which clients never see."""
    cause = error.__cause__
    return ModelLoadError(error.message if cause is None else f"{error.message} {type(cause).__name__}: {cause}")
