"""A request -> the models to try, in order: asks the router, or follows the chain of a named model.

Called by the pipeline for every request, and by ``POST /v1/route`` to explain. Tries nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from attrs import evolve, field, frozen

from enginehouse.contract.errors import ConfigError, ContextLengthExceeded, ModelNotFound, UnsupportedParameter
from enginehouse.contract.router import Attempt, Candidate, ChecksModels, Route, RouteQuestion, Router
from enginehouse.contract.types import GenerateRequest, ModelInfo
from enginehouse.pipeline.capabilities import Capability, check_parameters
from enginehouse.pipeline.media import check_media
from enginehouse.pipeline.routing.experience import Experience
from enginehouse.plugins import plugin_border
from enginehouse.serving import ModelManager, ModelStatus
from enginehouse.settings.config import Settings
from enginehouse.settings.structuring import closest

__all__ = ["AUTO", "CapabilitiesOf", "Plan", "Planner", "TooLong"]

AUTO = "auto"
"""The model name that asks a router; a model or alias of that name comes before it."""

_DEFAULT_STRATEGY = "load"
_FALLBACK = "fallback"
_BEHIND = ("failed", "restarting", "loading", "draining")
"""States of models that are tried after all others."""

_log = logging.getLogger(__name__)

TooLong = Mapping[str, ContextLengthExceeded]
"""Models whose context cannot hold a prompt, and what they would answer."""

CapabilitiesOf = Callable[[str, ModelInfo], Mapping[str, Capability]]
"""What a model makes of each parameter, by the model's name and what is known of it."""


@frozen(kw_only=True)
class Plan:
    """What will be tried for one request.

    Attributes:
        strategy: the router's name; ``fallback`` for the chain of a named model.
        route: the decision; of its attempts those that seem hopeless now stand last.
        candidates: whom the router was asked about.
        refused: models that were left out, and why.
        last_resorts: models that are tried only because others fail, never because an answer was not good enough: those
            that stand in, and those that seem hopeless now.
        decision_s: seconds that the decision took.
        has_logprobs: the client has asked for log-probabilities.
        named: the model that the client named, and that others stand in for: what that one cannot do is refused. None
            where the choice was the server's: then a model that cannot is just not the one.
    """

    strategy: str
    route: Route
    candidates: tuple[Candidate, ...] = ()
    refused: Mapping[str, str] = field(factory=dict)
    last_resorts: frozenset[str] = frozenset()
    decision_s: float = 0.0
    has_logprobs: bool = False
    named: str | None = None


