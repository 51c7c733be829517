"""What answers must look like in the benchmark of constrained decoding: fields of a request, by its name."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

__all__ = ["constants", "open_records", "prose", "records", "unconstrained"]

_LONG_NAMES = (
    "estimated_time_of_arrival_at_the_destination",
    "name_of_the_person_who_signed_the_delivery_note",
    "reason_why_the_shipment_could_not_be_delivered_in_time",
)
_LICENCE = (
    "This record was written by a program. It is provided as it is, without warranty of any kind; whoever uses it does "
    "so at their own risk, and keeps this notice together with every copy of it."
)


def unconstrained(name: str) -> Mapping[str, object]:
    """Free text."""
    return {}


def prose(name: str) -> Mapping[str, object]:
    """One long JSON string: nothing is forced but its first character, and every token needs a mask."""
    return _json_schema({"type": "string", "minLength": 2000})


def records(name: str) -> Mapping[str, object]:
    """A list of records that goes on for longer than any answer."""
    return _json_schema({"type": "array", "items": _record(), "minItems": 100})


def open_records(name: str) -> Mapping[str, object]:
    """An ordinary schema that was never seen before and leaves the first token open."""
    title = f"t{zlib.crc32(name.encode()):08x}"
    record = _record() | {"title": title}
    record["properties"] = {**record["properties"], title: {"type": "string", "maxLength": 12}}
    record["required"] = [*record["properties"]]
    schema = {
        "$defs": {"record": record, "point": _point()},
        "anyOf": [{"$ref": "#/$defs/record"}, {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 9}],
    }
    return _json_schema(schema)


def constants(name: str) -> Mapping[str, object]:
    """An object whose text is mostly known beforehand: long names and a long constant between short values."""
    properties: dict[str, object] = {"licence": {"const": _LICENCE}}
    properties |= {long_name: {"type": "integer", "minimum": 0, "maximum": 99} for long_name in _LONG_NAMES}
    return _json_schema(_object(properties))


def _record() -> dict[str, object]:
    return _object(
        {
            "name": {"type": "string", "minLength": 3, "maxLength": 30},
            "kind": {"enum": ["person", "place", "thing"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "email": {"type": "string", "format": "email"},
            "since": {"type": "string", "format": "date"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
            "at": _point(),
            "note": {"type": ["string", "null"], "maxLength": 40},
        }
    )


def _point() -> dict[str, object]:
    coordinate = {"type": "number", "minimum": -180, "maximum": 180}
    return _object({"latitude": coordinate, "longitude": coordinate})


def _object(properties: Mapping[str, object]) -> dict[str, object]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [*properties],
        "additionalProperties": False,
    }


def _json_schema(schema: Mapping[str, object]) -> Mapping[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}}
