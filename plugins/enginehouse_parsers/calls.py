"""Compositions of enforced calls, in the form that a :class:`enginehouse_parsers.syntax.ToolSyntax` describes."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from attrs import evolve

from enginehouse.contract.composition import (
    Composition,
    FreeText,
    InOrder,
    Marker,
    Matching,
    OneOf,
    Repeated,
    Text,
    compose,
)
from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.types import Constraint, Tool
from enginehouse_parsers.json_schemas import type_of, types_of
from enginehouse_parsers.syntax import ID, INDEX, KEY, NAME, TYPE, ToolSyntax
from enginehouse_parsers.written_json import written_json

__all__ = ["MAX_CALLS", "Answer", "constraint_of"]

Answer = Constraint | Literal["any"] | None
"""Constraint of an answer without calls, see :meth:`enginehouse.contract.parsers.ToolFormat.constraint`."""

MAX_CALLS = 16
"""Maximum number of calls of one enforced answer: a small model that has started to call does not stop by itself."""

_MEMBERS = ("type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions")
"""Keywords of a schema whose members can be written one by one."""
_SOFT = frozenset({"type", "title", "description", "default", "examples", "$comment", "deprecated"})
"""Keywords that say nothing about a text."""
_PLACEHOLDERS = {ID: "[A-Za-z0-9]{9}", INDEX: "[0-9]{1,2}"}
_MARKERS = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]{3,}\]|\{(?:id|index)\}")
_JSON_TOKENS = re.compile(r'("[^"]*"|[{}\[\]])')


def constraint_of(syntax: ToolSyntax, tools: Sequence[Tool], parallel: bool, answer: Answer) -> Constraint:
    """Return the constraint; see :meth:`enginehouse.contract.parsers.ToolFormat.constraint`.

    Raises:
        UnsupportedParameter: optional calls must be checked, but the beginning of a call looks like text.
    """
    parallel = parallel and not syntax.is_single
    if answer == "any":
        param = next(f"{tool.param}.strict" for tool in tools if tool.strict)
        marker = syntax.first_marker
        if not marker or ("<|" in marker and not _MARKERS.fullmatch(marker)):  # control tokens are not text
            said = "this model's calls can only be checked with the tool_choice 'required' or a named function"
            raise UnsupportedParameter(f"{param}: {said}", param)
        return compose(_talk_or_call(syntax, _only_strict(tools), parallel), param)
    calls = _one_or_more(_call(syntax, tools), syntax.separator, parallel)
    whole = InOrder((*_written(syntax.section_start.lstrip()), calls, *_written(syntax.section_end)))
    if not syntax.section_start.strip():
        whole = InOrder((_call(syntax, tools, is_first=True), *_further(_call(syntax, tools), syntax, parallel)))
    return compose(whole if answer is None else OneOf((whole, Matching(answer))), "tool_choice")


# -- an answer -------------------------------------------------------------------------------------


def _one_or_more(call: Composition, separator: str, parallel: bool) -> Composition:
    if not parallel:
        return call
    return InOrder((call, Repeated(InOrder((*_written(separator), call)), 0, MAX_CALLS - 1)))


def _further(call: Composition, syntax: ToolSyntax, parallel: bool) -> tuple[Composition, ...]:
    if not parallel:
        return ()
    return (Repeated(InOrder((*_written(syntax.separator), call)), 0, MAX_CALLS - 1),)


def _talk_or_call(syntax: ToolSyntax, tools: Sequence[Tool], parallel: bool) -> Composition:
    """Return the composition of any text, with checked calls after the marker that begins them."""
    marker = syntax.first_marker
    start = syntax.section_start if syntax.section_start.strip() else syntax.call_start
    rest = start.partition(marker)[2]
    call = _call(syntax, tools)
    if syntax.section_start.strip():
        calls = _one_or_more(call, syntax.separator, parallel)
        return OneOf((FreeText(), InOrder((FreeText(marker), *_written(rest), calls, *_written(syntax.section_end)))))
    first = _call(evolve(syntax, call_start=rest), tools)
    return OneOf((FreeText(), InOrder((FreeText(marker), first, *_further(call, syntax, parallel)))))


def _only_strict(tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools; those that are not strict accept any object as arguments."""
    return [tool if tool.strict else evolve(tool, parameters={"additionalProperties": True}) for tool in tools]


