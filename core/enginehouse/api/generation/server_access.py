"""Core's answers to a surface that asks about models, tokens and running requests, by the permissions of its caller."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from litestar.types import Scope

from enginehouse.api.admin.requests import Engines, describe_answer
from enginehouse.api.generation.pooling import pool
from enginehouse.api.generation.running_answers import MediaMemory, RunningAnswer, find_answer, list_answers
from enginehouse.api.http.access import record_of
from enginehouse.api.http.callers import Caller, caller_of, check_model, may_manage, shown_as
from enginehouse.api.http.errors import MissingScope, NotLocal, RequestNotRunning
from enginehouse.api.http.exchange import Receive
from enginehouse.api.http.origins import foreign_sign
from enginehouse.api.http.security import memory_of
from enginehouse.api.http.state import ApiState
from enginehouse.contract.calls import ModelEntry
from enginehouse.contract.errors import InvalidRequest, ModelLoadError, ModelNotFound, quoted
from enginehouse.contract.types import GenerateRequest, PoolingRequest, PoolingResult, Segment
from enginehouse.pipeline.prompting import Prompt
from enginehouse.serving import LoadedModel, ModelStatus
from enginehouse.serving.changing import load_model, unload_model
from enginehouse.serving.sources import downloading, hub_of


@frozen(eq=False)
class ServerAccess:
    """Core as seen by the surface of one request: a :class:`enginehouse.contract.calls.Server`.

    Attributes:
        scope: ASGI scope of the request.
        receive: ASGI's, which tells when the client disconnects.
        caller: the sender of the request.
    """

    state: ApiState
    scope: Scope
    receive: Receive
    caller: Caller

    @classmethod
    def of(cls, state: ApiState, scope: Scope, receive: Receive) -> ServerAccess:
        """Return the access of a request that the guard admitted."""
        caller = caller_of(scope)
        if caller.key is None:
            caller = Caller(profile=caller.profile, named_profile=caller.named_profile, is_local=may_manage(scope))
        return cls(state, scope, receive, caller)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of an answer that the server allows."""
        return self.state.settings.limits.max_tokens

    @property
    def max_choices(self) -> int:
        """Most choices of an answer."""
        return self.state.settings.limits.max_choices

    @property
    def max_prompts(self) -> int:
        """Most prompts of one body."""
        return self.state.settings.limits.max_prompts

    # -- models ------------------------------------------------------------------------------------

    def statuses(self) -> Iterator[tuple[ModelStatus, list[str]]]:
        """Yield the status of every model that the caller may use, and the names by which it may request it."""
        for status in self.state.manager.statuses():
            if names := shown_as(self.caller, status):
                yield status, names

    def models(self) -> list[ModelEntry]:
        """Return the models that the caller may use, in the order of the settings."""
        return [self._entry(status, names) for status, names in self.statuses()]

    def model(self, name: str | None) -> ModelEntry:
        """Return one model; where a router chooses by that name, its most likely choice."""
        status = self.state.manager.find(self._find(name)).status()
        # A key that is limited to adapters of a model has no name of the model itself.
        names = shown_as(self.caller, status) or [name or status.name]
        return self._entry(status, names)

    def status(self, name: str) -> tuple[ModelStatus, list[str]]:
        """Return the status of a model, and the names by which the caller may request it. Raises ModelNotFound."""
        check_model(self.caller, name, self.state.manager)
        status = self.state.manager.find(name).status()
        return status, shown_as(self.caller, status)

    def _find(self, name: str | None) -> str:
        """Return the configured name of a model that the caller may use. Raises ModelNotFound."""
        usual = self.state.pipeline.usual_model(name)
        check_model(self.caller, usual, self.state.manager)
        return self.state.manager.find(usual).name

    def _entry(self, status: ModelStatus, names: Sequence[str]) -> ModelEntry:
        model, info = self.state.manager.find(status.name), status.info
        profile = self.state.pipeline.model_profile(status.name, info) if info is not None else None
        supported = profile.capabilities.items() if profile is not None else ()
        return ModelEntry(
            name=names[0],
            aliases=tuple(names[1:]),
            state=status.state,
            created=status.created,
            progress=status.progress,
            error=self.shown_error(status),
            backend=status.backend,
            is_pinned=model.settings.pin,
            ttl_s=model.settings.ttl,
            idle_s=status.idle_s,
            memory_bytes=status.memory_bytes,
            size_bytes=_size(model.plan.source.path) if model.plan is not None else None,
            info=info,
            quantization=profile.quantization if profile is not None else None,
            fingerprint=profile.fingerprint if profile is not None else None,
            supports=frozenset(name for name, one in supported if one.support != "refused"),
            reasons=profile is not None and profile.formats.reasoning is not None,
            adapters=model.adapters.scales(model.settings.adapters),
            adapter_ids={name: place for place, name in enumerate(model.adapters.places)},
        )

    def shown_error(self, status: ModelStatus) -> str | None:
        """Return why a model has failed, without details that are not meant for the caller."""
        if status.error is None or may_manage(self.scope):
            return status.error
        return ModelLoadError.generic  # the actual error may name files

    def defaults(self, name: str | None) -> Mapping[str, Any]:
        """Return the parameters of requests that give none; empty before the first load."""
        found = self._find(name)
        info = self.state.manager.find(found).status().info
        if info is None:
            return {}
        parameters = self.state.pipeline.defaults(name or found, found, info, self.caller.profile.name)
        groups = (parameters.sampling, parameters.stopping)
        return {member: getattr(group, member) for group in groups for member in group.__struct_fields__}

    # -- tokens ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[LoadedModel]:
        """Lease a model for the duration of the block, and name it in the log."""
        async with self.state.manager.use(self._find(name)) as model:
            record_of(self.scope).model = model.name
            yield model

    async def prompt(self, request: GenerateRequest, model: LoadedModel) -> Prompt:
        """Return the prompt of a request, whose chat is rendered."""
        counted = evolve(request, hold=MediaMemory(memory_of(self.scope)))
        return await self.state.pipeline.prompt(counted, model)

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Return the number of prompt tokens of a request."""
        caller = self.caller
        own = evolve(request, profile=caller.profile.name, caller=caller.name, allowed_models=caller.allowed_models)
        async with self.use(request.model) as model:
            prompt = await self.prompt(own, model)
            return len(await prompt.tokenize(self.state.pipeline.recovery, caller.name))

    async def tokenize(
        self, text: str, model: str | None = None, *, add_special: bool = False, parse_special: bool = True
    ) -> Sequence[int]:
        """Return the token ids of a text."""
        async with self.use(model) as loaded:
            prompt = text_prompt(loaded, text, add_special=add_special, parse_special=parse_special)
            return await prompt.tokenize(self.state.pipeline.recovery, self.caller.name)

    async def detokenize(self, token_ids: Sequence[int], model: str | None = None) -> str:
        """Return the text of token ids, with control tokens by name."""
        async with self.use(model) as loaded:
            return await self.state.pipeline.recovery.detokenize(loaded, token_ids, self.caller.name)

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        """Return the rows of a request to a pooling model."""
        return await pool(self.state, self.scope, self.receive, self.caller, request)

    # -- orders ------------------------------------------------------------------------------------

    async def load(self, model: str) -> ModelEntry:
        """Load a model and wait until it is ready."""
        self._check_admin()
        await self.state.exchanges.follow(load_model(self.state.manager, self._find(model)))
        return self.model(model)

    async def unload(self, model: str, *, force: bool = False) -> ModelEntry:
        """Unload a model, once its requests have finished."""
        self._check_admin()
        unloading = unload_model(self.state.manager, self._find(model), drain=not force, force=force)
        await self.state.exchanges.follow(unloading)
        return self.model(model)

    def download(self, model: str) -> AsyncGenerator[tuple[float, str]]:
        """Download the source of a served model, or another model by its id."""
        self._check_admin()
        registry = self.state.registry
        try:
            served = self.state.manager.find(model)
        except ModelNotFound:
            served = None
        text = model if served is None else served.settings.source
        hub = hub_of(text, registry)
        if hub is not None:
            return downloading(hub, text)
        if served is not None:
            return _nothing()
        name = f"the model {quoted(model)} is not served, and"
        if not registry.model_hubs:
            reason = f"{name} no plugin offers a hub to download it from; run: pip install 'enginehouse[hub]'"
        else:
            reason = f"{name} no hub has ids of this form; name it as OWNER/NAME, or OWNER/NAME:QUANTISATION"
        raise InvalidRequest(reason, "model")

    def pin(self, model: str, is_pinned: bool = True) -> ModelEntry:
        """Pin a model, or release it, until the configuration is read again."""
        self._check_admin()
        served = self.state.manager.find(self._find(model))
        ttl = None if is_pinned else self.state.settings.models[served.name].ttl
        served.use_settings(evolve(served.settings, pin=is_pinned, ttl=ttl))
        return self.model(model)

    def _check_admin(self) -> None:
        key = self.caller.key
        if key is not None and "admin" not in key.scopes:
            raise MissingScope("admin", sorted(key.scopes))
        if key is None and (sign := foreign_sign(self.scope)) is not None:
            raise NotLocal(sign)

    # -- running requests --------------------------------------------------------------------------

    def _own(self) -> list[RunningAnswer]:
        """Return the caller's running requests; all of them for those who manage the server."""
        answers = list_answers(self.state.exchanges)
        if may_manage(self.scope):
            return answers
        key = self.caller.key
        return [] if key is None else [answer for answer in answers if answer.record.key == key.name]

    async def requests(self) -> list[dict[str, Any]]:
        """Return the caller's running requests, oldest first."""
        answers = self._own()
        engines = Engines(self.state.manager, self.state.pipeline.recovery)
        views = await engines.views(self.caller.name, {answer.record.model for answer in answers}.__contains__)
        return [describe_answer(answer, views, engines.restarting()) for answer in answers]

    def _find_request(self, request_id: str) -> RunningAnswer:
        answer = find_answer(self.state.exchanges, request_id)
        # Without keys, the id is what its caller alone knows.
        if self.caller.key is not None and answer not in self._own():
            raise RequestNotRunning(f"No request with the id {quoted(request_id, 200)} is running.")
        return answer

    def cancel(self, request_id: str) -> None:
        """Cancel a running request of the caller."""
        self._find_request(request_id).cancel()

    async def stop_thinking(self, request_id: str) -> int:
        """Close the reasoning of a running request of the caller."""
        engines = Engines(self.state.manager, self.state.pipeline.recovery)
        return await self._find_request(request_id).stop_thinking(engines.get)


async def _nothing() -> AsyncGenerator[tuple[float, str]]:
    """Yield no step."""
    return
    yield


def text_prompt(model: LoadedModel, text: str, *, add_special: bool, parse_special: bool) -> Prompt:
    """Return a text as the prompt of a model."""
    segments = (Segment(text, trusted=parse_special),)
    return Prompt(model=model, segments=segments, token_ids=None, add_special=add_special, written=(text,))


def _size(path: Path | None) -> int | None:
    """Return the size of a model's file, or of the files in its folder."""
    if path is None:
        return None
    try:
        files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
        return sum(file.stat().st_size for file in files)
    except OSError:
        return None
