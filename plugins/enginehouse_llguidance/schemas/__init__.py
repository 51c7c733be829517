"""JSON Schema: supported keywords, and rewriting of a schema into one that the library enforces exactly."""

from __future__ import annotations

from enginehouse_llguidance.schemas.places import Loosening
from enginehouse_llguidance.schemas.preparing import PreparedSchema, prepare_schema, read_schema
from enginehouse_llguidance.schemas.problems import SchemaProblem, TooManySubschemas

__all__ = ["Loosening", "PreparedSchema", "SchemaProblem", "TooManySubschemas", "prepare_schema", "read_schema"]
