"""The exceptions that Enginehouse raises deliberately.

::

    EnginehouseError
    ├── ConfigError                 the configuration file, environment or command line is wrong
    ├── PluginError                 a plugin could not be loaded or misbehaved; names the plugin
    │   ├── MissingDependency       says which extra to install
    │   └── PluginFailed            it raised an exception or gave a wrong result when called; also a GenerationFailed
    ├── RequestError                the request is wrong; it was refused and nothing was lost
    │   ├── InvalidRequest          a field has a wrong type, range or combination
    │   ├── UnsupportedParameter    a known field that this model or version cannot honour
    │   ├── UnsupportedTask         the model does not do what the request asks for
    │   ├── ContextLengthExceeded   the prompt does not fit the context
    │   ├── RenderError             the chat template refused the messages, failed or took too long
    │   ├── ModelNotFound           no model is served under that name
    │   ├── AdapterNotFound         the model has no adapter of that name
    │   ├── AdapterRefused          the files of an adapter are damaged, or do not fit the model
    │   ├── SourceNotAllowed        the settings do not allow adding a model from that source
    │   ├── SourceNotFound          no model is at a source that the settings allow
    │   └── ReloadRefused           a new configuration is invalid; the old one stays active
    ├── ReloadFailed                a new configuration could not be planned; the old one stays active
    ├── RequestCancelled            the server's operator has cancelled the request
    ├── RateLimited                 the caller has reached a rate limit; try again later
    ├── Overloaded                  the caller's own requests fill the queue; try again later
    │   ├── ModelOverloaded         other requests fill the queue, or the wait would be too long
    │   └── ServerOverloaded        the server as a whole is overloaded
    ├── TimedOut                    the request took longer than the settings allow
    │   ├── QueueTimeout            it did not start in time; try again later
    │   ├── FirstTokenTimeout       no output in time
    │   └── TotalTimeout            the answer was not complete in time
    ├── ModelConflict               a model cannot be loaded or unloaded now
    ├── ServerStopping              the server is shutting down; try another server, or later
    └── EngineError                 the engine failed
        ├── ModelLoadError          a model could not be opened
        │   ├── ModelTooLarge       it needs more memory than the budget can provide
        │   ├── ResourcesExhausted  the system has no file descriptors or processes left for a worker
        │   └── DownloadError       it could not be downloaded from its hub
        ├── ModelNotReady           the model is loading or restarting; try again later
        ├── InsufficientMemory      busy models hold the memory; try again later
        ├── ModelUnloaded           the model was unloaded while it answered
        ├── EngineDead              the worker process died; try again
        │   ├── WorkerDied          it died unexpectedly: its requests can be replayed in a new worker
        │   └── WorkerNotBack       no new worker was available in time
        ├── RequestKillsWorker      this request crashed the worker twice; a retry would crash the next one
        ├── GenerationFailed        one request failed inside the engine
        └── RunnerError             raised by runners, handled by the scheduler
            ├── CacheFull           no KV positions left for this step
            ├── StepAborted         forward was interrupted by abort()
            ├── InvalidSpan         a span breaks the runner's contract
            └── StateRefused        a saved sequence is damaged or of another model

Messages of engines, plugins and the configuration may quote libraries and paths of the machine. They are for the log;
clients get :attr:`EnginehouseError.public_message`.

Each error carries fields and survives the worker link: :meth:`EnginehouseError.to_fields` and
:func:`error_from_fields` convert to and from plain data. This module does not know HTTP; the API
layer chooses the status codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "AdapterNotFound",
    "AdapterRefused",
    "CacheFull",
    "ConfigError",
    "ContextLengthExceeded",
    "DownloadError",
    "EngineDead",
    "EngineError",
    "EnginehouseError",
    "FirstTokenTimeout",
    "GenerationFailed",
    "InsufficientMemory",
    "InvalidRequest",
    "InvalidSpan",
    "MissingDependency",
    "ModelConflict",
    "ModelLoadError",
    "ModelNotFound",
    "ModelNotReady",
    "ModelOverloaded",
    "ModelTooLarge",
    "ModelUnloaded",
    "Overloaded",
    "PluginError",
    "PluginFailed",
    "QueueTimeout",
    "RateLimited",
    "ReloadFailed",
    "ReloadRefused",
    "RenderError",
    "RequestCancelled",
    "RequestError",
    "RequestKillsWorker",
    "ResourcesExhausted",
    "RunnerError",
    "ServerOverloaded",
    "ServerStopping",
    "SourceNotAllowed",
    "SourceNotFound",
    "StateRefused",
    "StepAborted",
    "TimedOut",
    "TotalTimeout",
    "UnsupportedParameter",
    "UnsupportedTask",
    "WorkerDied",
    "WorkerNotBack",
    "error_from_fields",
    "quoted",
]


def quoted(text: object, max_chars: int = 100) -> str:
    """Return the beginning of a client's text in quotes, for a message: as it was sent, backslashes included.

    Only characters that cannot be printed are escaped.
    """
    shown = str(text)[:max_chars]
    if not shown.isprintable():
        shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)
    return f'"{shown}"' if "'" in shown and '"' not in shown else f"'{shown}'"


class EnginehouseError(Exception):
    """Base class of all errors. Keyword fields become attributes and are sent over the worker link."""

    generic: ClassVar[str | None] = None
    """Replaces the message for clients where the message may quote libraries, plugins or paths of the machine."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Any] = fields

    @property
    def public_message(self) -> str:
        """The message that is safe to show to clients."""
        return self.message if self.generic is None else self.generic

    def to_fields(self) -> dict[str, Any]:
        """Plain data (strings, numbers, lists) from which :func:`error_from_fields` rebuilds this error."""
        return {"error": type(self).__name__, "message": self.message, **self.fields}


