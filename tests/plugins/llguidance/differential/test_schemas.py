"""Whatever a matcher lets through validates; what cannot be enforced was refused."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import Grammar, GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

from .strategies import schemas
from .walks import walk

MAX_COMPILE_S = 5.0  # of processor time; usual are milliseconds


def compiled(compiler: GrammarCompiler, schema: Any) -> Grammar | None:
    """The grammar; None when the schema is refused in good form."""
    began = time.process_time()
    try:
        return compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema), param="schema"))
    except InvalidRequest as error:
        assert error.param == "schema" and error.message.startswith("schema: ")
        return None
    finally:
        assert time.process_time() - began < MAX_COMPILE_S


def errors_of(schema: Any, text: str) -> list[str]:
    """What an independent validator finds, formats included."""
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    try:
        return [error.message for error in validator.iter_errors(json.loads(text))]
    except OverflowError:
        return []  # it cannot divide what Python reads as infinity, such as 1e999
    except ZeroDivisionError:
        return []  # "multipleOf": 0 in a schema without effect, as beside "minContains": 0; elsewhere it is refused


def check(compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: Any, seed: int) -> None:
    grammar = compiled(compiler, schema)
    for number in range(4 if grammar else 0):
        text = walk(grammar, tokenizer, random.Random(f"{seed} {number}"))
        note(f"wrote {text!r}")
        assert text is None or errors_of(schema, text) == []


unhurried = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], print_blob=True)


@settings(unhurried, max_examples=400)
@example(  # a thousand literals, of which few begin with what is written
    schema={
        "type": "integer",
        "multipleOf": 2**63 - 1,
        "$ref": "#/$defs/one",
        "$defs": {"one": {"type": "integer", "multipleOf": 1}},
    },
    seed=0,
)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_every_finished_walk_validates(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: Any, seed: int
) -> None:
    check(compiler, tokenizer, schema, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(unhurried, max_examples=20_000)
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_every_finished_walk_validates_at_length(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: Any, seed: int
) -> None:
    check(compiler, tokenizer, schema, seed)


def test_most_of_the_schemas_that_people_write_are_accepted(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer
) -> None:
    """The property above would hold if everything were refused."""
    for number, schema in enumerate(ORDINARY):
        grammar = compiled(compiler, schema)
        assert grammar is not None, schema
        texts = {walk(grammar, tokenizer, random.Random(seed), 2000) for seed in range(12)} - {None}
        assert texts, schema
        assert all(errors_of(schema, text) == [] for text in texts), (number, texts)


PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
        "score": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        "email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}], "default": None},
        "friends": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        "tags": {"type": "array", "items": {"enum": ["red", 1, None, 1.5, {"a": []}]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "x-internal": {"anything": 1},
}
SHAPES = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$defs": {
        "circle": {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0}},
            "required": ["kind", "radius"],
        },
        "a/b~c": {
            "type": "object",
            "properties": {"kind": {"const": "square"}, "side": {"$ref": "#/$defs/length"}},
            "required": ["kind", "side"],
        },
        "length": {"type": "integer", "multipleOf": 5, "minimum": 5, "maximum": 9007199254740993},
    },
    "oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/a~1b~0c"}],
}
BY_PYDANTIC = {
    "$defs": {
        "A": {
            "properties": {"kind": {"const": "a", "title": "Kind", "type": "string"}, "x": {"type": "integer"}},
            "required": ["kind", "x"],
            "title": "A",
            "type": "object",
        },
        "B": {
            "properties": {
                "kind": {"const": "b", "type": "string"},
                "y": {"exclusiveMaximum": 1, "exclusiveMinimum": 0, "type": "number"},
            },
            "required": ["kind", "y"],
            "type": "object",
        },
        "Color": {"enum": ["red", 2], "title": "Color"},
    },
    "properties": {
        "opt": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "Opt"},
        "c": {"$ref": "#/$defs/Color", "description": "its colour"},
        "td": {"format": "duration", "type": "string"},
        "dec": {
            "anyOf": [{"type": "number"}, {"pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "type": "string"}],
        },
        "m": {"additionalProperties": {"type": "integer"}, "type": "object"},
        "tup": {"maxItems": 2, "minItems": 2, "prefixItems": [{"type": "integer"}, {"type": "null"}], "type": "array"},
        "un": {
            "discriminator": {"mapping": {"a": "#/$defs/A", "b": "#/$defs/B"}, "propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        },
        "url": {"format": "uri", "maxLength": 2083, "minLength": 1, "type": "string"},
        "path": {"format": "path", "type": "string"},
        "rx": {"pattern": "^[A-Z]{3}-\\d+$", "type": "string"},
        "anything": {"title": "Anything"},
    },
    "required": ["c", "td", "dec", "m", "tup", "un"],
    "title": "M",
    "type": "object",
}
ORDINARY = [
    PERSON,
    SHAPES,
    BY_PYDANTIC,
    {"type": "array", "items": SHAPES["$defs"]["length"], "minItems": 2, "maxItems": 2},
    {"type": ["string", "null"], "pattern": "^[A-Z]{2}-\\d{3,5}$"},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": False},
    {"const": {"a": [1, {"b": None}], 'q"': "é\n"}},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["b"]}]},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
    {"type": "integer", "format": "uint64"},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "number", "multipleOf": 0.25, "minimum": -3, "maximum": 3},
    {"type": "integer", "multipleOf": 9999},  # has more remainders to tell apart than its value 10000
    {"allOf": [{"type": "integer", "multipleOf": 313}, {"type": "integer", "multipleOf": 317}]},
    {"type": "object"},
    {},
    True,
]
