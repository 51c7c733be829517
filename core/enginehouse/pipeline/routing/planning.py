"""Routing plan: the models to try for a request, in order, from the router or from the fallbacks of a named model.

Called by the pipeline for every request, and by ``POST /v1/route`` to explain. Does not try models itself. Models whose
context cannot hold the prompt are found before one is chosen: each loaded model renders and tokenizes the prompt as it
would to answer it. A prompt with fewer bytes than a context has tokens fits without being counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from attrs import evolve, field, frozen

from enginehouse.contract.errors import (
    AdapterNotFound,
    ConfigError,
    ContextLengthExceeded,
    EnginehouseError,
    ModelNotFound,
    PluginFailed,
    UnsupportedParameter,
)
from enginehouse.contract.router import Attempt, Candidate, ChecksModels, ComparesTexts, RouteQuestion, RoutingDecision
from enginehouse.contract.types import GenerateRequest, MediaPart, ModelInfo
from enginehouse.pipeline.capabilities import Capability, find_unsupported
from enginehouse.pipeline.media import check_media
from enginehouse.pipeline.routing.circuit_breaker import CircuitBreaker
from enginehouse.pipeline.routing.similarities import Pool, Similarities
from enginehouse.plugins import Guard, PluginRegistry, guard_of
from enginehouse.serving import LoadedModel, ModelManager, ModelStatus
from enginehouse.settings.config import Settings

_log = logging.getLogger(__name__)

CountTokens = Callable[[GenerateRequest, LoadedModel], Awaitable[int]]
"""Counts the tokens of a request's prompt for a model."""

_TEMPLATE_TOKENS = 1024
"""Tokens allowed for the text that templates add to messages; a model whose template adds more refuses when tried."""

_PATIENCE_S = 2.0
"""Maximum wait for a busy model; after it the prompt is assumed to fit."""


async def find_too_long(
    request: GenerateRequest, names: Iterable[str], manager: ModelManager, count: CountTokens
) -> dict[str, ContextLengthExceeded]:
    """Return the models whose context cannot hold the prompt, by name, with the error that each would raise.

    Media are read only after a model is chosen, so each counts as one token: a prompt that fits may still be refused.
    """
    num_media = sum(isinstance(part, MediaPart) for message in request.messages or () for part in message.parts)
    if num_media:
        request = evolve(request, messages=tuple(evolve(one, parts=()) for one in request.messages or ()))
    num_bytes = _num_bytes(request)
    models = [model for name in names if (model := _loaded(manager, name)) is not None]
    unsure = [
        model
        for model in models
        if num_bytes + _TEMPLATE_TOKENS > model.info.max_context and not model.info.engine.takes_messages
    ]
    errors = await asyncio.gather(*(_check(request, model, count, num_media) for model in unsure))
    return {model.name: error for model, error in zip(unsure, errors, strict=True) if error is not None}


async def _check(
    request: GenerateRequest, model: LoadedModel, count: CountTokens, num_media: int
) -> ContextLengthExceeded | None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            num_tokens = num_media + await count(request, model)
    except (EnginehouseError, TimeoutError):
        return None  # the attempt reports the problem of the model or the request
    if num_tokens < (max_context := model.info.max_context):
        return None
    param = "prompt" if request.messages is None else "messages"
    return ContextLengthExceeded(num_tokens, max_context, param, is_lower_bound=num_media > 0)


def _loaded(manager: ModelManager, name: str) -> LoadedModel | None:
    try:
        return manager.get(name)
    except EnginehouseError:
        return None


def _num_bytes(request: GenerateRequest) -> int:
    """Bytes of all client text in a prompt: an upper bound of its tokens for any tokenizer."""
    if request.token_ids is not None:
        return len(request.token_ids)
    if request.messages is None:
        return _bytes_of(request.text or "") + _bytes_of(request.suffix or "")
    num_bytes = _bytes_of(repr(request.template_variables))
    for message in request.messages:
        texts = (message.content, message.reasoning or "", *(call.arguments for call in message.tool_calls))
        num_bytes += sum(map(_bytes_of, texts))
    tools = request.tool_use.callable if request.tool_use is not None else ()
    return num_bytes + sum(2 * _bytes_of(repr(tool.definition)) for tool in tools)


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


AUTO = "auto"
"""The model name that selects a router; a model or alias of that name takes precedence."""

