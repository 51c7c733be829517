"""The contract of preparers, which change requests before their prompts are rendered. Called by the pipeline.

A preparer is bound once per configuration and then called for every request to a model whose prompts core renders, in
the server process, on one of several event loops of the plugin: requests are prepared concurrently, and objects that
belong to an event loop cannot be shared between calls. What it asks of models counts as work of the request's caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from attrs import field, frozen

from enginehouse.contract.engine import EngineStream
from enginehouse.contract.types import EngineRequest, GenerateRequest, PoolingRequest, PoolingResult

__all__ = ["BoundPreparer", "ModelAccess", "Preparation", "Preparer", "Report"]


@frozen(kw_only=True)
class Report:
    """Result of a preparer, for statistics and the details of the response.

    Attributes:
        has_changed: it has changed the request; responses may have a header that says so.
        num_read_tokens: tokens that models have read for it; they count as the caller's.
        details: plain data. Over several prompts of a request numbers are summed; of other values the first is shown.
        metrics: metric name to number.
        prompt_metrics: metrics that count the tokens of the prompt, each with a number to add to them.
        done_by: name of the object that did the work, such as the compressor; a label of these metrics.
        explain: returns plain data that explains the result, such as parts of texts with reasons; for dry runs only,
            such as ``POST /v1/compress``, as it may be long.
    """

    has_changed: bool = False
    num_read_tokens: int = 0
    details: Mapping[str, Any] = field(factory=dict)
    metrics: Mapping[str, int] = field(factory=dict)
    prompt_metrics: Mapping[str, int] = field(factory=dict)
    done_by: str = ""
    explain: Callable[[], Mapping[str, Any]] | None = None


@frozen
class Preparation:
    """A request to be used instead of the original one, and what was done."""

    request: GenerateRequest
    report: Report


class ModelAccess(Protocol):
    """A loaded model, on behalf of one request. Provided by core."""

    @property
    def name(self) -> str:
        """The model's name in the settings."""
        ...

    @property
    def created(self) -> int:
        """Time of its load, in seconds since the epoch."""
        ...

    async def tokenize(self, text: str) -> Sequence[int]:
        """Return the token ids of a text, without special tokens."""
        ...

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token id."""
        ...

    async def generate(self, request: EngineRequest) -> EngineStream:
        """Start a request of the preparer's own; the preparer must read or cancel it."""
        ...

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        """Return the rows of a request of the preparer's own to a pooling model; its ``model`` is ignored.

        Raises:
            UnsupportedTask: this model is for another task.
        """
        ...

    def other(self, name: str) -> AbstractAsyncContextManager[ModelAccess]:
        """Keep another model loaded inside the ``async with`` block.

        Raises:
            ModelNotReady: it is not loaded now. It is not waited for, since loading it could need the memory of this
                model.
        """
        ...


class BoundPreparer(Protocol):
    """A preparer with the settings of the models. Used for several requests concurrently.

    Calls:
        may_prepare: for each request to a router; server, thread of the plugin; microseconds.
        prepare_request: for each request, and again if the prompt is too long; server, event loop of the plugin; may
            await, and block for ``plugin_timeout_s`` at most.
    """

    def may_prepare(self, request: GenerateRequest, model: str) -> bool:
        """True if it could change requests like this one to a model; such prompts are not counted in advance."""
        ...

    async def prepare_request(
        self, request: GenerateRequest, model: ModelAccess, num_excess: int | None
    ) -> Preparation | None:
        """Change a request, or return None to leave it as it is.

        Args:
            request: as asked; nothing is rendered yet.
            model: the model that will answer.
            num_excess: None in the first call. If the engine then finds the prompt too long, the hook is called once
                more with the original request and the number of tokens that must go; None then refuses the request.

        Raises:
            RequestError: the request asks for something that cannot be done.
        """
        ...


@runtime_checkable
class Preparer(Protocol):
    """A preparer for ``register_preparers``.

    Attributes:
        name: unique; the key of its fields in ``GenerateRequest.extensions``, the member of the details of responses,
            and the key of the profiles' headers.
        request_fields: attrs class; each attribute is a top-level request field whose default means "not given". A
            field may be ``bool | SomeAttrsClass | None``: a switch, or an object with details.

    Calls:
        bind: once per configuration; server, main thread or a thread for a reload; seconds.
    """

    name: str
    api_version: int
    request_fields: type[Any]

    def bind(self, settings: Mapping[str, Any], objects: Mapping[str, Mapping[str, Any]]) -> BoundPreparer:
        """Return a preparer for one configuration.

        Args:
            settings: name of each served model to its setting ``compressor``, as written; None if unset.
            objects: all registered objects by kind (such as ``compressors``) and name.

        Raises:
            ConfigError: the settings of a model cannot be applied.
        """
        ...
