"""Serves the surfaces: core's own one and those of plugins, each with its routes, frames and error bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from litestar import Request, Router
from litestar.enums import HttpMethod
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from enginehouse.api.generation.decoding import BodyDecoder, DecodedCall
from enginehouse.api.generation.response import GenerationResponse
from enginehouse.api.generation.server_access import ServerAccess
from enginehouse.api.generation.stream import ReplyResponse
from enginehouse.api.generation.surface_calls import SurfaceCalls
from enginehouse.api.http.body import read_body
from enginehouse.api.http.origins import Headers
from enginehouse.api.http.state import ApiState
from enginehouse.contract.errors import ConfigError
from enginehouse.contract.surface import GenerationRoute, ReplyRoute, Route, Surface
from enginehouse.settings.structuring import closest

_Request = Request[Any, Any, Any]
_T = TypeVar("_T")
_Handle = Callable[[_Request], Awaitable[ASGIApp]]


class Surfaces:
    """The surfaces that are on.

    Raises:
        ConfigError: a name in ``chosen`` is unknown, or two surfaces have the same route.
    """

    def __init__(
        self, known: Iterable[Surface], chosen: Iterable[str] | None, absences: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        by_name = {surface.name: surface for surface in known}
        for name in chosen or ():
            if name not in by_name:
                hint = f": {absences[name]}" if name in absences else closest(name, by_name)
                raise ConfigError(f"unknown surface {name!r}{hint}", "server.surfaces")
        self._surfaces = [by_name[name] for name in (by_name if chosen is None else dict.fromkeys(chosen))]
        self._by_address: dict[str, dict[str | None, Surface]] = {}  # by the header that its requests need
        self._routes: dict[tuple[str, str], dict[str | None, tuple[Surface, Route]]] = {}
        for surface in self._surfaces:
            for route in surface.routes:
                self._add(surface, route)
        self._depth = max((address.count("/") for address in self._by_address), default=0)

    def _add(self, surface: Surface, route: Route) -> None:
        shared = self._routes.setdefault((route.method, route.path), {})
        address = route.path.partition("/{")[0]
        owner = self._by_address.setdefault(address, {}).setdefault(route.header, surface)
        other = shared[route.header][0] if route.header in shared else owner
        # Nothing is below "/": surfaces may have different methods there.
        if route.header in shared or (other is not surface and address != "/"):
            names = f"the surfaces {other.name!r} and {surface.name!r}"
            message = f"{names} both have {route.path}; leave one of them out of server.surfaces"
            raise ConfigError(message, "server.surfaces")
        for other, beside in shared.values():
            if (beside.scope, beside.limits) != (route.scope, route.limits):
                names = f"the surfaces {other.name!r} and {surface.name!r}"
                message = f"{names} both have {route.path}, with different scopes or limits; leave one of them out of "
                raise ConfigError(f"{message}server.surfaces", "server.surfaces")
        shared[route.header] = surface, route

    @property
    def routes(self) -> list[Route]:
        """All routes, in the order of the surfaces."""
        return [route for shared in self._routes.values() for _, route in shared.values()]

    def at(self, path: str, headers: Headers) -> Surface | None:
        """Return the surface to which an address belongs, whether it exists or not, or None."""
        # Clients choose the length of a path, and this runs before they are known.
        path = "/".join(path.split("/", self._depth + 1)[: self._depth + 1])
        while path:
            if (owners := self._by_address.get(path)) is not None:
                return _chosen(owners, headers)
            path = path.rpartition("/")[0]
        return None

    def has_head(self, path: str) -> bool:
        """Return True if a route answers HEAD requests there itself."""
        return ("HEAD", path) in self._routes

    def routers(self, state: ApiState) -> list[Router]:
        """Return Litestar's routers of all routes; one per scope, which also holds for the method OPTIONS."""
        handlers: dict[str, list[HTTPRouteHandler]] = {}
        for (method, path), shared in self._routes.items():
            _, first = next(iter(shared.values()))
            handler = HTTPRouteHandler(path, http_method=HttpMethod(method), status_code=200, limits=first.limits)
            by_header = {
                header: _handle(route, SurfaceCalls.of(surface), state) for header, (surface, route) in shared.items()
            }
            handlers.setdefault(first.scope, []).append(handler(_by_header(by_header)))
        return [ScopedRouter(scope, of_scope) for scope, of_scope in handlers.items()]


class ScopedRouter(Router):
    """Routes whose callers need a scope; None is for everybody.

    An application copies its routers deeply, with the schemas of all routes, in case other applications have them too.
    These are made for one.
    """

    def __init__(self, scope: str | None, handlers: Sequence[HTTPRouteHandler]) -> None:
        super().__init__("/", route_handlers=handlers, opt={"scope": scope})

    def __deepcopy__(self, memo: object) -> ScopedRouter:
        return self


def _chosen(by_header: Mapping[str | None, _T], headers: Headers) -> _T | None:
    """Return the value of the first header that a request has, else that for all others, or None."""
    for header, value in by_header.items():
        if header is not None and header.encode("latin-1") in headers:
            return value
    return by_header.get(None)


def _by_header(handles: Mapping[str | None, _Handle]) -> _Handle:
    """Return a handler that passes requests on to that of the header that they have."""

    async def choose(request: _Request) -> ASGIApp:
        handle = _chosen(handles, dict(request.scope["headers"]))
        if handle is None:
            raise NotFoundException
        return await handle(request)

    async def only(request: _Request) -> ASGIApp:
        return await handles[None](request)

    return only if set(handles) == {None} else choose


def _handle(route: Route, surface: SurfaceCalls, state: ApiState) -> _Handle:
    server, limits = state.settings.server, state.settings.limits
    decoder: BodyDecoder[Any] | None = None
    if route.body is not None:
        decoder = BodyDecoder(
            route.body,
            state.registry.request_fields,
            limits,
            server.unsupported_parameters,
            logs_prompts=server.log_prompts and isinstance(route, GenerationRoute),
            absences=state.registry.absences,
            foreign=state.registry.foreign_fields,
        )

    async def call_of(request: _Request) -> DecodedCall[Any]:
        access = ServerAccess.of(state, request.scope, request.receive)
        if decoder is None:
            return DecodedCall(body=None, server=access)
        return await surface.decode(decoder, await read_body(request.receive, limits.max_body_bytes), access)

    if isinstance(route, GenerationRoute):

        async def generate(request: _Request) -> ASGIApp:
            return await GenerationResponse.make(state, route, surface, await call_of(request))

        return generate
    assert isinstance(route, ReplyRoute), "plugins register routes of these two classes"

    async def answer(request: _Request) -> ASGIApp:
        call = await call_of(request)
        return ReplyResponse(state, call, await surface.handle(route, call))

    return answer