class ConfigError(EnginehouseError):
    """The configuration is invalid. ``path`` is the dotted path of the setting, e.g. ``server.port``.

    The message begins with the path; it is added if it is not there.
    """

    generic = "The server's configuration is wrong."

    def __init__(self, message: str, path: str | None = None) -> None:
        if path and not message.startswith(path):
            message = f"{path}: {message}"
        super().__init__(message, path=path)
        self.path = path


class PluginError(EnginehouseError):
    """A plugin could not be loaded, broke a rule, or raised an exception when called."""

    generic: ClassVar[str | None] = "A plugin of the server failed."

    def __init__(self, message: str, plugin: str | None = None) -> None:
        super().__init__(message, plugin=plugin)
        self.plugin = plugin


class MissingDependency(PluginError):
    """A plugin's library is not installed; ``extra`` names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'enginehouse[{extra}]'", plugin=extra)
        self.package, self.extra = package, extra
        self.fields = {"package": package, "extra": extra}


class RequestError(EnginehouseError):
    """The request is wrong. ``param`` is the path of the field, e.g. ``messages[0].content``."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.param = param


class InvalidRequest(RequestError):
    """A field has a wrong type, range or combination."""


class UnsupportedParameter(RequestError):
    """A known field that this model or version cannot honour."""


class UnsupportedTask(RequestError):
    """The model, which is the server's first one unless the request names one, is for another task."""

    def __init__(self, model: str, task: str, asked: str, *, is_named: bool = True) -> None:
        message = f"The model {quoted(model)} is for the task {task!r}; this request needs one for {asked!r}."
        if not is_named:
            message += " The request names no model, so that the first one was taken; name another one in 'model'."
        if (task, asked) == ("embed", "rerank"):
            message += ' With rerank = "cosine" in its settings, an embedding model compares embeddings.'
        super().__init__(message, "model")
        self.task = task


class ContextLengthExceeded(RequestError):
    """The prompt does not fit the context. Counts are in tokens; the prompt's may be a lower bound."""

    def __init__(
        self, num_prompt_tokens: int, max_context: int, param: str | None = None, is_lower_bound: bool = False
    ) -> None:
        super().__init__(
            f"The prompt has {'at least ' if is_lower_bound else ''}{num_prompt_tokens} tokens, but this model's "
            f"context holds {max_context} tokens and at least one is needed for the answer.",
            param,
        )
        self.num_prompt_tokens, self.max_context = num_prompt_tokens, max_context
        self.is_lower_bound = is_lower_bound
        self.fields = {
            "num_prompt_tokens": num_prompt_tokens,
            "max_context": max_context,
            "param": param,
            "is_lower_bound": is_lower_bound,
        }


class RenderError(RequestError):
    """The chat template refused the messages, failed, or exceeded its time, memory or output limit."""


class AdapterNotFound(RequestError):
    """The model has no adapter of that name; the base model never answers in its place."""


class AdapterRefused(RequestError):
    """An adapter cannot be loaded; the message names the file and the problem."""


class ModelNotFound(RequestError):
    """No model is served under that name."""

    def __init__(self, model: str) -> None:
        message = f"The model {quoted(model)} does not exist on this server; its models are listed at /v1/models."
        super().__init__(message, "model")
        self.model = model
        self.fields = {"model": model}


class SourceNotAllowed(RequestError):
    """The settings do not allow adding a model from that source to the running server."""


class SourceNotFound(RequestError):
    """The settings allow a source, but no model is there."""


class ReloadRefused(RequestError):
    """A new configuration is invalid, so the old one stays active. ``param`` is the dotted path of the setting."""


class ReloadFailed(EnginehouseError):
    """A plugin, or this server, failed to apply a new configuration, so the old one stays active."""


class RequestCancelled(EnginehouseError):
    """The server's operator has cancelled the request; a retry would be cancelled again."""


class Overloaded(EnginehouseError):
    """The queue is full. ``retry_after_s`` is the recommended delay before a retry, in seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class ModelConflict(EnginehouseError):
    """A model cannot be changed now, because of its state or configuration; ``param`` is the field that conflicts."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.param = param