class Planner:
    """Plans for one server.

    Args:
        routers: the routers of all plugins, by name.
        capabilities_of: asked about models that have been loaded once.

    Raises:
        ConfigError: no plugin registers the router that the settings name, or its own settings do not suit the models.
        PluginError: the router failed over them.
    """

    def __init__(
        self,
        settings: Settings,
        routers: Mapping[str, Router],
        manager: ModelManager,
        capabilities_of: CapabilitiesOf,
    ) -> None:
        self._settings = settings.router
        self._models = tuple(settings.router.models or settings.models)
        self._slots = {name: model.slots for name, model in settings.models.items()}
        names = {known for name, model in settings.models.items() for known in (name, *model.aliases)}
        strategy = settings.router.strategy
        if strategy is not None and strategy not in routers:
            message = f"router.strategy: no plugin registers a router {strategy!r}{closest(strategy, tuple(routers))}"
            raise ConfigError(message, "router.strategy")
        self._router = routers.get(strategy or _DEFAULT_STRATEGY) if AUTO not in names and self._models else None
        if isinstance(self._router, ChecksModels):
            with plugin_border(f"the router {self._router.name!r}"):
                self._router.check_models(self._models)
        self._manager = manager
        self._capabilities_of = capabilities_of
        self.experience = Experience(settings.router)

    @property
    def default(self) -> str:
        """The model to take where nothing speaks for another one."""
        return self._settings.default or self._models[0]

    def is_routed(self, asked: str | None) -> bool:
        """Whether a router decides about requests for this name."""
        return asked == AUTO and self._router is not None

    def named_by(self, request: GenerateRequest) -> tuple[str, ...]:
        """The models that a plan for the request may hold, stand-ins included."""
        chains = self._settings.fallbacks
        names = self._models if self.is_routed(request.model) else (self._manager.find(request.model).name,)
        named = dict.fromkeys((*names, *(other for name in names for other in chains.get(name, ()))))
        return tuple(name for name in named if _may_use(request, name))

    def plan(self, request: GenerateRequest, too_long: TooLong = MappingProxyType({})) -> Plan | None:
        """What to try; None for a named model that nothing stands in for.

        Args:
            too_long: models whose context cannot hold the prompt, as far as that is known.

        Raises:
            ModelNotFound: no model has that name, or its caller may use none of those that it may mean.
            UnsupportedParameter: none of them can do what is asked; says what the first one cannot.
            ContextLengthExceeded: the prompt fits none of those that can.
        """
        if self.is_routed(request.model):
            return self._ask_router(request, too_long)
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
        route = Route(attempts=attempts, reason=f"asked for; {', '.join(others)} may stand in")
        return Plan(
            strategy=_FALLBACK,
            route=self._hopeful_first(route),
            refused=refused,
            has_logprobs=_has_logprobs(request),
            named=name,
        )

    def _ask_router(self, request: GenerateRequest, too_long: TooLong) -> Plan:
        """A router that fails is as one that has no opinion: the default model is asked, then the others."""
        router = self._router
        assert router is not None
        began = time.perf_counter()
        candidates, refused = self._candidates(request, too_long)
        default = next((one.name for one in candidates if one.name == self.default), candidates[0].name)
        strategy = router.name
        try:
            route = router.route(RouteQuestion(request=request, candidates=candidates, default=default))
            known = {candidate.name for candidate in candidates}
            strangers = [attempt.model for attempt in route.attempts if attempt.model not in known]
            if strangers or not route.attempts:
                raise ValueError(f"it names {strangers or 'no model'}")
        except Exception as error:  # noqa: BLE001 - plugin border: a broken router must not refuse requests
            _log.error("the router %s failed; taking the default model", router.name, exc_info=error)
            ordered = sorted(candidates, key=lambda one: one.name != default)
            route = Route(
                attempts=tuple(Attempt(candidate.name) for candidate in ordered),
                reason=f"the router failed: {type(error).__name__}",
            )
        stand_ins = self._stand_ins(request, route, too_long)
        route = self._hopeful_first(evolve(route, attempts=(*route.attempts, *map(Attempt, stand_ins))))
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
        )

    def _candidates(self, request: GenerateRequest, too_long: TooLong) -> tuple[tuple[Candidate, ...], dict[str, str]]:
        statuses = {status.name: status for status in self._manager.statuses()}
        found: list[tuple[Candidate, bool]] = []
        refused: dict[str, str] = {}
        first: UnsupportedParameter | None = None
        for rank, name in enumerate(self._models):
            status = statuses.get(name)
            if status is None or not _may_use(request, name):
                continue  # not even named: its caller must not learn of it
            capabilities = self._capabilities_of(name, status.info) if status.info is not None else {}
            try:
                check_parameters(request, capabilities)
                if status.info is not None:
                    check_media(request.messages or (), status.info.engine)
            except UnsupportedParameter as error:
                refused[name] = error.message
                first = first or error
                continue
            if name in too_long:
                refused[name] = too_long[name].message
                continue
            tools = capabilities.get("tools")
            found.append((self._candidate(rank, status), tools is not None and tools.support == "native"))
        if not found and (longest := [too_long[name] for name in refused if name in too_long]):
            raise max(longest, key=lambda error: error.max_context)
        if not found:
            raise first or ModelNotFound(AUTO)
        if request.tool_use is not None and any(has_tools for _, has_tools in found):
            # Every model can be told of tools in words; those that were trained for them do it better.
            for candidate, has_tools in found:
                if not has_tools:
                    refused[candidate.name] = "tools: its chat template knows none, as another model's does"
            found = [one for one in found if one[1]]
        return tuple(candidate for candidate, _ in found), refused

    def _candidate(self, rank: int, status: ModelStatus) -> Candidate:
        return Candidate(
            name=status.name,
            rank=rank,
            state=status.state,
            has_failed=self.experience.has_failed(status.name),
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            slots=self._slots.get(status.name, 1),
            max_context=status.info.max_context if status.info is not None else None,
            backend=status.backend,
            first_token_s=self.experience.first_token_s(status.name),
        )

    def _stand_ins(self, request: GenerateRequest, route: Route, too_long: TooLong) -> tuple[str, ...]:
        """What the settings put behind the first model, besides what is tried anyway."""
        chain = self._settings.fallbacks.get(route.attempts[0].model, ())
        tried = {*(attempt.model for attempt in route.attempts), *too_long}
        return tuple(dict.fromkeys(name for name in chain if name not in tried and _may_use(request, name)))

    def _hopeful_first(self, route: Route) -> Route:
        """The same attempts; models that cannot answer now stand behind those that can."""
        if len(route.attempts) == 1:
            return route
        hopeless = self._hopeless(route)
        ordered: Sequence[Attempt] = sorted(route.attempts, key=lambda attempt: attempt.model in hopeless)
        return evolve(route, attempts=tuple(ordered))

    def _hopeless(self, route: Route) -> frozenset[str]:
        """The models of a route that cannot answer now."""
        states = {status.name: status.state for status in self._manager.statuses()}
        models = {attempt.model for attempt in route.attempts}
        return frozenset(model for model in models if states.get(model) in _BEHIND or self.experience.has_failed(model))


def _may_use(request: GenerateRequest, name: str) -> bool:
    return request.allowed_models is None or name in request.allowed_models


def _has_logprobs(request: GenerateRequest) -> bool:
    return request.sampling.get("num_logprobs") is not None
