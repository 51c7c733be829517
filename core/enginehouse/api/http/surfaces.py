"""Serves the surfaces: core's own one and those of plugins, each with its routes, frames and error bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from litestar import Request, Response, Router
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from enginehouse.api.http.body import read_body
from enginehouse.api.http.callers import caller_of
from enginehouse.api.http.state import ApiState, HandlerRoute
from enginehouse.api.openai.decoding import BodyDecoder
from enginehouse.api.openai.generation import GenerationResponse
from enginehouse.contract.errors import ConfigError
from enginehouse.contract.surface import GenerationRoute, Route, Surface
from enginehouse.settings.structuring import closest

__all__ = ["Surfaces"]

_Request = Request[Any, Any, Any]


class Surfaces:
    """The surfaces that are on.

    Raises:
        ConfigError: a name in ``chosen`` is unknown, or two surfaces have the same route.
    """

    def __init__(self, known: Iterable[Surface], chosen: Iterable[str] | None) -> None:
        by_name = {surface.name: surface for surface in known}
        for name in chosen or ():
            if name not in by_name:
                hint = closest(name, by_name)
                raise ConfigError(f"server.surfaces: no surface {name!r} is installed{hint}", "server.surfaces")
        self._surfaces = [by_name[name] for name in (by_name if chosen is None else dict.fromkeys(chosen))]
        self._by_address: dict[str, Surface] = {}
        self._routes: dict[tuple[str, str], Route] = {}
        for surface in self._surfaces:
            for route in surface.routes:
                self._add(surface, route)
        self._depth = max((address.count("/") for address in self._by_address), default=0)

    def _add(self, surface: Surface, route: Route) -> None:
        address = route.path.partition("/{")[0]
        other = self._by_address.setdefault(address, surface)
        if other is not surface or (route.method, route.path) in self._routes:
            names = f"the surfaces {other.name!r} and {surface.name!r}"
            message = f"{names} both have {route.path}; leave one of them out of server.surfaces"
            raise ConfigError(message, "server.surfaces")
        self._routes[route.method, route.path] = route

    @property
    def routes(self) -> list[Route]:
        """All routes, in the order of the surfaces."""
        return list(self._routes.values())

    def at(self, path: str) -> Surface | None:
        """Return the surface to which an address belongs, whether it exists or not, or None."""
        # Clients choose the length of a path, and this runs before they are known.
        path = "/".join(path.split("/", self._depth + 1)[: self._depth + 1])
        while path:
            if (surface := self._by_address.get(path)) is not None:
                return surface
            path = path.rpartition("/")[0]
        return None

    def routers(self, state: ApiState) -> list[Router]:
        """Return Litestar's routers of all routes; one per scope, which also holds for the method OPTIONS."""
        handlers: dict[str, list[HTTPRouteHandler]] = {}
        for route in self.routes:
            handlers.setdefault(route.scope, []).append(_handler(route, state))
        return [Router("/", route_handlers=of_scope, opt={"scope": scope}) for scope, of_scope in handlers.items()]


def _handler(route: Route, state: ApiState) -> HTTPRouteHandler:
    server, limits = state.settings.server, state.settings.limits
    decoder = None
    if route.body is not None:
        decoder = BodyDecoder(
            route.body,
            state.registry.request_fields,
            limits,
            server.unsupported_parameters,
            logs_prompts=server.log_prompts and isinstance(route, GenerationRoute),
        )

    async def decode(request: _Request) -> Any:
        if decoder is None:
            return None
        return await decoder.read(await read_body(request.receive, limits.max_body_bytes), caller_of(request.scope))

    handler = HTTPRouteHandler(route.path, http_method=route.method, status_code=200, limits=route.limits)
    if isinstance(route, GenerationRoute):

        async def generate(request: _Request) -> ASGIApp:
            return await GenerationResponse.make(state, route, await decode(request))

        return handler(generate)
    assert isinstance(route, HandlerRoute), "plugins register routes that generate"

    async def answer(request: _Request) -> Response[Any]:
        return await route.handle(request, await decode(request))

    return handler(answer)