def _written(text: str) -> tuple[Composition, ...]:
    """Return a fixed text: markers, and one part per JSON token, as a decoder may tell calls from other objects."""
    parts: list[Composition] = []
    position = 0
    for found in _MARKERS.finditer(text):
        parts += _texts(text[position : found.start()])
        pattern = _PLACEHOLDERS.get(found[0])
        parts.append(Marker(found[0]) if pattern is None else Matching(Constraint(kind="regex", text=pattern)))
        position = found.end()
    return (*parts, *_texts(text[position:]))


def _texts(text: str) -> list[Composition]:
    return [Text(piece) for piece in _JSON_TOKENS.split(text) if piece]


# -- a call ----------------------------------------------------------------------------------------


def _call(syntax: ToolSyntax, tools: Sequence[Tool], *, is_first: bool = False) -> Composition:
    start = syntax.call_start.lstrip() if is_first else syntax.call_start
    calls: list[Composition] = [
        InOrder(
            (
                *_written(f"{start.replace(NAME, tool.name)}{tool.name}{syntax.name_end}"),
                *_arguments(syntax, tool),
                *_written(syntax.call_end),
            )
        )
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else OneOf(tuple(calls))


def _arguments(syntax: ToolSyntax, tool: Tool) -> tuple[Composition, ...]:
    schema = tool.arguments_schema
    members = _members(schema) if syntax.kind == "tagged" or syntax.quotes or syntax.kind == "keywords" else None
    if syntax.kind != "tagged" and members is not None and not all(map(_is_keyword, members)):
        members = None
    if syntax.kind != "keywords" and members is not None and not all(map(_is_simple, members.values())):
        members = None
    if members is None:
        before, after = ("(**", ")") if syntax.kind == "keywords" else ("", "")
        return (*_texts(before), _matching(schema, f"{tool.param}.parameters"), *_texts(after))
    required = set(schema.get("required", ()))
    write = _writer(syntax, schema)
    written = {
        name: write(name, member, f"{tool.param}.parameters.properties.{name}") for name, member in members.items()
    }
    first = [name for name in members if name in required]
    optional = [name for name in members if name not in required]
    if syntax.kind == "tagged":
        return (*(part for name in first for part in written[name]), *_each_optional(written, optional))
    before, after, separator = ("(", ")", ", ") if syntax.kind == "keywords" else ("{", "}", ",")
    return (Text(before), *_separated(written, first, optional, separator), Text(after))


def _is_keyword(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _members(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the members in order; None for a schema with other keywords."""
    properties = schema.get("properties", {})
    if schema.get("additionalProperties") is not False or not set(schema) <= set(_MEMBERS):
        return None
    if not isinstance(properties, dict) or not set(schema.get("required", ())) <= properties.keys():
        return None
    return properties if all(name and not set(name) & set("<>\n\"'") for name in properties) else None


def _each_optional(written: Mapping[str, tuple[Composition, ...]], names: Sequence[str]) -> list[Composition]:
    return [Repeated(InOrder(written[name]), 0, 1) for name in names]


def _separated(
    written: Mapping[str, tuple[Composition, ...]], required: Sequence[str], optional: Sequence[str], separator: str
) -> list[Composition]:
    """Return the required arguments, then any of the optional ones, with separators."""

    def further(name: str) -> Composition:
        return Repeated(InOrder((Text(separator), *written[name])), 0, 1)

    if required:
        parts: list[Composition] = []
        for number, name in enumerate(required):
            parts += (*((Text(separator),) if number else ()), *written[name])
        return [*parts, *map(further, optional)]
    if not optional:
        return []
    beginnings: list[Composition] = [
        InOrder((*written[name], *map(further, optional[number + 1 :]))) for number, name in enumerate(optional)
    ]
    return [Repeated(OneOf(tuple(beginnings)), 0, 1)]


# -- an argument -----------------------------------------------------------------------------------

_Write = Callable[[str, Any, str], tuple[Composition, ...]]


def _writer(syntax: ToolSyntax, root: Mapping[str, Any]) -> _Write:
    """Return the function that writes one argument, given its name, schema and request field."""

    def tagged(name: str, schema: Any, param: str) -> tuple[Composition, ...]:
        types = types_of(schema, dict(root))
        words = dict(syntax.type_words)
        end = syntax.value_end.replace(KEY, name)

        def start(kind: str) -> tuple[Composition, ...]:
            key_end = syntax.key_end.replace(TYPE, words.get(kind, words.get("", "")))
            return _written(f"{syntax.parameter_start}{name}{key_end}")

        if (allowed := _allowed(schema)) is not None:
            texts = [(type_of(one), one if isinstance(one, str) else written_json(one)) for one in allowed]
            return (OneOf(tuple(InOrder((*start(kind), *_texts(text), *_written(end))) for kind, text in texts)),)
        if "string" not in types:
            return (*start(min(types)), _value(schema, root, param), *_written(end))
        return (*start("string"), *_tagged_text(schema, end, param))

    def quoted(name: str, schema: Any, param: str) -> tuple[Composition, ...]:
        sign = "=" if syntax.kind == "keywords" else ":"
        start = Text(f"{name}{sign}")
        if syntax.quotes and types_of(schema, dict(root)) == {"string"} and not _allowed(schema):
            quote = syntax.quotes[0]
            return (start, Marker(quote), *_tagged_text(schema, quote, param))
        return (start, _value(schema, root, param))

    return tagged if syntax.kind == "tagged" else quoted


def _tagged_text(schema: Any, end: str, param: str) -> tuple[Composition, ...]:
    """Return a text that the marker ``end`` follows; its schema allows texts."""
    bounds = _text_pattern(schema) if isinstance(schema, dict) else None
    if bounds is not None:
        return (Matching(Constraint(kind="regex", text=bounds, param=param)), *_written(end))
    marker = end.strip()
    return (FreeText(until=marker), *_written(end[end.index(marker) + len(marker) :]))


def _allowed(schema: Any) -> list[Any] | None:
    """Return the only values that a schema allows; None if it does not list them."""
    if not isinstance(schema, dict):
        return None
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return listed if isinstance(listed, list) and listed else None


def _is_simple(schema: Any) -> bool:
    """True if a value that may be a text can be enforced without quotation marks."""
    if not isinstance(schema, dict) or not schema:
        return schema != False  # noqa: E712 - any other schema allows everything
    if isinstance(kind := schema.get("type"), str) and kind != "string":
        return True
    branches = schema.get("anyOf")
    if isinstance(branches, list):
        return set(schema) <= {*_SOFT, "anyOf"} and {"type": "string"} in branches
    return set(schema) <= {*_SOFT, "enum", "const", "pattern", "minLength", "maxLength"}


def _text_pattern(schema: Mapping[str, Any]) -> str | None:
    """Return the regular expression of a text; None if it may be any."""
    pattern, least, most = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength")
    length = f"(?s:.){{{least},{most if most is not None else ''}}}"
    has_length = bool(least) or most is not None
    if isinstance(pattern, str):
        condition = f"(?={length}$)" if has_length else ""
        return f"{condition}(?s:.*)(?:{pattern})(?s:.*)"
    return length if has_length else None


def _value(schema: Any, root: Mapping[str, Any], param: str) -> Matching:
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return _matching({**definitions, **schema} if isinstance(schema, dict) else schema, param)


def _matching(schema: Any, param: str) -> Matching:
    text = written_json(schema) if isinstance(schema, dict) else json.dumps(schema)
    return Matching(Constraint(kind="json_schema", text=text, param=param))
