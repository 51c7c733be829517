"""Numbers beyond those of the library: constants, bounds and divisors of any size."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

from .differential.walks import allowed_ids, follow, takes, walk

FAR = {
    "integer": ({"const": 2**64 + 1}, [2**64 + 1], [2**64, 2**64 + 2]),
    "negative": ({"const": -(10**30)}, [-(10**30)], [10**30, -1]),
    "large float": ({"const": 1e300}, [1e300], [10**300]),
    "small float": ({"const": 1e-300}, [1e-300], [0, 1e-30]),
    "many digits": ({"const": 0.1 + 0.2}, [0.1 + 0.2], [0.3]),
    "listed": ({"enum": [10**30, 2**70, "a", 7]}, [10**30, 2**70, "a", 7], [10**29, 2**70 + 1, 70]),
    "within others": (
        {"const": {"a": 2**65, "b": [1e-40, {"c": "\x7f\x01"}]}},
        [{"a": 2**65, "b": [1e-40, {"c": "\x7f\x01"}]}],
        [{"a": 2**65, "b": []}, {"a": 1}],
    ),
    "in branches": ({"anyOf": [{"const": 2**70}, {"const": 2**71}, {"type": "null"}]}, [2**70, 2**71, None], [2**72]),
    "in one branch": ({"oneOf": [{"const": 2**70}, {"const": 2**70 + 1}]}, [2**70, 2**70 + 1], [2**70 + 2]),
    "beside a type": ({"allOf": [{"type": "integer"}, {"const": 10**20}]}, [10**20], [10**19]),
    "beside bounds": ({"type": "integer", "enum": [2, 2**64], "minimum": 5}, [2**64], [2, 5]),
    "least": ({"type": "integer", "minimum": 10**30}, [10**30, 10**31 + 7], [10**30 - 1, -(10**31)]),
    "least of floats": ({"type": "number", "exclusiveMinimum": 1e30}, [11 * 10**29], [int(1e30), 5]),
    "between": (
        {"type": "integer", "minimum": 2**64 - 1, "maximum": 2**64},
        [2**64 - 1, 2**64],
        [2**64 - 2, 2**64 + 1],
    ),
    "most": ({"type": "integer", "maximum": -(10**25)}, [-(10**25), -(10**26)], [-(10**25) + 1, 0, 10**26]),
    "least, of other types": ({"minimum": 10**20}, [10**20, "a", None], [1]),
    "least of 400 digits": ({"type": "integer", "minimum": 10**400}, [10**400 + 1], [10**400 - 1]),
    "divisor": ({"type": "integer", "multipleOf": 10**20, "minimum": 1}, [10**20, 3 * 10**20], [10**20 + 1, 0]),
    "float as divisor": ({"type": "number", "multipleOf": 1e25, "exclusiveMinimum": 0}, [2 * 10**25], [10**24]),
    "items": (
        {"type": "array", "items": {"enum": [2**70, 2**71]}, "minItems": 2, "uniqueItems": True},
        [],
        [[2**70] * 2],
    ),
}
"""Schemas, values that may be written and others that are wrong."""


def text_of(value: Any) -> str:
    """As it is written: a whole number in digits, a short fraction as such."""
    is_whole = isinstance(value, float) and value == int(value)
    return json.dumps(int(value) if is_whole else value, ensure_ascii=False).replace("\x7f", "\\u007f")


@pytest.mark.parametrize("name", FAR)
def test_far_numbers_are_exact(compiler: GrammarCompiler, tokenizer: FakeTokenizer, name: str) -> None:
    schema, good, bad = FAR[name]
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    texts = {walk(grammar, tokenizer, random.Random(seed), 700) for seed in range(12)} - {None}

    assert texts
    for text in texts:
        Draft202012Validator(schema).validate(json.loads(text))
    assert [one for one in good if not takes(grammar, tokenizer, text_of(one))] == []
    assert [one for one in bad if takes(grammar, tokenizer, text_of(one))] == []


def test_a_member_whose_constant_another_schema_excludes_is_given_up(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer
) -> None:
    """Its name is taken back, since no value may follow it."""
    whole = {"type": "object", "required": ["a"], "unevaluatedProperties": {"type": "integer"}}
    excluded = {"properties": {"k": {"const": -9.5e-46}}}
    schema = {"type": "object", **excluded, "$ref": "#/$defs/whole", "$defs": {"whole": whole}}
    matcher = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema))).start()
    token_ids, chance = tokenizer.encode('{"k": ', special=False), random.Random(0)
    assert not any(follow(matcher, token_id) for token_id in token_ids)

    for _ in range(200):
        token_ids.append(chance.choice(allowed_ids(matcher, tokenizer)))
        if num_undone := follow(matcher, token_ids[-1]):
            del token_ids[-num_undone:]
        if b'"k' not in b"".join(tokenizer.token_bytes[one] for one in token_ids):
            return
    raise AssertionError("the name stays")


@settings(max_examples=60)
@given(data=st.data())
def test_random_far_numbers_validate(compiler: GrammarCompiler, tokenizer: FakeTokenizer, data: st.DataObject) -> None:
    far = st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
    key = data.draw(st.sampled_from(["const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]))
    schema = {"type": data.draw(st.sampled_from(["number", "integer"])), key: data.draw(far)}
    if key == "const":
        schema = {"enum": [schema["const"], data.draw(far)]}
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))

    for seed in range(3):
        if (text := walk(grammar, tokenizer, random.Random(seed), 700)) is not None:
            Draft202012Validator(schema).validate(json.loads(text))


def test_a_constant_is_written_without_a_choice(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    """No token is taken back."""
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps({"const": [10**40, -(2**90)]})))
    chance = random.Random(0)
    matcher = grammar.start()
    while not matcher.is_finished():
        assert follow(matcher, chance.choice(allowed_ids(matcher, tokenizer))) == 0


def test_integers_elsewhere_keep_their_bounds(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    """Only a schema that asks for far numbers has integers of more than 18 digits."""
    near = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(near)))

    assert takes(grammar, tokenizer, "[1000000000000000000]")
    assert not takes(grammar, tokenizer, "[1000000000000000001]")
