"""Every error that Enginehouse raises on purpose.

::

    EnginehouseError
    ├── ConfigError                 the configuration file, environment or command line is wrong
    ├── PluginError                 a plugin could not be loaded or misbehaved; names the plugin
    │   └── MissingDependency       says which extra to install
    ├── RequestError                the request is at fault; it was refused and nothing was lost
    │   ├── InvalidRequest          a field has a wrong type, range or combination
    │   ├── UnsupportedParameter    a known field that this model or version cannot honour
    │   ├── ContextLengthExceeded   the prompt does not fit the context
    │   ├── RenderError             the chat template refused the messages, failed or took too long
    │   ├── ModelNotFound           no model is served under that name
    │   └── ReloadRefused           a new configuration is wrong; the old one stays
    ├── ReloadFailed                a new configuration could not be planned; the old one stays
    ├── RequestCancelled            the server's operator has cancelled the request
    ├── RateLimited                 the caller has used up what it may use for now; try again later
    ├── Overloaded                  the queue is full of the caller's own requests; try again later
    │   ├── ModelOverloaded         it is full of others' requests, or the wait would be too long
    │   └── ServerOverloaded        the server as a whole has too much to do
    ├── TimedOut                    the request took longer than the settings allow
    │   ├── QueueTimeout            it did not get a place in time; try again later
    │   ├── FirstTokenTimeout       its answer did not begin in time
    │   └── TotalTimeout            its answer did not end in time
    ├── ModelConflict               a model cannot be loaded or unloaded now
    ├── ServerStopping              the server shuts down; try again on another or later
    └── EngineError                 the engine is at fault
        ├── ModelLoadError          a model could not be opened
        │   ├── ModelTooLarge       it needs more memory than all that may be given to it
        │   ├── ResourcesExhausted  the system has no descriptors or processes left for its worker now
        │   └── DownloadError       it could not be fetched from its hub
        ├── ModelNotReady           the model is loading or restarting; try again later
        ├── InsufficientMemory      other models hold the memory, and are busy; try again later
        ├── ModelUnloaded           the model was taken away while it answered
        ├── EngineDead              the worker process died; try again
        │   ├── WorkerDied          it died by itself: what it held can be replayed in the next one
        │   └── WorkerNotBack       there was no next one in time
        ├── RequestKillsWorker      the worker died of this request, twice; trying again would kill the next one
        ├── GenerationFailed        one request failed inside the engine
        └── RunnerError             raised by runners, handled by the scheduler
            ├── CacheFull           no KV positions left for this step
            ├── StepAborted         forward was interrupted by abort()
            ├── InvalidSpan         a span breaks the runner's contract
            └── StateRefused        a saved sequence is damaged or of another model

What an engine, a plugin or the configuration says may quote libraries and paths of the machine. It is for the log;
callers read :attr:`EnginehouseError.public_message`.

Each error carries fields and survives the worker link: :meth:`EnginehouseError.to_fields` and
:func:`error_from_fields` convert to and from plain data. This module does not know HTTP; the API
layer decides status codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
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
    "StateRefused",
    "StepAborted",
    "TimedOut",
    "TotalTimeout",
    "UnsupportedParameter",
    "WorkerDied",
    "WorkerNotBack",
    "error_from_fields",
]


class EnginehouseError(Exception):
    """Base of all errors. Keyword fields become attributes and travel over the worker link."""

    retryable: ClassVar[bool] = False
    generic: ClassVar[str | None] = None
    """What callers are told instead of the message, where that may quote libraries, plugins or paths of the machine."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Any] = fields

    @property
    def public_message(self) -> str:
        """The message as callers may read it."""
        return self.message if self.generic is None else self.generic

    def to_fields(self) -> dict[str, Any]:
        """Plain data (strings, numbers, lists) from which :func:`error_from_fields` rebuilds this error."""
        return {"error": type(self).__name__, "message": self.message, **self.fields}


class ConfigError(EnginehouseError):
    """The configuration is wrong. ``path`` is the dotted path of the setting, e.g. ``server.port``."""

    generic = "The server's configuration is wrong."

    def __init__(self, message: str, path: str | None = None) -> None:
        super().__init__(message, path=path)
        self.path = path


class PluginError(EnginehouseError):
    """A plugin could not be loaded, broke a rule, or raised where it was called."""

    generic = "A plugin of the server failed."

    def __init__(self, message: str, plugin: str | None = None) -> None:
        super().__init__(message, plugin=plugin)
        self.plugin = plugin


class MissingDependency(PluginError):
    """A plugin's library is not installed; ``extra`` names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'enginehouse[{extra}]'", plugin=extra)
        self.package, self.extra = package, extra
        self.fields = {"package": package, "extra": extra}


class RequestError(EnginehouseError):
    """The request is at fault. ``param`` is the path of the field, e.g. ``messages[0].content``."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.param = param


class InvalidRequest(RequestError):
    """A field has a wrong type, range or combination."""


