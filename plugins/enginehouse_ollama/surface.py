"""The surface ``ollama``: its addresses, and requests that load or unload a model instead of generating."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal

from attrs import evolve

from enginehouse.contract.calls import Call
from enginehouse.contract.errors import EnginehouseError, ModelNotFound
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.surface import (
    NDJSON,
    Answer,
    Chunk,
    ErrorAnswer,
    GenerationRoute,
    Reply,
    ReplyRoute,
    Route,
)
from enginehouse.contract.types import GenerateRequest
from enginehouse_ollama.answers import OllamaAssembler, done
from enginehouse_ollama.bodies import ChatBody, GenerateBody, ModelBody
from enginehouse_ollama.embed import embed_routes
from enginehouse_ollama.keep_alive import apply_keep_alive, may_manage, read_keep_alive
from enginehouse_ollama.models import list_models, list_running, show_model
from enginehouse_ollama.requests import chat_request, generate_request, known_name

__all__ = ["API_LEVEL", "OllamaSurface"]

API_LEVEL = "0.32.15"
"""The release of Ollama whose API this is; clients compare it with the oldest one that they support."""

_Kind = Literal["chat", "generate"]

_REFUSED: tuple[tuple[Literal["POST", "DELETE"], str, str], ...] = (
    ("POST", "/api/create", "models are added in the configuration file"),
    ("POST", "/api/copy", "add an alias of the model in the configuration file"),
    ("DELETE", "/api/delete", "models are removed in the configuration file"),
    ("POST", "/api/push", "this server uploads no models"),
    ("POST", "/api/me", "this server has no accounts"),
    ("POST", "/api/signout", "this server has no accounts"),
)


def _requests(
    kind: _Kind, read: Callable[[Call], GenerateRequest], call: Call
) -> Sequence[GenerateRequest] | Awaitable[Reply]:
    """Return the request, or the response to one that only loads or unloads the model."""
    body = call.body
    keep_alive = read_keep_alive(body.keep_alive)
    if not (body.messages if kind == "chat" else body.prompt or body.suffix):
        return _change(call, kind, keep_alive)
    request = read(call)
    apply_keep_alive(call, keep_alive, known_name(call, body.model))
    return [request]


async def _change(call: Call, kind: _Kind, keep_alive: float | None) -> Reply:
    """Load, unload or pin a model, if the caller may; others are told that this had no effect."""
    name = known_name(call, call.body.model)
    reason = "load"
    if may_manage(call):
        if keep_alive == 0:
            await call.server.unload(name)
            reason = "unload"
        else:
            await call.server.load(name)
            apply_keep_alive(call, keep_alive, name)
    else:
        call.ignore("keep_alive")
    answer = done(call.body.model, kind, reason)
    return Reply(answer, media_type="application/json")


def _generation(kind: _Kind, body: type[Any], read: Callable[[Call], GenerateRequest], summary: str) -> GenerationRoute:
    async def assemble(call: Call, answer: Answer) -> OllamaAssembler:
        return OllamaAssembler(answer, call.body.model, kind, has_timings=call.body.timings_per_token)

    return GenerationRoute(
        path=f"/api/{kind}",
        name=f"ollama_{kind}",
        summary=summary,
        body=body,
        requests=partial(_requests, kind, read),
        assemble=assemble,
        frame=NDJSON,
    )


async def _root(call: Call) -> Reply:
    return Reply(b"Ollama is running", media_type="text/plain; charset=utf-8")


async def _version(call: Call) -> Reply:
    return Reply({"version": API_LEVEL})


_HUB_PREFIXES = ("hf.co/", "huggingface.co/")
"""Beginnings by which Ollama's users name models of the hub."""
_WHOLE = 10_000
"""Progress is told in parts of this many, since hubs report shares."""


async def _pull(call: Call) -> Reply:
    """Download the files of a model, whether it is served or not."""
    try:
        name, is_served = known_name(call, call.body.asked), True
    except ModelNotFound:
        name, is_served = call.body.asked, False
        for prefix in _HUB_PREFIXES:
            name = name.removeprefix(prefix)
    steps = call.server.download(name)
    if call.body.stream:
        return Reply(stream=_told(steps, name, is_served=is_served), frame=NDJSON)
    try:
        async for _ in steps:
            pass
    except EnginehouseError as error:
        return Reply({"error": error.message}, status=500)
    return Reply({"status": "success"})


async def _told(steps: AsyncGenerator[tuple[float, str]], name: str, *, is_served: bool) -> AsyncIterator[Chunk]:
    """Yield the progress of a download, as Ollama reports it."""
    yield {"status": "pulling manifest"}
    try:
        async with contextlib.aclosing(steps) as downloading:
            async for share, activity in downloading:
                yield {"status": activity, "total": _WHOLE, "completed": round(share * _WHOLE)}
    except EnginehouseError as error:
        yield {"error": error.message}
        return
    if not is_served:
        yield {"status": f"add it to the configuration to serve it: source = {name!r}"}
    yield {"status": "success"}


def _routes() -> list[Route]:
    get = ReplyRoute(method="GET", path="/", name="ollama", summary="Whether a server runs", limits=None, handle=_root)
    post = ReplyRoute(
        path="/api/show", name="ollama_show", summary="One model", body=ModelBody, limits=None, handle=show_model
    )
    return [
        _generation("chat", ChatBody, chat_request, "Continue a chat, as in Ollama"),
        _generation("generate", GenerateBody, generate_request, "Answer or continue a text, as in Ollama"),
        get,
        evolve(get, path="/api/version", name="ollama_version", summary="Level of Ollama's API", handle=_version),
        evolve(get, path="/api/tags", name="ollama_tags", summary="All models", handle=list_models),
        evolve(get, path="/api/ps", name="ollama_ps", summary="Loaded models", handle=list_running),
        post,
        *embed_routes(),
        evolve(post, path="/api/pull", name="ollama_pull", summary="Download a model", scope="admin", handle=_pull),
        *(_refused(post, method, path, reason) for method, path, reason in _REFUSED),
        *(_missing(get, method) for method in ("GET", "POST", "DELETE")),
    ]


def _refused(route: ReplyRoute, method: Literal["POST", "DELETE"], path: str, reason: str) -> ReplyRoute:
    async def refuse(call: Call) -> Reply:
        return Reply({"error": f"{path}: not supported; {reason}"}, status=501)

    name = f"ollama_{path.removeprefix('/api/')}"
    return evolve(route, method=method, path=path, name=name, summary="Not supported", body=None, handle=refuse)


def _missing(route: ReplyRoute, method: Literal["GET", "POST", "DELETE"]) -> ReplyRoute:
    """Return the route of all other addresses below ``/api``, so that they have Ollama's errors."""

    async def answer(call: Call) -> Reply:
        return Reply({"error": f"/api/{call.path['address']}: no such address"}, status=404)

    name = f"ollama_missing_{method.lower()}"
    return evolve(route, method=method, path="/api/{address:path}", name=name, summary="Other addresses", handle=answer)


class OllamaSurface:
    """Ollama's API."""

    name = "ollama"
    api_version = API_VERSION
    request_id_header = None
    takes_any_type = True  # as Ollama does: the examples of its documentation send JSON as a form

    def __init__(self) -> None:
        self.routes: Sequence[Route] = _routes()

    def error(self, error: ErrorAnswer) -> Reply:
        """Return Ollama's error object."""
        return Reply({"error": error.message})
