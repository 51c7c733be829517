"""The OpenAPI document of this server: built from the classes that decode requests, and from its plugins."""

from __future__ import annotations

from enginehouse.api.openapi.document import build_document
from enginehouse.api.openapi.route import schema_route

__all__ = ["build_document", "schema_route"]
