"""Calls of surfaces: a request that core has admitted, and what the surface may ask of core for it.

Implemented by core, used by the routes of surfaces (:mod:`enginehouse.contract.surface`). Everything is answered by the
permissions of the caller's key: other models do not exist for it, and what needs a scope that it lacks is refused.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Protocol

from attrs import field, frozen

from enginehouse.contract.fields import ParameterFields
from enginehouse.contract.identity import Scope
from enginehouse.contract.types import GenerateRequest, ModelInfo, PoolingRequest, PoolingResult

__all__ = ["Call", "Caller", "ModelEntry", "ModelState", "Server"]

ModelState = Literal["unloaded", "loading", "ready", "draining", "restarting", "failed"]
"""State of a served model."""


class Caller(Protocol):
    """The sender of a request. Provided by core."""

    @property
    def name(self) -> str:
        """Name of its key; empty for all callers of a server without keys."""
        ...

    @property
    def key_namespace(self) -> str:
        """Callers with the same namespace may share what is stored for them; empty on a server without keys."""
        ...

    @property
    def scopes(self) -> frozenset[Scope]:
        """Its permissions."""
        ...


@frozen(kw_only=True)
class ModelEntry:
    """A served model as its caller may see it.

    Attributes:
        name: by which the caller requests it; ``aliases`` are further names.
        created: Unix time in seconds from which this server serves it.
        progress: share of the current load, 0 to 1; 1 when ready.
        error: why it failed; without details unless the caller has the scope ``admin``.
        is_pinned: it is not unloaded to make room for others, nor after its ``ttl``.
        ttl_s: seconds without use after which it is unloaded; None is never.
        idle_s: seconds since its last use; None while it is used or not loaded.
        memory_bytes: memory that it holds; None if it is not loaded.
        size_bytes: size of its files; None if it has none, or they are not known yet.
        info: what is known once it has been loaded (task, context length, templates, media); None before.
        quantization: as the backend names it, once it is known.
        fingerprint: changes when the same request may get another answer; None before the first load.
        supports: request fields that it honours, by their names in OpenAI's API (``tools``, ``suffix``,
            ``reasoning_effort``); empty before the first load.
        reasons: its answers may begin with reasoning, which a parser separates; False before the first load.
        adapters: names of its adapters with the scale of each.
        adapter_ids: their ids in llama-server's API; those of removed adapters are not used again.
    """

    name: str
    aliases: tuple[str, ...] = ()
    state: ModelState
    created: int
    progress: float = 0.0
    error: str | None = None
    backend: str | None = None
    is_pinned: bool = False
    ttl_s: float | None = None
    idle_s: float | None = None
    memory_bytes: int | None = None
    size_bytes: int | None = None
    info: ModelInfo | None = field(default=None, repr=False)
    quantization: str | None = None
    fingerprint: str | None = None
    supports: frozenset[str] = frozenset()
    reasons: bool = False
    adapters: Mapping[str, float] = field(factory=dict)
    adapter_ids: Mapping[str, int] = field(factory=dict)


class Server(Protocol):
    """The functions of core for surfaces. Provided by core. A model's name may be an alias; None is the first one.

    Methods that name a model raise ModelNotFound if it does not exist for the caller.
    """

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of an answer that the server allows (``limits.max_tokens``); None is the rest of the context."""
        ...

    @property
    def max_choices(self) -> int:
        """Most choices of an answer that the server allows (``limits.max_choices``)."""
        ...

    @property
    def max_prompts(self) -> int:
        """Most prompts of one body that the server allows: as many as may wait (``limits.max_queue``)."""
        ...

    def models(self) -> Sequence[ModelEntry]:
        """Return the models that the caller may use, in the order of the settings."""
        ...

    def model(self, name: str | None) -> ModelEntry:
        """Return one model; where a router chooses by that name (``auto``), its most likely choice."""
        ...

    def defaults(self, name: str | None) -> Mapping[str, Any]:
        """Return the sampling and stopping parameters of requests that give none; empty before the first load."""
        ...

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Return the number of prompt tokens of a request, whose chat is rendered; nothing is generated.

        Raises:
            RequestError: no prompt can be made of the request.
            EngineError: the model cannot be loaded.
        """
        ...

    async def tokenize(
        self, text: str, model: str | None = None, *, add_special: bool = False, parse_special: bool = True
    ) -> Sequence[int]:
        """Return the token ids of a text.

        Args:
            add_special: prepend the model's usual special prefix (for example BOS).
            parse_special: treat control-token strings in the text as control tokens.
        """
        ...

    async def detokenize(self, token_ids: Sequence[int], model: str | None = None) -> str:
        """Return the text of token ids, with control tokens by name."""
        ...

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        """Return the rows of texts: embeddings, or scores of a reranker or classifier.

        Counted like a request that generates: the route's ``limits`` are ``all``. Dropped if the client disconnects,
        then this raises an error that needs no answer.

        Raises:
            RequestError: a text is too long, or the model does not offer what is asked.
            UnsupportedTask: the model is for another task.
            RateLimited: the caller has used up its tokens.
            Overloaded: too many requests wait.
            EngineError: the model cannot be loaded, or failed.
        """
        ...

    async def load(self, model: str) -> ModelEntry:
        """Load a model and wait until it is ready. Needs the scope ``admin``."""
        ...

    async def unload(self, model: str, *, force: bool = False) -> ModelEntry:
        """Let the requests of a model finish and unload it. Needs the scope ``admin``.

        Args:
            force: end its requests now, also if it is pinned.

        Raises:
            ModelConflict: it is loading, pinned, or its requests do not finish in time.
        """
        ...

    def download(self, model: str) -> AsyncGenerator[tuple[float, str]]:
        """Download the source of a served model, or another model by its id at a hub. Needs the scope ``admin``.

        Yields the completed share, 0 to 1, and the current activity, several times per second; nothing if the served
        model's files do not come from a hub. Closing the generator stops the download; data that has arrived is kept.
        A model that is not served becomes available once it is added to the configuration.

        Raises:
            InvalidRequest: no hub has ids of this form, or no plugin offers a hub; raised by the call itself.
            DownloadError: the model could not be downloaded.
        """
        ...

    def pin(self, model: str, is_pinned: bool = True) -> ModelEntry:
        """Pin a model, or release it, until the configuration is read again. Needs the scope ``admin``."""
        ...

    async def requests(self) -> Sequence[Mapping[str, Any]]:
        """Return the caller's running requests, oldest first, in the form of ``GET /admin/requests``.

        With the scope ``admin`` they are those of all callers. A server without keys cannot distinguish callers, so
        that there are none without that scope.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Cancel a running request of the caller, by the id in its response body.

        Raises:
            EnginehouseError: the caller has no such request.
        """
        ...

    async def stop_thinking(self, request_id: str) -> int:
        """Close the reasoning of a running request of the caller; returns the number of choices affected.

        Raises:
            EnginehouseError: the caller has no such request, or it has no open reasoning.
        """
        ...


class Call(Protocol):
    """A request that has passed keys, scopes and limits, with its decoded body. Provided by core."""

    @property
    def body(self) -> Any:
        """An instance of the route's body class; None without one."""
        ...

    @property
    def path(self) -> Mapping[str, str]:
        """The parameters of the route's path."""
        ...

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters after the ``?``; repeated ones are joined with commas."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The request headers, by names in any case, without credentials; repeated ones are joined with commas."""
        ...

    @property
    def caller(self) -> Caller:
        """The sender."""
        ...

    @property
    def server(self) -> Server:
        """Core, for this caller."""
        ...

    def parameters(self, values: Mapping[str, Any], paths: Mapping[str, str]) -> ParameterFields:
        """Read sampling and stopping parameters that the body has elsewhere, or by other names.

        Fields of plugins among them become part of the requests; values that no field has the name of are ignored and
        listed as such.

        Args:
            values: to read, by the names of fields in OpenAI's API (``max_tokens``) or of a plugin (``typical_p``).
            paths: path in the body of each of them, for errors and lists.

        Raises:
            InvalidRequest: a value is of the wrong type or out of range.
        """
        ...

    def ignore(self, path: str) -> None:
        """List the field at a path of the body in ``X-Enginehouse-Ignored``: it has no effect on the answer."""
        ...

    def leave_out(self, path: str, reason: str) -> None:
        """List the field at a path of the body as unsupported, where the settings do not refuse such fields.

        Raises:
            UnsupportedParameter: ``server.unsupported_parameters`` is ``reject``.
        """
        ...
