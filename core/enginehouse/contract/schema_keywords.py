"""Names of JSON Schema's keywords, and the search for members of a schema that are not keywords.

By the standard an unknown member is an annotation, without effect on validation. A request with one is accepted, and it
is listed in ``X-Enginehouse-Ignored``, with a hint if it looks like a misspelt keyword.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["FORMAT_NAMES", "KEYWORD_NAMES", "SUBSCHEMAS", "find_unknown_keywords", "meant_keyword"]

_Holds = Literal["schema", "schemas", "named"]

SUBSCHEMAS: Mapping[str, _Holds] = MappingProxyType(
    {
        **dict.fromkeys(("additionalItems", "additionalProperties", "contains", "contentSchema"), "schema"),
        **dict.fromkeys(("else", "if", "not", "propertyNames", "then"), "schema"),
        **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), "schema"),
        **dict.fromkeys(("allOf", "anyOf", "items", "oneOf", "prefixItems"), "schemas"),
        **dict.fromkeys(("$defs", "definitions", "dependencies", "dependentSchemas"), "named"),
        **dict.fromkeys(("patternProperties", "properties"), "named"),
    }
)
"""Keywords with subschemas: one schema, a list of schemas (or one), or schemas by name."""

KEYWORD_NAMES = frozenset(
    {
        *SUBSCHEMAS,
        *("$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef", "$ref"),
        *("$schema", "$vocabulary", "id"),
        *("const", "contentEncoding", "contentMediaType", "default", "dependentRequired", "deprecated", "description"),
        *("disallow", "divisibleBy", "enum", "examples", "exclusiveMaximum", "exclusiveMinimum", "extends", "format"),
        *("maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength"),
        *("minProperties", "minimum", "multipleOf", "pattern", "readOnly", "required", "title", "type", "uniqueItems"),
        "writeOnly",
        *("discriminator", "example", "externalDocs", "nullable", "xml"),  # OpenAPI's
    }
)
"""The keywords of drafts 3 to 2020-12, and the annotations of OpenAPI."""

FORMAT_NAMES = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri"),
        *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference"),
        *("uri-template", "uuid"),
        *("host-name", "ip-address"),  # draft 3's
        *("binary", "byte", "directory-path", "file-path", "password", "path"),  # schema generators'
        *("double", "float", "int", "int8", "int16", "int32", "int64", "uint", "uint8", "uint16", "uint32", "uint64"),
    }
)
"""Values of ``format`` with a meaning here; an unknown one is an annotation as well."""

_LONG = sorted(name for name in KEYWORD_NAMES if len(name) > 3)  # shorter ones are too similar to many other words
_MAX_FOUND = 50
_MAX_VISITED = 10_000
_MAX_CHARS = 96


def meant_keyword(name: str) -> str | None:
    """Return the known keyword that an unknown one probably means: other case, swapped, extra or missing letters."""
    plain = name.replace("_", "").replace("-", "").lower()
    for known in _LONG:
        if sorted(plain) == sorted(known.lower()):
            return known
    close = get_close_matches(name, _LONG, n=1, cutoff=0.85)
    return close[0] if close else None


def find_unknown_keywords(schema: Any, path: str) -> Iterator[str]:
    """Yield the paths of members that are not keywords, with hints; the first 50 in the first 10,000 subschemas.

    Args:
        path: path of the schema within the request.
    """
    waiting, num_visited, num_found = [(schema, path)], 0, 0
    while waiting and num_visited < _MAX_VISITED and num_found < _MAX_FOUND:
        value, place = waiting.pop()
        num_visited += 1
        if not isinstance(value, dict):
            continue
        inner: list[tuple[Any, str]] = []
        for name, member in value.items():
            if name not in KEYWORD_NAMES:
                num_found += 1
                meant = None if name.startswith(("x-", "_")) else meant_keyword(name)
                yield _shown(f"{place}.{name}", "" if meant is None else f" (did you mean {meant}?)")
                continue
            if name == "format" and isinstance(member, str) and member not in FORMAT_NAMES:
                num_found += 1
                yield _shown(f"{place}.format", f" (unknown: {member[:40]})")
            holds = SUBSCHEMAS.get(name)
            if holds == "named" and isinstance(member, dict):
                inner.extend((one, f"{place}.{name}.{key}") for key, one in member.items())
            elif holds == "schemas" and isinstance(member, list):
                inner.extend((one, f"{place}.{name}[{index}]") for index, one in enumerate(member))
            elif holds is not None:
                inner.append((member, f"{place}.{name}"))
        waiting.extend(reversed(inner))


def _shown(path: str, hint: str) -> str:
    room = _MAX_CHARS - len(hint)
    return f"{path}{hint}" if len(path) <= room else f"{path[: room // 2]}...{path[3 - room // 2 :]}{hint}"
