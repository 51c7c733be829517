"""Forms of drafts 3 and 4 mean what they mean there, by the validators of these drafts."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft3Validator, Draft4Validator

from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

from .differential.walks import takes, walk

DRAFT_3, DRAFT_4 = "http://json-schema.org/draft-03/schema#", "http://json-schema.org/draft-04/schema#"
NULL = {"type": "null"}
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "exclusive bounds": (
        Draft4Validator,
        {"type": "integer", "minimum": 2, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False},
        [3, 5],
        [2, 6],
    ),
    "an exclusive bound without bound": (Draft3Validator, {"type": "integer", "exclusiveMaximum": True}, [1], ["a"]),
    "OpenAPI 3.0": (
        Draft4Validator,
        {
            **{"$ref": "#/components/schemas/Price"},
            "components": {"schemas": {"Price": {"type": "integer", "minimum": 0, "exclusiveMinimum": True}}},
        },
        [1],
        [0],
    ),
    "required properties": (
        Draft3Validator,
        {
            **{"$schema": DRAFT_3, "type": "object", "additionalProperties": False},
            "properties": {"a": {**NULL, "required": True}, "b": {**NULL, "required": False}},
        },
        [{"a": None}, {"a": None, "b": None}],
        [{}, {"b": None}],
    ),
    "any type": (Draft3Validator, {"type": "any"}, [1, "a", None], []),
    "types that are schemas": (
        Draft3Validator,
        {"type": ["integer", {"type": "object", "properties": {"a": NULL}, "additionalProperties": False}]},
        [1, {"a": None}],
        ["a", {"a": 1}],
    ),
    "disallowed types": (Draft3Validator, {"disallow": "integer"}, ["a", None], [1]),
    "disallowed schemas": (
        Draft3Validator,
        {"disallow": ["string", {"type": "integer", "minimum": 3}]},
        [2, None],
        ["a", 3],
    ),
    "disallowed beside types": (Draft3Validator, {"disallow": "null", "type": ["null", "integer"]}, [2], [None]),
    "divisible numbers": (Draft3Validator, {"divisibleBy": 3, "type": "integer"}, [6], [7]),
    "extended schemas": (
        Draft3Validator,
        {
            **{"$schema": DRAFT_3, "type": "object", "properties": {"a": NULL}, "additionalProperties": NULL},
            "extends": {"properties": {"b": {**NULL, "required": True}}},
        },
        [{"b": None}, {"a": None, "b": None}],
        [{"a": None}, {}],
    ),
    "names of formats": (Draft3Validator, {"type": "string", "format": "ip-address"}, ["1.2.3.4"], ["a"]),
    "times without zone": (Draft3Validator, {"$schema": DRAFT_3, "format": "time"}, ["12:00:00", 1], ["12:00:00Z"]),
    "an id as base": (
        Draft4Validator,
        {
            **{"$schema": DRAFT_4, "id": "http://x/root.json", "allOf": [{"$ref": "other.json"}]},
            "definitions": {"a": {"id": "http://x/other.json", **NULL}},
        },
        [None],
        [1],
    ),
    "an id as anchor": (
        Draft4Validator,
        {"$schema": DRAFT_4, "allOf": [{"$ref": "#it"}], "definitions": {"a": {"id": "#it", **NULL}}},
        [None],
        [1],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_early_forms_are_enforced(compiler: GrammarCompiler, tokenizer: FakeTokenizer, name: str) -> None:
    dialect, schema, good, bad = CASES[name]
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    texts = {walk(grammar, tokenizer, random.Random(seed), 200) for seed in range(20)} - {None}

    assert texts
    validator = dialect(schema, format_checker=dialect.FORMAT_CHECKER)
    assert all(validator.is_valid(json.loads(text)) for text in texts)
    for value, is_valid in [*((one, True) for one in good), *((one, False) for one in bad)]:
        assert validator.is_valid(value) == is_valid
        assert takes(grammar, tokenizer, json.dumps(value)) == is_valid, value


def test_members_of_these_names_elsewhere_are_left_alone(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    """Names of properties, constants, and annotations."""
    schema = {
        "type": "object",
        "properties": {"required": {"const": {"required": True}}, "extends": NULL, "id": NULL},
        "required": ["required", "extends", "id"],
        "x-kept": {"extends": "anything", "disallow": 3},
    }
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))

    assert takes(grammar, tokenizer, '{"required": {"required": true}, "extends": null, "id": null}')
