"""A schema whose keywords are checked later is refused at once if no value satisfies it, and only then."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint

ALL_EQUAL = {"oneOf": [{}] * 13}
NO_VALUE: dict[str, Any] = {
    "oneOf of equal schemas": ALL_EQUAL,
    "oneOf of equal schemas of one type": {"type": "string", "oneOf": [{"minLength": 0}] * 13},
    "oneOf of bounds that all hold": {"type": "integer", "minimum": 12, "oneOf": [{"minimum": n} for n in range(13)]},
    "oneOf in a property": {"type": "object", "properties": {"x": ALL_EQUAL}, "required": ["x"]},
    "oneOf in items": {"type": "array", "items": ALL_EQUAL, "minItems": 2},
    "not of what always holds": {"type": "array", "maxItems": 1, "not": {"uniqueItems": True}},
    "not of the only name": {
        **{"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
        "not": {"propertyNames": {"const": "a"}},
    },
    "bounds of contains": {"items": {"const": [1]}, "contains": {"uniqueItems": True}, "maxContains": 1}
    | {"type": "array", "minItems": 2},
    "not of what all items are": {"type": "array", "items": {"enum": [2, 3]}, "not": {"items": {"multipleOf": 1}}},
    "if, then and else": {"type": "integer", "if": {"multipleOf": 3}, "then": False, "else": {"multipleOf": 3}}
    | {"minimum": 0, "maximum": 1000},
    "unevaluated items": {"type": "array", "minItems": 1, "allOf": [{"anyOf": [{}, {}, {}]}] * 4}
    | {"unevaluatedItems": False},
    "oneOf after a long text": {
        **{"type": "object", "required": ["a", "b"]},
        "properties": {"a": {"type": "string", "minLength": 800}, "b": ALL_EQUAL},
    },
    "not of every long array": {
        **{"type": "array", "items": {"enum": [1, 2]}, "minItems": 400},
        "not": {"contains": {"uniqueItems": True}},
    },
    "too few different items": {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "minItems": 3},
}


def compile_schema(compiler: GrammarCompiler, schema: Any) -> None:
    compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema), param="schema"))


@pytest.mark.parametrize("name", NO_VALUE)
def test_a_schema_that_no_value_satisfies_is_refused(compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(InvalidRequest, match="schema: no value was found that satisfies the schema") as refused:
        compile_schema(compiler, NO_VALUE[name])

    assert refused.value.param == "schema"


SATISFIABLE: dict[str, Any] = {
    "property that may be absent": {"type": "object", "properties": {"x": ALL_EQUAL, "y": {"type": "integer"}}},
    "one other branch": {"anyOf": [ALL_EQUAL, {"type": "null"}]},
    "array without items": {"type": "array", "items": ALL_EQUAL},
    "one string": {"type": "string", "oneOf": [{"minLength": n} for n in range(13)]},
    "numbers below": {"type": "integer", "oneOf": [{"minimum": n} for n in range(13)], "maximum": 20},
    "few numbers": {"type": "integer", "minimum": 0, "maximum": 50, "if": {"multipleOf": 3}, "then": {"maximum": 9}}
    | {"else": {"minimum": 45}},
    "most items": {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "minContains": 9}
    | {"maxItems": 12},
    "equal items": {"type": "array", "items": {"enum": [1, 2]}, "not": {"uniqueItems": True}},
    "long string before": {
        **{"type": "object", "required": ["a", "b"]},
        "properties": {"a": {"type": "string", "minLength": 800}, "b": {"oneOf": [{"type": "null"}, ALL_EQUAL]}},
    },
    "long array of what is often wrong": {
        **{"type": "array", "minItems": 400},
        "items": {"type": "integer", "minimum": 10, "maximum": 99, "oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]},
    },
}


@pytest.mark.parametrize("name", SATISFIABLE)
def test_a_schema_with_rare_or_long_values_is_not(compiler: GrammarCompiler, name: str) -> None:
    compile_schema(compiler, SATISFIABLE[name])


def test_a_schema_whose_every_value_is_too_large_to_be_checked_is_refused(compiler: GrammarCompiler) -> None:
    constants = {"anyOf": [{"const": number} for number in range(1000)]}
    schema = {"type": "array", "items": {"items": constants, "minItems": 60, "type": "array"}, "minItems": 1}
    with pytest.raises(InvalidRequest, match="schema: a value is too large to be checked") as refused:
        compile_schema(compiler, {**schema, "not": {"propertyNames": {}, "uniqueItems": False}})

    assert refused.value.param == "schema"
