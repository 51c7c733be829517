"""What is enforced beside the grammar, while the JSON is written: items that differ, multiples, lengths of numbers."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from enginehouse.contract.composition import (
    Composition,
    FreeText,
    InOrder,
    Matching,
    OneOf,
    Repeated,
    Text,
    compose,
)
from enginehouse.contract.errors import GenerationFailed
from enginehouse.contract.structured import BacktrackingMatcher, GrammarCompiler, Matcher
from enginehouse.contract.types import Constraint
from enginehouse_testkit.fake_tokenizer import FakeTokenizer


def started(compiler: GrammarCompiler, schema: Any) -> Matcher:
    return compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema))).start()


def allowed_ids(matcher: Matcher, tokenizer: FakeTokenizer) -> list[int]:
    bitmask = np.zeros((tokenizer.vocab_size + 31) // 32, np.int32)
    matcher.fill_bitmask(bitmask)
    return np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist()


def written(matcher: Matcher, tokenizer: FakeTokenizer, chance: random.Random) -> str | None:
    """A text at random, or None if it is long; every mask allows something, and what is final is never taken back."""
    token_ids: list[int] = []
    num_final = num_backtracks = 0
    while not matcher.is_finished() and len(token_ids) < 300:
        token_ids.append(chance.choice(allowed_ids(matcher, tokenizer)))
        matcher.accept(token_ids[-1])
        if not isinstance(matcher, BacktrackingMatcher):
            pass
        elif num_wrong := matcher.backtrack():
            del token_ids[-num_wrong:]
            num_backtracks += 1
            assert len(token_ids) >= num_final and num_backtracks < 300
        else:
            assert num_final <= len(token_ids) - matcher.num_held()
            num_final = len(token_ids) - matcher.num_held()
        if token_ids and token_ids[-1] in tokenizer.end_token_ids:
            token_ids.pop()
            break
    else:
        if not matcher.is_finished():
            return None
    return b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids).decode()


def refuses(matcher: Matcher, tokenizer: FakeTokenizer, text: str) -> bool:
    """Whether the last token of a text is taken back."""
    *others, last = tokenizer.encode(text, special=False)
    assert isinstance(matcher, BacktrackingMatcher)
    for token_id in others:
        matcher.accept(token_id)
        assert not matcher.backtrack()
    matcher.accept(last)
    return matcher.backtrack() > 0


ANY_UNIQUE = {"type": "array", "uniqueItems": True}
JSON_OBJECT = Constraint(kind="json_object")
UNIQUE = [
    {"items": {"type": "string", "maxLength": 1}, "minItems": 2},
    {"items": {"enum": ["aab", "aac", "b", "bbb", 1, 10, None, True]}, "minItems": 8},
    {"items": {"type": "integer", "minimum": -1, "maximum": 12}, "minItems": 9},
    {"items": {"type": "number", "minimum": 0, "maximum": 1}, "minItems": 3},
    {"items": {"type": "number"}, "minItems": 3},
    {"items": {"type": ["boolean", "null"]}},
    {
        "items": {
            "type": "object",
            "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
            "required": ["a"],
        }
    },
    {"items": {"type": "array", "uniqueItems": True, "items": {"type": "integer", "minimum": 0, "maximum": 2}}},
    {"items": {"type": "integer", "minimum": 0, "maximum": 5}, "contains": {"const": 3}},
    {"items": {"enum": [1, 2, 3, 4]}, "contains": {"enum": [1, 2]}, "minContains": 2},
    {"allOf": [{"minItems": 3, "items": {"enum": [1, 2, 3]}}]},
    {"items": {"type": "boolean"}, "anyOf": [{"minItems": 1}, {"minItems": 2}]},
    {"prefixItems": [{"enum": ["a", "b"]}, {"enum": ["a"]}], "items": {"enum": ["c", "a"]}},
    {"anyOf": [{"minItems": 2, "items": {"type": "boolean"}}, {"maxItems": 1}]},
    {"prefixItems": [{"enum": [0, 1]}, {"const": 0}], "contains": {"const": "a"}, "items": {"enum": ["a", "b"]}},
    {},
]


@pytest.mark.parametrize("keywords", UNIQUE, ids=str)
def test_items_never_repeat_and_the_array_always_ends(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, keywords: Any
) -> None:
    schema = {"type": "array", "uniqueItems": True, **keywords}
    texts = [written(started(compiler, schema), tokenizer, random.Random(seed)) for seed in range(40)]

    assert any(texts)
    for text in filter(None, texts):
        Draft202012Validator(schema).validate(json.loads(text))


NAMES = [
    {"additionalProperties": {"type": "integer"}, "minProperties": 2, "maxProperties": 4},
    {"propertyNames": {"pattern": "^[ab]+$"}, "additionalProperties": {"type": "null"}, "minProperties": 3},
    {"properties": {"a": {}, "b": {}, "c": {}, "d": {}}, "minProperties": 2, "maxProperties": 3},
    {"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2, "additionalProperties": False},
    {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "null"}, "minProperties": 2},
    {"properties": {f"p{number}": {"type": "null"} for number in range(20)}, "minProperties": 4},
    {"patternProperties": {"a*": {"type": "integer"}, "aa": {"maximum": 20}}, "additionalProperties": False},
    {"propertyNames": {"not": {"enum": ["a", "b"]}, "maxLength": 1}, "additionalProperties": {"type": "null"}},
    {"propertyNames": {"anyOf": [{"const": "a"}, {"pattern": "^b"}]}, "minProperties": 2},
    {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"pattern": "^[ab]$"}}, "required": ["a"]},
    {
        "properties": {"a": {"type": "null"}, "b": {}},
        **{"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
    },
    {"patternProperties": {"b": {"type": "null"}}, "propertyNames": {"maxLength": 2}, "minProperties": 1},
    {"propertyNames": {"maxLength": 3, "enum": ["a", "bbbbb"]}, "minProperties": 1},
    {"propertyNames": {"enum": ["a", "b"], "const": "b"}, "minProperties": 1},
    {"patternProperties": {"^[^\\W\\d]": {"type": "number", "multipleOf": 0.07}}, "minProperties": 1},
    {"patternProperties": {"^b$": {"type": "null"}}, "properties": {"b\n": {"type": "integer"}}, "minProperties": 1},
    {"patternProperties": {"^[ab]$": {"enum": [1, 2]}, "^(a|b)$": {"enum": [2, 3]}}, "minProperties": 1},
    {"patternProperties": {"^\\w$": {"enum": [1, 2]}, "^[A-Za-z0-9_]$": {"enum": [2, 3]}}, "additionalProperties": {}},
    {"patternProperties": {"^[a-z]{2}$": {"type": "null"}}, "properties": {"a": {"const": 1}}, "required": ["en"]},
    {
        "patternProperties": {".": {"type": "null"}, "b": {}},
        "propertyNames": {"pattern": "^ab?$"},
        "required": ["ab", "a"],
    },
    {"properties": {"a": {}, "b": {}}, "additionalProperties": {"type": "null"}, "minProperties": 1},
    {"properties": {"a": {}, "b": {}}, "additionalProperties": {"type": "null"}, "required": ["a"], "maxProperties": 2},
    {"properties": {"a": {}}, "patternProperties": {"^x": {"type": "null"}}, "minProperties": 1, "maxProperties": 2},
    {"patternProperties": {"^é": {"type": "null"}, "^\\w$": {"minimum": 3}}, "additionalProperties": {"const": 1}},
    {"patternProperties": {"": {"type": "null"}, "^a": {}}, "minProperties": 1},
    {"patternProperties": {"^b$": {"type": "null"}}, "properties": {"a": {}, "b": {}}, "required": ["b"]},
    {"patternProperties": {"^(b|c d)$": {"type": "null"}}, "required": ["b"], "additionalProperties": {"const": 1}},
    {
        "properties": {"é": {"minimum": 1}, "ü.": {"type": "null"}},
        **{"patternProperties": {"^a.": {}, "[^a-z]$": {"maximum": 3}, "^.{2,}$": {"const": None}}},
        "required": ["é"],
    },
    {"patternProperties": {"[ab]": {"enum": [1, 2, 3]}, "b": {"minimum": 2}}, "maxProperties": 1},
]


@pytest.mark.parametrize("keywords", NAMES, ids=str)
def test_names_that_are_counted_never_repeat(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, keywords: Any
) -> None:
    schema = {"type": "object", **keywords}
    texts = [written(started(compiler, schema), tokenizer, random.Random(seed)) for seed in range(40)]

    assert any(texts)
    for text in filter(None, texts):
        Draft202012Validator(schema).validate(json.loads(text))


OTHERS = {"propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "null"}}
LETTERS = {name: {"type": "null"} for name in "abcdefghij"}
FEW = [
    ({"properties": LETTERS, **OTHERS, "maxProperties": 1}, '{"a": null,'),
    (
        {"properties": LETTERS, "additionalProperties": False, "maxProperties": 4},
        '{"a": null, "b": null, "c": null, "e": null,',
    ),
    (
        {"properties": LETTERS, **OTHERS, "required": ["i", "j"], "maxProperties": 3},
        '{"a": null, "i": null, "j": null,',
    ),
]


@pytest.mark.parametrize(("keywords", "beginning"), FEW, ids=str)
def test_an_object_that_is_full_is_closed(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, keywords: Any, beginning: str
) -> None:
    """A member too many is not written to its end, so that every text ends."""
    schema = {"type": "object", **keywords}
    assert refuses(started(compiler, schema), tokenizer, beginning)
    texts = [written(started(compiler, schema), tokenizer, random.Random(seed)) for seed in range(20)]
    assert all(texts)
    for text in filter(None, texts):
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": {"items": {"type": "number"}, "uniqueItems": True}}}, '{"a": [1, 1.0]'),
        (
            {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": ANY_UNIQUE}},
            '[[{"a": 1, "b": 2}, {"b": 2, "a": 1}',
        ),
        ({"uniqueItems": True}, '["a", "b", "a"'),
        ({"uniqueItems": True}, '[{}, "a", "a"'),
        ({"minProperties": 2}, '{"a": 1, "b": 2, "a"'),
    ],
)
def test_an_item_that_equals_an_earlier_one_is_taken_back(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: Any, text: str
) -> None:
    assert refuses(started(compiler, schema), tokenizer, text)


@pytest.mark.parametrize(
    "text",
    ["[1, true, [], {}, null, [1], [true]", '["a", ["a"], "A"', "[0, false, [false], [0]", '["\\"", "\\\\", "]"'],
)
def test_items_of_other_types_are_other_items(compiler: GrammarCompiler, tokenizer: FakeTokenizer, text: str) -> None:
    matcher = started(compiler, {"type": "array", "uniqueItems": True})
    for token_id in tokenizer.encode(f"{text}]", special=False):
        assert token_id in allowed_ids(matcher, tokenizer)
        matcher.accept(token_id)


MULTIPLES = [
    {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 200},
    {"type": "object", "properties": {"price": {"type": "number", "multipleOf": 0.1}}, "required": ["price"]},
    {"type": "array", "items": {"type": ["number", "null"], "multipleOf": 1e-8, "maximum": 3}, "minItems": 2},
    {"type": "integer", "multipleOf": 0.3},
    {"anyOf": [{"type": "number", "multipleOf": 0.07}, {"type": "boolean"}]},
    {"type": "array", "items": {"multipleOf": 0.05, "type": "number"}, "uniqueItems": True, "minItems": 2},
    {"if": {"required": ["a"]}, "then": {"properties": {"a": {"type": "number", "multipleOf": 0.01}}}},
    *({"type": "integer", "multipleOf": value} for value in (0.123456789, 123_456_789)),
    {"type": ["number", "null"], "multipleOf": 0.123456, "minimum": 7, "maximum": 1000},
    {"type": "array", "items": {"multipleOf": 98765.4321, "type": "number"}, "uniqueItems": True, "minItems": 3},
    {"allOf": [{"type": "number", "multipleOf": 0.123456}, {"exclusiveMinimum": 3}]},
]


@pytest.mark.parametrize("schema", MULTIPLES, ids=str)
def test_numbers_are_multiples_by_every_validator(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: Any
) -> None:
    """Of decimals, too: 0.29 is a multiple of 0.01 by exact arithmetic only, so it is not written."""
    texts = [written(started(compiler, schema), tokenizer, random.Random(seed)) for seed in range(40)]

    assert any(texts)
    for text in filter(None, texts):
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("text", ["[0.29,", "[1, 0.29]"])
def test_a_number_whose_end_is_wrong_is_taken_back(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, text: str
) -> None:
    assert refuses(started(compiler, {"items": {"type": "number", "multipleOf": 0.01}}), tokenizer, text)


MEMBERS = {
    "properties": {"a": {"const": 1}},
    "additionalProperties": {"items": {"anyOf": [{"const": number} for number in range(1000, 1060)]}},
    "minProperties": 2,
}


def test_a_value_that_is_too_large_to_be_checked_fails(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    matcher = started(compiler, MEMBERS)
    text = f'{{"b": [{", ".join(["1059"] * 900)}], "c": []}}'

    with pytest.raises(GenerationFailed, match="too large to be checked"):
        for token_id in tokenizer.encode(text, special=False):
            matcher.accept(token_id)


NODE = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}
LEFT_OUT = {
    "not of a keyword without complement": {"type": "array", "items": {"enum": [1, 2]}, "not": {"uniqueItems": True}},
    "not": {"properties": {"a": {}, "b": {"type": "null"}}, "type": "object", "not": {"propertyNames": {"const": "a"}}},
    "if": {
        "type": ["integer", "null"],
        **{"maximum": 50, "minimum": 0, "if": {"multipleOf": 3}, "then": {"maximum": 9}, "else": {"minimum": 9}},
    },
    "oneOf": {"type": "integer", "minimum": 0, "maximum": 40, "oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]},
    "many options of oneOf": {"type": "integer", "oneOf": [{"minimum": n} for n in range(13)], "maximum": 20},
    "minContains": {"items": {"enum": [1, 2]}, "contains": {"const": 1}, "minContains": 9, "maxItems": 12},
    "maxContains": {"items": {"enum": [[1, 1], [1]]}, "contains": {"uniqueItems": True}, "maxContains": 2},
    "minContains with maxContains": {
        "items": {"enum": [1, 2]},
        "contains": {"const": 1},
        **dict.fromkeys(("minContains", "maxContains"), 5),
    },
    "items that cannot be contained": {"contains": {"const": 1}, "minContains": 3, "maxContains": 1},
    "unevaluatedItems": {"type": "array", "allOf": [{"anyOf": [{}, {}, {}]}] * 4, "unevaluatedItems": False},
    "too large for the decoder": {
        "type": "array",
        "allOf": [{"contains": {"multipleOf": 2}}, {"contains": {"multipleOf": 3}}],
        "unevaluatedItems": {"multipleOf": 5},
    },
    "recursion beside keywords": {"$ref": "#/$defs/node", "required": ["n"], "$defs": {"node": NODE}},
    "recursion below allOf": {
        "allOf": [{"$ref": "#/$defs/node"}, {"properties": {"x": {"$ref": "#"}}, "required": ["n"]}],
        "$defs": {"node": NODE},
    },
    "long multiple": {"type": "integer", "multipleOf": 100_000, "minimum": 1},
    "multiple of many decimals": {"type": "number", "multipleOf": 1e-12},
    "patterns that depend on the dialect": {
        "type": "object",
        "properties": {"foo": {"type": "array", "maxItems": 3}},
        "patternProperties": {"f.o": {"minItems": 2}, "^\\w\\s": {"type": "null"}},
        "additionalProperties": {"type": "integer"},
    },
    "names below unevaluatedProperties": {
        "type": "object",
        "unevaluatedProperties": {
            "type": ["object", "null"],
            "propertyNames": {"enum": ["a", "b"]},
            "minProperties": 2,
        },
        "minProperties": 1,
    },
    "a format": {"type": "string", "not": {"format": "date-time"}, "maxLength": 30},
    "formats of which one": {"type": ["string", "null"], "oneOf": [{"format": "ipv4"}, {"format": "hostname"}]},
    "a format where another keyword is checked": {
        "oneOf": [{"type": "number", "multipleOf": 0.01}, {"type": "string", "format": "date"}, {"uniqueItems": True}],
        "type": ["number", "string"],
    },
    "formats in items": {
        "items": {"anyOf": [{"format": "ipv4"}, {"enum": ["a", "b"]}]},
        **{"contains": {"format": "ipv4"}, "maxContains": 1, "type": "array", "not": {"uniqueItems": True}},
    },
    "a pattern that depends on the dialect": {
        "type": "string",
        "maxLength": 2,
        "oneOf": [{"pattern": "^[\\W\\d]$"}, {"uniqueItems": True}],
    },
    "control characters": {"enum": ["a\x00b", {"b": ["\x7f\x1f"]}]},
}
"""What a grammar does not say, or not at a reasonable size."""


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_the_grammar_leaves_out_is_checked(compiler: GrammarCompiler, tokenizer: FakeTokenizer, name: str) -> None:
    schema = LEFT_OUT[name]
    texts = [written(started(compiler, schema), tokenizer, random.Random(seed)) for seed in range(8)]

    assert any(texts)
    for text in filter(None, texts):
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize(
    ("condition", "texts"),
    [({"format": "ipv4"}, ("1.2.3.4", "localhost", "1.2.3.04")), ({"pattern": "^\\w"}, ("ab", "-b", "\xc9b"))],
)
def test_strings_on_which_validators_disagree_are_not_written_where_a_branch_depends_on_them(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, condition: Any, texts: tuple[str, ...]
) -> None:
    """Beside a keyword without complement; the last text is one of which they disagree."""

    def writes(schema: Any, text: str) -> bool:
        try:
            return not refuses(started(compiler, schema), tokenizer, json.dumps(text, ensure_ascii=False))
        except GenerationFailed:  # by the grammar
            return False

    wanted = {"type": "string", "oneOf": [condition, {"uniqueItems": True, "maxLength": 0}]}
    excluded = {"type": "string", "oneOf": [condition, {"uniqueItems": True}]}
    assert [writes(wanted, text) for text in texts] == [True, False, False]
    assert [writes(excluded, text) for text in texts] == [False, True, False]


CALL = InOrder(
    (
        Text("<call>"),
        OneOf(
            tuple(
                InOrder((Text(f'{{"name": "{name}", "arguments": '), Matching(part), Text("}")))
                for name, part in (
                    ("tags", Constraint(kind="json_schema", text=json.dumps({**ANY_UNIQUE, "maxItems": 3}))),
                    ("price", Constraint(kind="json_schema", text=json.dumps(MULTIPLES[0]))),
                    ("free", Constraint(kind="json_schema", text=json.dumps({"type": "array", "maxItems": 3}))),
                )
            )
        ),
        Text("</call>"),
    )
)


@pytest.mark.parametrize("parts", [CALL, Repeated(CALL, 1, 2), InOrder((FreeText(">"), CALL))], ids=str)
def test_arguments_of_calls_have_their_rules(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, parts: Composition
) -> None:
    grammar = compiler.compile(compose(parts, "tool_choice"))
    texts = [written(grammar.start(), tokenizer, random.Random(seed)) for seed in range(30)]

    assert any(texts)
    for text in filter(None, texts):
        for call in text.split("<call>")[1:]:
            body = json.loads(call.removesuffix("</call>"))
            schema = {"tags": ANY_UNIQUE, "price": MULTIPLES[0]}.get(body["name"], {})
            Draft202012Validator(schema).validate(body["arguments"])
    beginning = f"{'calls>' if isinstance(parts, InOrder) and parts is not CALL else ''}<call>"
    for name, arguments in (("tags", "[[1], [1]"), ("price", "0.29}")):
        assert refuses(grammar.start(), tokenizer, f'{beginning}{{"name": "{name}", "arguments": {arguments}')


@pytest.mark.parametrize(
    ("schema", "text", "digits_and_most"),
    [
        ({"type": "number"}, "0.", ("0123456789", 30)),
        ({"type": "number"}, "1e", ("9", 4)),
        ({"items": {"type": "number", "minimum": 0}}, "[5", ("0", 30)),
        ({"items": {"type": "number", "maximum": 0}}, "[-1.", ("3", 30)),
        ({}, '{"a": -1', ("0", 30)),
        (None, '{"a": [1.', ("5", 30)),  # any JSON object
    ],
    ids=str,
)
def test_b27_digits_of_a_number_end(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: Any, text: str, digits_and_most: tuple[str, int]
) -> None:
    """B27: a model at a loss wrote digits until the answer was cut; readers take 1e999 for infinity."""
    constraint = Constraint(kind="json_schema", text=json.dumps(schema)) if schema is not None else JSON_OBJECT
    matcher = compiler.compile(constraint).start()
    for token_id in tokenizer.encode(text, special=False):
        matcher.accept(token_id)
    digits, most = digits_and_most
    ids, count = {tokenizer.encode(digit, special=False)[0] for digit in digits}, 0
    while pool := sorted(ids & set(allowed_ids(matcher, tokenizer))):
        matcher.accept(pool[count % len(pool)])
        count += 1
        assert count <= most


def test_digits_within_a_string_are_text(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    matcher = started(compiler, {"type": "string"})
    for token_id in tokenizer.encode('"\\"' + "7" * 100 + '"', special=False):
        assert token_id in allowed_ids(matcher, tokenizer)
        matcher.accept(token_id)


NULLS = {letter: {"type": "null"} for letter in "abcdefghijklmnop"}
COUNTED: list[dict[str, Any]] = [
    {"properties": NULLS, "required": ["p"], "maxProperties": 3, "additionalProperties": {"type": "null"}},
    {
        "properties": NULLS,
        "required": ["o", "p"],
        "maxProperties": 5,
        "minProperties": 4,
        "additionalProperties": False,
    },
    {"properties": NULLS, "minProperties": 9, "additionalProperties": False},
    {"properties": NULLS, "maxProperties": 4, "patternProperties": {"^x": {"type": "null"}}, "required": ["m", "n"]},
    {"properties": NULLS, "maxProperties": 3, "allOf": [{"required": ["o", "p"]}], "additionalProperties": False},
]


@pytest.mark.parametrize("schema", COUNTED, ids=str)
def test_counts_of_properties_leave_room_for_what_is_required(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: dict[str, Any]
) -> None:
    """A name after which too few or too many would follow is taken back at once, so that few are."""
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps({"type": "object", **schema})))
    for seed in range(20):
        chance, matcher, token_ids, num_wrong = random.Random(seed), grammar.start(), list[int](), 0
        while not matcher.is_finished():
            ids = allowed_ids(matcher, tokenizer)
            closing = [one for one in ids if tokenizer.token_bytes[one][:1] in b'"}']
            token_ids.append(chance.choice(closing or ids))
            matcher.accept(token_ids[-1])
            assert isinstance(matcher, BacktrackingMatcher)
            if num_undone := matcher.backtrack():
                del token_ids[-num_undone:]
                num_wrong += 1
        text = b"".join(tokenizer.token_bytes[one] for one in token_ids if one not in tokenizer.end_token_ids)

        Draft202012Validator(schema).validate(json.loads(text))
        assert num_wrong <= 40


def test_wrong_values_that_are_laborious_to_check_end_the_answer(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer
) -> None:
    """The work of one answer is bounded, not only how often it goes back."""
    wrong = {"items": {"anyOf": [{"multipleOf": 1001 + number} for number in range(200)]}}
    matcher = started(compiler, {"type": "array", "items": {"enum": [1000, 1001]}, "minItems": 1, "not": wrong})
    assert isinstance(matcher, BacktrackingMatcher)
    (end,) = tokenizer.encode("]", special=False)
    for token_id in tokenizer.encode(f"[{', '.join(['1001'] * 60)}", special=False):
        matcher.accept(token_id)

    with pytest.raises(GenerationFailed, match="no valid value was found: wrong values took 1000000 pairs"):
        for _ in range(1000):
            matcher.accept(end)
            assert matcher.backtrack() == 1
            for token_id in tokenizer.encode(", 1001", special=False):
                matcher.accept(token_id)
