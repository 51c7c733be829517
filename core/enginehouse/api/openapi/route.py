"""``GET /schema``: the document as JSON, built on first request.

There is no page to browse it: those that Litestar offers load their code from other servers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from enginehouse.api.generation.encoding import encode_json
from enginehouse.api.http.state import ApiState
from enginehouse.api.openapi.document import build_document
from enginehouse.contract.surface import Route

__all__ = ["schema_route"]


def schema_route(state: ApiState, routes: Sequence[Route]) -> HTTPRouteHandler:
    """Return the route; the document describes ``routes`` of surfaces, and those of core."""

    @functools.cache
    def encoded() -> bytes:
        return encode_json(
            build_document(
                routes, state.registry.request_fields, state.settings.limits, state.settings.server.root_path
            )
        )

    @get(["/schema", "/schema/openapi.json"])
    async def show_schema() -> Response[bytes]:
        """Show the OpenAPI document."""
        return Response(encoded(), media_type="application/json")

    return show_schema
