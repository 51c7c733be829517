"""What of JSON Schema is refused, where, and what becomes of the rest before the library sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_llguidance.options import LlguidanceOptions
from enginehouse_llguidance.schemas import SchemaProblem, prepare_schema
from enginehouse_llguidance.schemas.numbers import number_keywords


def compile_schema(compiler: GrammarCompiler, schema: Any) -> None:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    compiler.compile(Constraint(kind="json_schema", text=text, param="response_format.json_schema.schema"))


def refusal(compiler: GrammarCompiler, schema: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        compile_schema(compiler, schema)
    assert refused.value.param == "response_format.json_schema.schema"
    return refused.value.message.removeprefix("response_format.json_schema.schema: ")


def loop(**fields: Any) -> dict[str, Any]:
    return {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, **fields}},
    }


FEW = [  # fewer than four values
    {"type": "boolean"},
    {"type": "string", "maxLength": 0},
    {"type": "string", "pattern": "^a*$", "maxLength": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "maxItems": 1},
]
FEW_TOGETHER: list[dict[str, Any]] = [  # number and kind of the items are asked for by different schemas
    {"allOf": [{"minItems": 3, "items": {"enum": [1, 2]}}]},
    {"allOf": [{"minItems": 3, "items": {"minimum": 1}}], "items": {"type": "integer", "maximum": 2}},
    {"items": {"type": "boolean"}, "anyOf": [{"minItems": 3}, {"minItems": 4}]},
    {"$ref": "#/$defs/booleans", "minItems": 3, "$defs": {"booleans": {"items": {"type": "boolean"}}}},
    {"items": {"enum": [1, 2, 3]}, "contains": {"const": 1}, "minContains": 2},
    {"items": {"const": 1}, "contains": {"type": "integer"}, "minContains": 2},
]
NAMED_A_OR_B = {"type": "object", "propertyNames": {"pattern": "^[ab]$"}}
REFUSED: list[tuple[Any, str]] = [
    # Keywords and their values
    ({"not": {"$ref": "#"}, "anyOf": [{"$ref": "#"}]}, "without end"),
    ({"properties": {"a/b~": {"dependentSchemas": []}}}, "'/properties/a~1b~0/dependentSchemas': must be an object"),
    ({"dependencies": {"a": [1]}}, "'/dependencies/a'"),
    ({"not": {"properties": 3}}, "'/not/properties': is malformed"),
    *(
        ({"type": "array", "uniqueItems": True, **keywords}, "no value was found that satisfies the schema")
        for keywords in (*({"items": items, "minItems": 4} for items in FEW), *FEW_TOGETHER)
    ),
    ({"type": "array", "uniqueItems": 1, "maxItems": 1}, "'/uniqueItems': must be true or false"),
    # Malformed values
    ({"items": {"disallow": True}}, "'/items/disallow': must be a type or a list"),
    ({"divisibleBy": "2"}, "'/divisibleBy': must be a number"),
    ({"extends": "other"}, "'/extends': must be a schema"),
    ({"type": ["string", 3]}, "'/type'"),
    ({"exclusiveMinimum": "0"}, "'/exclusiveMinimum'"),
    ({"type": "strnig"}, "'/type': 'strnig' is not a type"),
    ({"type": 7}, "'/type'"),
    ({"type": []}, "'/type'"),
    ({"properties": []}, "'/properties': must be an object"),
    ({"properties": {"a": 3}}, "'/properties/a': a schema must be"),
    ({"required": "a"}, "'/required'"),
    ({"required": [1]}, "'/required'"),
    ({"enum": "a"}, "'/enum'"),
    ({"anyOf": []}, "'/anyOf'"),
    ({"allOf": {}}, "'/allOf'"),
    ({"minLength": -1}, "'/minLength'"),
    ({"minLength": 1.5}, "'/minLength'"),
    ({"maxLength": "3"}, "'/maxLength'"),
    ({"maxItems": True}, "'/maxItems'"),
    ({"minimum": "0"}, "'/minimum'"),
    ({"multipleOf": 0}, "'/multipleOf'"),
    ({"multipleOf": -2}, "'/multipleOf'"),
    ({"pattern": 3}, "'/pattern'"),
    ({"format": []}, "'/format'"),
    ({"prefixItems": {}}, "'/prefixItems'"),
    ({"patternProperties": {"(": {}}}, "'/patternProperties/('"),
    ({"$ref": 3}, "'/$ref'"),
    ("[1, 2", "not valid JSON"),
    ('{"const": NaN}', "not valid JSON"),
    ('{"const": 1e999}', "'/const'"),
    ([], "a schema must be an object"),
    (None, "a schema must be an object"),
    # What no text says, or no value is found for
    ({"enum": []}, "Unsatisfiable schema"),
    ({"type": "array", "items": {"enum": [2, 3]}, "contains": {"const": 1}, "minContains": 9}, "Unsatisfiable schema"),
    ({"type": "object", "required": ["\ud83d"]}, "'/required': a lone surrogate"),
    ({"type": "string", "pattern": "^(?=b)a$"}, "Unsatisfiable schema"),
    ({"type": "string", "allOf": [{"pattern": f"a{{{n},}}"} for n in range(40)]}, "no value was found"),
    ({"type": "string", "pattern": "^\\p{Klingon}"}, "'/pattern': only properties such as"),
    ({"type": "integer", "multipleOf": 123_456_789, "minimum": 1, "maximum": 9}, "Unsatisfiable schema"),
    ({"type": "string", "not": {"format": "byte"}}, "no value was found that satisfies the schema"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "Unsatisfiable schema"),
    ({"additionalProperties": {}, "unevaluatedProperties": {"$ref": "#/$defs/none"}}, "does not exist"),
    (
        {
            **{"type": "object", "additionalProperties": False, "dependentSchemas": {"b": {"type": "array"}}},
            "unevaluatedProperties": {"$ref": "#/$defs/none"},
        },
        "does not exist",
    ),
    ({"contains": {"multipleOf": 0}, "minContains": 0}, "'/contains/multipleOf'"),
    ({"const": "\ud83d"}, "'/const': a lone surrogate"),
    (
        {**NAMED_A_OR_B, "additionalProperties": {"type": "null"}, "minProperties": 3},
        "no value was found that satisfies the schema",
    ),
    ({"type": "object", "propertyNames": False, "maxProperties": 2, "minProperties": 1}, "Unsatisfiable schema"),
    ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 1}, "minProperties": 1}, "Unsatisfiable schema"),
    ({"type": "object", "propertyNames": {"enum": ["a"], "const": "b"}, "minProperties": 1}, "Unsatisfiable schema"),
    # References
    ({"$ref": "#/$defs/none"}, "does not exist"),
    ({"$ref": "http://localhost:1/schema"}, "nothing is fetched"),
    ({"$ref": "other.json#/a"}, "nothing is fetched"),
    ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "other"}}}, "this schema has no anchor 'anchor'"),
    ({"items": {"$dynamicRef": "#a", "$id": "b"}, "$defs": {"c": {"$id": "c", "$dynamicAnchor": "a"}}}, "not exist"),
    (
        {
            "$id": "https://x/y",
            "anyOf": [{"$ref": "a"}, {"$ref": "b"}],
            "$defs": {
                "c": {
                    **{"$id": "c", "items": {"$dynamicRef": "#t", "multipleOf": 0}},
                    "$defs": {"d": {"$dynamicAnchor": "t"}},
                },
                "a": {"$id": "a", "$ref": "c", "$defs": {"t": {"$dynamicAnchor": "t", "type": "null"}}},
                "b": {"$id": "b", "$ref": "c", "$defs": {"t": {"$dynamicAnchor": "t", "type": "string"}}},
            },
        },
        "'/$defs/c/items/multipleOf'",
    ),
    ({"$ref": "#"}, "refers to itself without end"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{}, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#"}}}, "without end"),
    (loop(required=["a"]), "would have to contain another one"),
    ({"items": {"$id": "http://x/y", "items": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}, "does not exist"),
    # No value at all
    (False, "anyOf is empty"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater than maximum (2)"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible types"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, "Regex is empty"),
    # Too much
    ({"enum": list(range(20_001))}, "'/enum': has more than 20000 values"),
    ({"properties": {f"p{n}": {} for n in range(10_001)}}, "more than 10000 subschemas"),
    ({"allOf": [{"anyOf": [{"minimum": i + j} for i in range(10)]} for j in range(8)]}, "schema too large"),
    ('{"items":' * 119 + "{}" + "}" * 119, "nested deeper than 64 levels"),
    ('{"items":' * 200 + "{}" + "}" * 200, "nested deeper than 120 levels"),
    ('{"items":' * 20_000 + "{}" + "}" * 20_000, "nested deeper than 120 levels"),
    (json.dumps({"description": "x" * 262_144}), "bytes are more than the 262144"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=lambda value: str(value)[:60])
@pytest.mark.timeout(10)
def test_what_cannot_be_enforced_is_refused_by_name(compiler: GrammarCompiler, schema: Any, named: str) -> None:
    message = refusal(compiler, schema)

    assert named in message
    assert len(message) < 700


ACCEPTED = [
    {"type": "string", "minItems": "3"},
    {"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "$comment": ""},
    {"x-anything": {"not": 1}, "discriminator": {"propertyName": "a"}, "nullable": True, "example": 3, "xml": {}},
    {"maxLenght": 3, "items": {"minimun": 3}, "readonly": True, "_format": "a", "any_of": [{"not": 1}]},  # annotations
    {"format": "phone"},
    {"$defs": {"unused": {"not": {}, "type": "strnig"}}, "type": "null"},
    {"type": "string", "minimum": 5, "not_a_keyword": 1},
    {"type": "array", "uniqueItems": False, "minContains": 0},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"allOf": [{"uniqueItems": True}, *[{"anyOf": [{}] * 12}] * 5]},
    {"anyOf": [{"type": "array", "uniqueItems": True}, {"items": {"type": "null"}}]},
    {"type": "object", "dependentRequired": {}, "unevaluatedProperties": True, "propertyNames": {}},
    {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
    {"type": "array", "items": [{"type": "null"}], "additionalItems": False},  # before draft 2020-12
    {"type": "integer", "format": "int64"},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}},  # B25
    {"properties": {"a": {"not": {}}}, "items": {"not": True}, "not": False, "then": {}, "maxContains": 0},
    {"type": "number", "format": "date"},  # formats of strings say nothing about numbers
    {"type": "string", "format": "password"},
    {"type": "string", "maxLength": 3.0},
    {"const": 1.0},
    {"enum": [9007199254740992, 1e22 / 1e22, -0.0]},
    {"enum": ["\ud83d", 2**70, "a"]},  # what cannot be written is left out
    {"properties": {"a": {"enum": []}, "\ud83d": {}}},
    {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "null", "enum": [1]}}},
    {
        **{"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}},
        "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]}, "b": False},
    },
    {"oneOf": [{"type": "string"}, {"type": "null"}, {"enum": [1, True]}]},
    {"oneOf": [{"const": 1, "title": "one"}, {"const": 2}]},
    {"type": "object", "oneOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"required": ["b"]}]},
    {"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "null"}}, "$id": "http://example.com/root"},
    {"$schema": "http://json-schema.org/draft-07/schema", "$ref": "#/definitions/a", "definitions": {"a": {}}},
    *(  # members and branches that no value satisfies, by reference
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}, "b": {}}, "$defs": {"a": never}}
        for never in (False, {"not": {}}, {"not": {"x": 1}})
    ),
    {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"not": True}}},
    {"patternProperties": {"^.$": {}}, "required": ["b"]},
    loop(),
    {"anyOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"type": "null"}]},
]  # fmt: skip


@pytest.mark.parametrize("schema", ACCEPTED, ids=lambda value: str(value)[:60])
def test_what_asks_for_nothing_or_can_be_had_is_accepted(compiler: GrammarCompiler, schema: Any) -> None:
    compile_schema(compiler, schema)


def test_b06_a_pattern_with_an_unknown_escape_is_refused_by_name(compiler: GrammarCompiler) -> None:
    """B06: elsewhere such a pattern fails after the schema was taken, and the answer comes unconstrained."""
    message = refusal(compiler, {"type": "object", "properties": {"a": {"type": "string", "pattern": "^\\y+\\_$"}}})

    assert message.startswith("'/properties/a/pattern': \\y: this escape is not supported")


def prepared(schema: Any) -> Any:
    return prepare_schema(schema, LlguidanceOptions()).schema


def test_an_object_that_stands_alone_is_closed() -> None:
    closed = prepared({"properties": {"a": {"properties": {"b": {}}}}, "required": ["a"]})

    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": {}}, "required": ["a", "b"]},
        {"properties": {"a": {}}, "additionalProperties": {"type": "null"}},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "unevaluatedProperties": True, "$ref": "#/$defs/b", "$defs": {"b": {}}},
    ],
)
def test_an_object_that_must_stay_open_stays_open(schema: Any) -> None:
    assert prepared(schema).get("additionalProperties") is not False


def test_schemas_that_meet_in_one_object_are_not_closed() -> None:
    part = {"properties": {"a": {"properties": {"b": {}}}}}
    joined = prepared({"allOf": [part, {"properties": {"a": {"required": ["c"]}}}]})

    assert "additionalProperties" not in joined["allOf"][0]
    assert "additionalProperties" not in joined["allOf"][0]["properties"]["a"]


@pytest.mark.parametrize(
    ("schema", "integer", "keywords"),
    [
        ({}, False, {}),
        ({}, True, {"minimum": -(10**18), "maximum": 10**18}),
        ({"minimum": 0.5, "maximum": 3.5}, True, {"minimum": 1, "maximum": 3}),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 3}, True, {"minimum": 1, "maximum": 2}),
        ({"exclusiveMinimum": 0.5, "maximum": 2**63}, True, {"minimum": 1, "maximum": 2**63 - 1024}),
        ({"minimum": 0}, False, {"minimum": 0}),
        ({"exclusiveMinimum": 0}, False, {"minimum": 1e-12}),
        ({"minimum": 5e-324}, False, {"minimum": 1e-12}),
        ({"exclusiveMaximum": 1}, False, {"maximum": 0.999999999999}),
        ({"maximum": 0.1 + 0.2}, False, {"maximum": 0.3}),
        ({"minimum": 0.1 + 0.2}, False, {"minimum": 0.300000000000001}),
        ({"minimum": 0, "maximum": 1}, False, {"minimum": 0, "maximum": 1, "multipleOf": 1e-9}),
        ({"minimum": 2, "maximum": 2}, False, {"minimum": 2, "maximum": 2}),
        ({"multipleOf": 2.5}, True, {"minimum": -(10**18), "maximum": 10**18, "multipleOf": 5}),
        ({"multipleOf": 0.5}, False, {"minimum": -4503599627370490, "maximum": 4503599627370490, "multipleOf": 0.5}),
        ({"format": "uint8"}, True, {"minimum": 0, "maximum": 255}),
        ({"format": "int32", "minimum": -1}, True, {"minimum": -1, "maximum": 2**31 - 1}),
    ],
)
def test_bounds_of_numbers_become_inclusive_and_exact(schema: Any, integer: bool, keywords: Any) -> None:
    assert number_keywords(schema, "", integer=integer, exact=False) == keywords


def test_problems_have_pointers() -> None:
    with pytest.raises(SchemaProblem) as problem:
        prepared({"properties": {"a": {"items": {"disallow": {}}}}})

    assert problem.value.pointer == "/properties/a/items/disallow"