class UnsupportedParameter(RequestError):
    """A known field that this model or version cannot honour."""


class ContextLengthExceeded(RequestError):
    """The prompt does not fit the context. Both counts are in tokens; that of the prompt may be a lower bound."""

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
    """The chat template refused the messages, failed, or exceeded its time, memory or output bound."""


class ModelNotFound(RequestError):
    """No model is served under that name."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model!r} does not exist on this server.", "model")
        self.model = model
        self.fields = {"model": model}


class ReloadRefused(RequestError):
    """A new configuration is wrong, so the old one stays. ``param`` is the dotted path of the setting."""


class ReloadFailed(EnginehouseError):
    """A plugin, or this server, failed over a new configuration, so the old one stays."""


class RequestCancelled(EnginehouseError):
    """The server's operator has cancelled the request; trying again would only be cancelled again."""


class Overloaded(EnginehouseError):
    """The queue is full. ``retry_after_s`` (seconds) is when trying again makes sense."""

    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class ModelConflict(EnginehouseError):
    """A model cannot be loaded or unloaded as asked, because of what it is doing or how it is configured."""


class ModelOverloaded(Overloaded):
    """The model has so much to do for others that this request would have to wait too long."""


class ServerOverloaded(Overloaded):
    """The server as a whole has too much to do."""


class RateLimited(EnginehouseError):
    """The caller has used up a limit. ``limit`` names it: ``requests``, ``tokens`` or ``concurrent``."""

    retryable = True

    def __init__(self, message: str, limit: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, limit=limit, retry_after_s=retry_after_s)
        self.limit, self.retry_after_s = limit, retry_after_s


class TimedOut(EnginehouseError):
    """The request took longer than the settings allow; it was ended and its slot is free."""

    retryable = True


class QueueTimeout(TimedOut):
    """The request did not get a place in the batch in time. ``retry_after_s`` as in :class:`Overloaded`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class FirstTokenTimeout(TimedOut):
    """The answer did not begin in time."""


class TotalTimeout(TimedOut):
    """The answer did not end in time."""


class ServerStopping(EnginehouseError):
    """The server is shutting down: new requests are refused, running ones end at its deadline."""

    retryable = True


class EngineError(EnginehouseError):
    """The engine is at fault, not the request."""

    generic: ClassVar[str | None] = "The model failed on this request."


class ModelLoadError(EngineError):
    """A model could not be opened."""

    generic: ClassVar[str | None] = "The model could not be loaded."


class DownloadError(ModelLoadError):
    """A model could not be fetched from its hub; what has arrived is kept, so that trying again goes on from there."""


class ModelTooLarge(ModelLoadError):
    """It needs more memory than the budget leaves to it, even if every model that may go is gone."""

    generic = None


class ResourcesExhausted(ModelLoadError):
    """The system refused what a worker process needs, such as file descriptors; there may be some again in a moment."""


class InsufficientMemory(EngineError):
    """Other models hold the memory that this one needs, and none of them could make way in time."""

    retryable = True
    generic = None

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class ModelUnloaded(EngineError):
    """The model was taken away, by its operator or a new configuration, while it answered."""

    retryable = True
    generic = None


class ModelNotReady(EngineError):
    """The model is loading or restarting."""

    retryable = True
    generic = None

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.retry_after_s = retry_after_s


class EngineDead(EngineError):
    """The worker process died while it held the request."""

    retryable = True
    generic: ClassVar[str | None] = "The model stopped working before the answer was complete."


class WorkerDied(EngineDead):
    """The worker ended without being asked to; what it held can be replayed in the next one."""


class WorkerNotBack(EngineDead):
    """The worker died, and there was none to go on in time."""

    generic = None


class RequestKillsWorker(EngineError):
    """The worker died of this request, twice. It is refused; others that ran beside it are not."""

    generic = (
        "The model's worker died twice while it worked on this request, the second time on nothing else. The request "
        "is refused; please do not send it again."
    )


class GenerationFailed(EngineError):
    """One request failed inside the engine; the others are not affected. ``plugin`` names the culprit."""

    def __init__(self, message: str, plugin: str | None = None) -> None:
        super().__init__(message, plugin=plugin)
        self.plugin = plugin


class RunnerError(EngineError):
    """Raised by :class:`enginehouse.contract.backend.Runner` methods; the scheduler handles these."""


class CacheFull(RunnerError):
    """``forward`` needs ``needed`` KV positions but only ``free`` are free; nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"the KV cache has {free} free positions but {needed} are needed", needed=needed, free=free)
        self.needed, self.free = needed, free


class StepAborted(RunnerError):
    """``forward`` was interrupted by ``abort()``; ``lengths`` maps each sequence of the batch to its length now."""

    def __init__(self, lengths: Mapping[int, int]) -> None:
        super().__init__("the forward pass was aborted")
        self.lengths = dict(lengths)


class InvalidSpan(RunnerError):
    """A span breaks the runner's contract; nothing was changed."""


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