_DEFAULT_STRATEGY = "load"
_FALLBACK = "fallback"
_BEHIND = ("failed", "restarting", "loading", "draining")
"""States of models that are tried after all others."""

TooLong = Mapping[str, ContextLengthExceeded]
"""Models whose context cannot hold a prompt, with the error that each would raise."""

CapabilitiesOf = Callable[[str, ModelInfo], Mapping[str, Capability]]
"""Function that returns the capabilities of a model by its name and info."""


@frozen(kw_only=True)
class Plan:
    """Plan for one request.

    Attributes:
        strategy: the router's name; ``fallback`` for the fallbacks of a named model.
        route: the decision; attempts at models that cannot answer now are moved to the end.
        candidates: models offered to the router.
        refused: models that were excluded, and the reasons.
        last_resorts: models that are tried only because others fail, never because an answer was not good enough:
            fallbacks, and models that cannot answer now.
        decision_s: seconds that the decision took.
        has_logprobs: the client has asked for log-probabilities.
        named: the model that the client named and that has fallbacks: features that it lacks are refused. None where
            the server chose: a model that lacks a feature is then skipped.
        router: the guard of the router, whose attempts may judge the beginnings of answers.
    """

    strategy: str
    route: RoutingDecision
    candidates: tuple[Candidate, ...] = ()
    refused: Mapping[str, str] = field(factory=dict)
    last_resorts: frozenset[str] = frozenset()
    decision_s: float = 0.0
    has_logprobs: bool = False
    named: str | None = None
    router: Guard | None = None


class _NotCompared(EnginehouseError):
    """The embedder of a router cannot be used."""


