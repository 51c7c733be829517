"""OpenAI's API as a surface: each address exists with and without ``/v1``."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve

from enginehouse.api.http.errors import error_body
from enginehouse.api.http.state import ApiState
from enginehouse.api.openai.chat import chat_route
from enginehouse.api.openai.completions import completion_route
from enginehouse.api.openai.compress import compress_route
from enginehouse.api.openai.models import model_routes, route_route
from enginehouse.api.openai.tokens import token_routes
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.surface import ErrorAnswer, Reply, Route


@define
class OpenAISurface:
    """Chat and text completions, models, tokens."""

    routes: Sequence[Route]
    name: str = "openai"
    api_version: int = API_VERSION
    request_id_header: str | None = None
    takes_any_type: bool = False

    def error(self, error: ErrorAnswer) -> Reply:
        """Return OpenAI's error object."""
        return Reply(error_body(error))


def openai_surface(state: ApiState) -> OpenAISurface:
    """Return the surface of one configuration snapshot."""
    routes = [chat_route(state), completion_route(state), route_route(state), compress_route(state)]
    routes += [*model_routes(state), *token_routes(state)]
    return OpenAISurface([evolve(route, path=f"{prefix}{route.path}") for prefix in ("/v1", "") for route in routes])