class ModelOverloaded(Overloaded):
    """The model is so busy with other requests that this one would have to wait too long."""


class ServerOverloaded(Overloaded):
    """The server as a whole is overloaded."""


class RateLimited(EnginehouseError):
    """The caller has reached a limit. ``limit`` names it: ``requests``, ``tokens`` or ``concurrent``."""

    def __init__(self, message: str, limit: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, limit=limit, retry_after_s=retry_after_s)
        self.limit, self.retry_after_s = limit, retry_after_s


class TimedOut(EnginehouseError):
    """The request exceeded a configured time limit; it was ended and its slot is free."""


class QueueTimeout(TimedOut):
    """The request was not scheduled in time. ``retry_after_s`` as in :class:`Overloaded`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class FirstTokenTimeout(TimedOut):
    """The first output was not produced in time."""


class TotalTimeout(TimedOut):
    """The answer was not complete in time."""


class ServerStopping(EnginehouseError):
    """The server is shutting down: new requests are refused, running ones end at its deadline."""


class EngineError(EnginehouseError):
    """The engine failed; the request is not the cause."""

    generic: ClassVar[str | None] = "The model failed on this request."


class ModelLoadError(EngineError):
    """A model could not be opened."""

    generic: ClassVar[str | None] = "The model could not be loaded."


class DownloadError(ModelLoadError):
    """A model could not be downloaded from its hub; partial data is kept, so a retry resumes the download."""


class ModelTooLarge(ModelLoadError):
    """The model needs more memory than the budget has left for it, even after all evictable models are unloaded.

    ``param`` is the field of the request that names the model, if one does.
    """

    generic = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.param = param


class ResourcesExhausted(ModelLoadError):
    """The system refused a resource that a worker process needs, such as file descriptors; possibly temporary."""


class InsufficientMemory(EngineError):
    """Other models hold the memory that this one needs, and none of them could be evicted in time."""

    generic = None

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class ModelUnloaded(EngineError):
    """The model was unloaded, by its operator or a new configuration, while it answered."""

    generic = None


class ModelNotReady(EngineError):
    """The model is loading or restarting."""

    generic = None

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class EngineDead(EngineError):
    """The worker process died while it processed the request."""

    generic: ClassVar[str | None] = "The model stopped working before the answer was complete."


class WorkerDied(EngineDead):
    """The worker ended unexpectedly; its requests can be replayed in a new worker."""


class WorkerNotBack(EngineDead):
    """The worker died, and no new worker was available in time."""

    generic = None


class RequestKillsWorker(EngineError):
    """The request crashed the worker twice. It is refused; other requests that ran with it are not."""

    generic = (
        "The model's worker died twice while it worked on this request, the second time with no other work. The "
        "request is refused; please do not send it again."
    )


class GenerationFailed(EngineError):
    """One request failed inside the engine; others are not affected. ``plugin`` names the plugin at fault."""

    def __init__(self, message: str, plugin: str | None = None) -> None:
        super().__init__(message, plugin=plugin)
        self.plugin = plugin


class PluginFailed(PluginError, GenerationFailed):
    """A plugin raised an exception or gave a wrong result when it was called.

    Raised by core's guard, which logs the traceback. The message names the plugin and quotes no exception, so it is
    shown to clients. ``kind`` is the kind of plugin object.
    """

    generic = None

    def __init__(self, message: str, plugin: str | None = None, kind: str | None = None) -> None:
        super().__init__(message, plugin)
        self.kind = kind
        self.fields = {"plugin": plugin, "kind": kind}


class RunnerError(EngineError):
    """Raised by :class:`enginehouse.contract.backend.Runner` methods; the scheduler handles these."""


class CacheFull(RunnerError):
    """``forward`` needs ``needed`` KV positions but only ``free`` are free; nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"the KV cache has {free} free positions but {needed} are needed", needed=needed, free=free)
        self.needed, self.free = needed, free


class StepAborted(RunnerError):
    """``forward`` was interrupted by ``abort()``; ``lengths`` maps each sequence of the batch to its current length."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        super().__init__("the forward pass was aborted")
        self.lengths = dict(lengths)


class InvalidSpan(RunnerError):
    """A span violates the runner's contract; nothing was changed."""


class StateRefused(RunnerError):
    """A saved sequence is damaged, or of another model or other settings; nothing was changed."""


_BY_NAME: dict[str, type[EnginehouseError]] = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, EnginehouseError)
}


def error_from_fields(fields: Mapping[str, Any]) -> EnginehouseError:
    """Rebuild an error from :meth:`EnginehouseError.to_fields`; unknown names become :class:`EngineError`."""
    data = dict(fields)
    error_class = _BY_NAME.get(data.pop("error", ""), EngineError)
    message = data.pop("message", "unknown error")
    if error_class in (ContextLengthExceeded, ModelNotFound, MissingDependency, CacheFull):
        return error_class(**data)
    if error_class is StepAborted:
        return EngineError(message)
    return error_class(message, **data)