class Planner:
    """Plans for one server.

    Args:
        registry: the plugins, for their routers.
        capabilities_of: called for models that have been loaded at least once.
        pool: asks models for embeddings.

    Raises:
        ConfigError: no plugin registers the router that the settings name, or its own settings do not suit the models.
        PluginError: the router raised an exception while checking them.
    """

    def __init__(
        self,
        settings: Settings,
        registry: PluginRegistry,
        manager: ModelManager,
        capabilities_of: CapabilitiesOf,
        pool: Pool,
    ) -> None:
        self._settings = settings.router
        self._slots = {name: model.slots for name, model in settings.models.items()}
        names = {known for name, model in settings.models.items() for known in (name, *model.aliases)}
        routers, strategy = registry.routers, settings.router.strategy
        if strategy is not None and strategy not in routers:
            raise ConfigError(registry.missing("router", strategy, routers), "router.strategy")
        router = routers.get(strategy or _DEFAULT_STRATEGY) if AUTO not in names and settings.models else None
        embedder = router.embedder if isinstance(router, ComparesTexts) else None
        self._models = tuple(settings.router.models or (name for name in settings.models if name != embedder))
        self._router = router if self._models else None
        if isinstance(self._router, ChecksModels):
            self._router.check_models(self._models)
        if embedder is not None and embedder not in settings.models:
            message = f"router.strategy: {strategy!r} needs the model {embedder!r} for embeddings, which is not served"
            raise ConfigError(message, "router.strategy")
        self._similarities = Similarities(router, pool) if isinstance(router, ComparesTexts) else None
        self._max_embedding_s = settings.limits.plugin_timeout_s
        self._manager = manager
        self._capabilities_of = capabilities_of
        self.circuit_breaker = CircuitBreaker(settings.router)

    @property
    def default(self) -> str:
        """The model that is used unless there is a reason for another one."""
        return self._settings.default or self._models[0]

    def is_routed(self, asked: str | None) -> bool:
        """True if a router decides about requests for this name."""
        return asked == AUTO and self._router is not None

    def named_by(self, request: GenerateRequest) -> tuple[str, ...]:
        """Return the models that a plan for the request may contain, fallbacks included."""
        chains = self._settings.fallbacks
        names = self._models if self.is_routed(request.model) else (self._manager.find(request.model).name,)
        named = dict.fromkeys((*names, *(other for name in names for other in chains.get(name, ()))))
        return tuple(name for name in named if _may_use(request, name))

    def find_unsupported(self, request: GenerateRequest) -> tuple[tuple[str, str], ...]:
        """Return the parameters that a routed request must do without, with reasons: what the best candidate lacks.

        Empty if a candidate lacks nothing, and without a choice of models.
        """
        if not self.is_routed(request.model):
            return ()
        return min((self._lacks(request, status) for status in self._usable(request)), key=len, default=())

    async def plan(self, request: GenerateRequest, too_long: TooLong = MappingProxyType({})) -> Plan | None:
        """Return the plan; None for a named model without fallbacks.

        Args:
            too_long: models whose context cannot hold the prompt, as far as known.

        Raises:
            ModelNotFound: no model has that name, or its caller may not use any of the models that it may mean.
            UnsupportedParameter: no model supports the request; names what the first one lacks.
            ContextLengthExceeded: the prompt does not fit any of the supporting models.
        """
        if self.is_routed(request.model):
            return await self._ask_router(request, too_long)
        name = self._manager.find(request.model).name
        if name in too_long:
            raise too_long[name]
        return self._follow_chain(request, name, too_long) if self._settings.fallbacks else None

    def _follow_chain(self, request: GenerateRequest, name: str, too_long: TooLong) -> Plan | None:
        others = [other for other in self._settings.fallbacks.get(name, ()) if _may_use(request, other)]
        refused = {other: too_long[other].message for other in others if other in too_long}
        others = [other for other in others if other not in refused]
        if not others:
            return None
        attempts = tuple(Attempt(model) for model in dict.fromkeys((name, *others)))
        route = RoutingDecision(attempts=attempts, reason=f"requested by name; {', '.join(others)} are its fallbacks")
        return Plan(
            strategy=_FALLBACK,
            route=self._healthy_first(route),
            refused=refused,
            has_logprobs=_has_logprobs(request),
            named=name,
        )

    async def _ask_router(self, request: GenerateRequest, too_long: TooLong) -> Plan:
        """Plan by router. If the router fails, the default model is tried first, then the others."""
        router = self._router
        assert router is not None
        began = time.perf_counter()
        candidates, refused = self._candidates(request, too_long)
        default = next((one.name for one in candidates if one.name == self.default), candidates[0].name)
        strategy, guard = router.name, guard_of(router, "router")
        try:
            similarities = await self._compare(request, guard)
            question = RouteQuestion(request=request, candidates=candidates, default=default, similarities=similarities)
            route = await guard.run("route", lambda: router.route(question))
            known = {candidate.name for candidate in candidates}
            strangers = [attempt.model for attempt in route.attempts if attempt.model not in known]
            if strangers or not route.attempts:
                what = f"chose {', '.join(map(repr, strangers)) or 'no model'}, which is not among the candidates"
                raise guard.mistake("route", what)
        except (PluginFailed, _NotCompared) as error:
            ordered = sorted(candidates, key=lambda one: one.name != default)
            attempts = tuple(Attempt(candidate.name) for candidate in ordered)
            route = RoutingDecision(
                attempts=attempts, reason=f"the router failed; the default model comes first ({error.message})"
            )
        stand_ins = self._stand_ins(request, route, too_long)
        route = self._healthy_first(evolve(route, attempts=(*route.attempts, *map(Attempt, stand_ins))))
        hopeless = self._hopeless(route)
        decision_s = time.perf_counter() - began
        return Plan(
            strategy=strategy,
            route=route,
            candidates=candidates,
            refused=refused,
            last_resorts=hopeless.union(stand_ins),
            decision_s=decision_s,
            has_logprobs=_has_logprobs(request),
            router=guard,
        )

    async def _compare(self, request: GenerateRequest, guard: Guard) -> Sequence[float]:
        """Return the similarities to the examples of a router that has some.

        Raises:
            PluginFailed: the router failed.
            _NotCompared: the embedder failed.
        """
        router = self._router
        if self._similarities is None or not isinstance(router, ComparesTexts):
            return ()
        text = await guard.run("text_of", lambda: router.text_of(request))
        try:
            async with asyncio.timeout(self._max_embedding_s):
                return await self._similarities.of(text, request)
        except (EnginehouseError, TimeoutError) as error:
            _log.warning("the strategy %s cannot embed; the default model is used", guard.name, exc_info=error)
            what = error.public_message if isinstance(error, EnginehouseError) else "it took too long"
            raise _NotCompared(f"its embedder: {what}") from error

    def _candidates(self, request: GenerateRequest, too_long: TooLong) -> tuple[tuple[Candidate, ...], dict[str, str]]:
        found: list[tuple[Candidate, bool]] = []
        refused: dict[str, str] = {}
        first: UnsupportedParameter | AdapterNotFound | None = None
        for status in self._usable(request):
            name = status.name
            problem = self._problem(request, status)
            if problem is not None:
                refused[name] = problem.message
                first = first or problem
                continue
            if name in too_long:
                refused[name] = too_long[name].message
                continue
            tools = self._known_capabilities(status).get("tools")
            has_tools = tools is not None and tools.support == "native"
            found.append((self._candidate(self._models.index(name), status), has_tools))
        if not found and (longest := [too_long[name] for name in refused if name in too_long]):
            raise max(longest, key=lambda error: error.max_context)
        if not found:
            raise first or ModelNotFound(AUTO)
        if request.tool_use is not None and any(has_tools for _, has_tools in found):
            # Every model can get tools as text; models trained for tools do better.
            for candidate, has_tools in found:
                if not has_tools:
                    refused[candidate.name] = "tools: its chat template has none, while another model's has"
            found = [one for one in found if one[1]]
        return tuple(candidate for candidate, _ in found), refused

    def _usable(self, request: GenerateRequest) -> list[ModelStatus]:
        """Return the models that the router may choose; the caller must not learn of others."""
        statuses = {status.name: status for status in self._manager.statuses()}
        return [statuses[name] for name in self._models if name in statuses and _may_use(request, name)]

    def _known_capabilities(self, status: ModelStatus) -> Mapping[str, Capability]:
        """Return the capabilities of a model, as far as known."""
        return self._capabilities_of(status.name, status.info) if status.info is not None else {}

    def _lacks(self, request: GenerateRequest, status: ModelStatus) -> tuple[tuple[str, str], ...]:
        return find_unsupported(request, self._known_capabilities(status))

    def _problem(self, request: GenerateRequest, status: ModelStatus) -> UnsupportedParameter | AdapterNotFound | None:
        """Return why the model cannot serve the request, as far as known."""
        for param, reason in self._lacks(request, status):
            return UnsupportedParameter(f"{param}: {reason}", param)
        if status.info is not None and status.info.task != "generate":
            return UnsupportedParameter(f"model: it is for the task {status.info.task!r}", "model")
        try:
            if status.info is not None:
                check_media(request.messages or (), status.info.engine)
            table = self._manager.find(status.name).adapters
            for wanted, _ in request.adapters:
                table.name_of(status.name, wanted, request.adapters_param)
        except (UnsupportedParameter, AdapterNotFound) as error:
            return error
        return None

    def _candidate(self, rank: int, status: ModelStatus) -> Candidate:
        return Candidate(
            name=status.name,
            rank=rank,
            state=status.state,
            has_failed=self.circuit_breaker.has_failed(status.name),
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            slots=self._slots.get(status.name, 1),
            max_context=status.info.max_context if status.info is not None else None,
            backend=status.backend,
            first_token_s=self.circuit_breaker.first_token_s(status.name),
        )

    def _stand_ins(self, request: GenerateRequest, route: RoutingDecision, too_long: TooLong) -> tuple[str, ...]:
        """Return the configured fallbacks of the first model, without those that are tried anyway."""
        chain = self._settings.fallbacks.get(route.attempts[0].model, ())
        tried = {*(attempt.model for attempt in route.attempts), *too_long}
        return tuple(dict.fromkeys(name for name in chain if name not in tried and _may_use(request, name)))

    def _healthy_first(self, route: RoutingDecision) -> RoutingDecision:
        """Return the same attempts, with models that cannot answer now moved to the end."""
        if len(route.attempts) == 1:
            return route
        hopeless = self._hopeless(route)
        ordered: Sequence[Attempt] = sorted(route.attempts, key=lambda attempt: attempt.model in hopeless)
        return evolve(route, attempts=tuple(ordered))

    def _hopeless(self, route: RoutingDecision) -> frozenset[str]:
        """Return the models of a route that cannot answer now."""
        states = {status.name: status.state for status in self._manager.statuses()}
        models = {attempt.model for attempt in route.attempts}
        return frozenset(
            model for model in models if states.get(model) in _BEHIND or self.circuit_breaker.has_failed(model)
        )


def _may_use(request: GenerateRequest, name: str) -> bool:
    return request.allowed_models is None or name in request.allowed_models


def _has_logprobs(request: GenerateRequest) -> bool:
    return request.sampling.get("num_logprobs") is not None
