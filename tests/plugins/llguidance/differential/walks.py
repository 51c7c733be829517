"""Random text that a matcher allows, without a model: what one may write, some model will write."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from jsonschema import Draft3Validator, Draft7Validator, Draft201909Validator, Draft202012Validator

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.errors import GenerationFailed
from enginehouse.contract.structured import BacktrackingMatcher, Grammar, Matcher

__all__ = ["ENFORCED", "allowed_ids", "dialect_of", "follow", "takes", "walk"]


def allowed_ids(matcher: Matcher, tokenizer: Tokenizer) -> list[int]:
    """The tokens that the matcher's mask allows."""
    bitmask = np.full((tokenizer.vocab_size + 31) // 32, -1, np.int32)
    matcher.fill_bitmask(bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    assert not bits[tokenizer.vocab_size :].any()
    return np.flatnonzero(bits).tolist()


def follow(matcher: Matcher, token_id: int) -> int:
    """Accept a token; the number of tokens that are taken back."""
    matcher.accept(token_id)
    return matcher.backtrack() if isinstance(matcher, BacktrackingMatcher) else 0


def takes(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a model may write exactly this text, in the tokenizer's own tokens."""
    matcher = grammar.start()
    try:
        for token_id in tokenizer.encode(text, special=False):
            if follow(matcher, token_id):
                return False
        ends = sorted(tokenizer.end_token_ids & set(allowed_ids(matcher, tokenizer)))
        return bool(ends) and (matcher.is_finished() or not follow(matcher, ends[0]))
    except GenerationFailed:
        return False


def walk(grammar: Grammar, tokenizer: Tokenizer, chance: random.Random, max_tokens: int = 250) -> str | None:
    """A text that is finished, or None when ``max_tokens`` were not enough, or no valid one was found.

    Every walk has a temper of its own: how much it likes to close, to end and to go on.
    """
    try:
        return _walk(grammar, tokenizer, chance, max_tokens)
    except GenerationFailed as error:
        if "no value was found that satisfies it" in error.message:
            return None
        raise


def _walk(grammar: Grammar, tokenizer: Tokenizer, chance: random.Random, max_tokens: int) -> str | None:
    matcher, token_ids, num_backtracks = grammar.start(), list[int](), 0
    likes_closing, likes_end = chance.choice((0.1, 0.3, 0.6)), chance.choice((0.05, 0.3, 0.9))
    while len(token_ids) < max_tokens and not matcher.is_finished():
        ids = allowed_ids(matcher, tokenizer)
        forced = list(matcher.forced_token_ids())
        assert ids and (not forced or forced[0] in ids)
        others = [token_id for token_id in ids if token_id not in tokenizer.end_token_ids]
        can_end = len(others) < len(ids)
        if not others or (can_end and chance.random() < likes_end):
            end_id = next(token_id for token_id in ids if token_id in tokenizer.end_token_ids)
            if not (num_wrong := follow(matcher, end_id)):
                break
            del token_ids[len(token_ids) + 1 - num_wrong :]
            continue
        closing = [token_id for token_id in others if tokenizer.token_bytes[token_id][:1] in b'"}]']
        pool = closing if closing and chance.random() < likes_closing else others
        token_ids.append(chance.choice(pool))
        if num_wrong := follow(matcher, token_ids[-1]):
            del token_ids[-num_wrong:]
            num_backtracks += 1
            if num_backtracks == 1000:  # as in core
                return None
    else:
        if not matcher.is_finished():
            return None
    return b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids).decode("utf-8")


ENFORCED: dict[str, tuple[Any, Any, Any]] = {
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}, None, 1),
    "type": ({"type": ["boolean", "null"]}, True, "true"),
    "enum": ({"enum": [1, "1"]}, "1", 2),
    "const": ({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, 3, 2),
    "anyOf": ({"anyOf": [{"const": 1}, {"const": "a"}]}, "a", "b"),
    "minimum": ({"type": "number", "minimum": 0.5}, 0.5, 0.4),
    "maximum": ({"type": "integer", "maximum": 12}, 12, 13),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, 0.1, 0),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 12}, 11, 12),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, 21, 22),
    "minLength": ({"type": "string", "minLength": 2}, "日本", "日"),
    "maxLength": ({"type": "string", "maxLength": 2}, "日本", "日本語"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, "aa", "ab"),
    "format": ({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
    "items": ({"items": {"type": "null"}}, [None, None], [None, 1]),
    "prefixItems": ({"prefixItems": [{"type": "null"}, {"const": 1}]}, [None, 1], [None, 2]),
    "additionalItems": ({"items": [{"const": 1}], "additionalItems": False}, [1], [1, 2]),
    "minItems": ({"type": "array", "minItems": 2}, [1, 2], [1]),
    "maxItems": ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    "unevaluatedItems": ({"prefixItems": [{}], "unevaluatedItems": False}, [1], [1, 2]),
    "properties": ({"properties": {"a": {"type": "null"}}}, {"a": None}, {"a": 1}),
    "required": ({"type": "object", "required": ["a"]}, {"a": 1}, {}),
    "additionalProperties": ({"additionalProperties": {"type": "null"}}, {"b": None}, {"b": 1}),
    "patternProperties": ({"patternProperties": {"^a": {"type": "null"}}}, {"ab": None}, {"ab": 1}),
    "propertyNames": ({"propertyNames": {"pattern": "^a"}}, {"ab": 1}, {"b": 1}),
    "minProperties": ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    "$dynamicRef": ({"items": {"$dynamicRef": "#a"}, "$defs": {"b": {"$dynamicAnchor": "a", "const": 1}}}, [1], [2]),
    "$recursiveRef": ({"type": "array", "items": {"$recursiveRef": "#"}}, [[], [[]]], [1]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, 1, 3),
    "not": ({"type": "string", "not": {"enum": ["a", "b"]}}, "ab", "a"),
    "if": ({"if": {"type": "string"}, "then": {"const": "a"}, "else": {"type": "null"}}, None, "b"),
    "then": ({"type": "string", "if": {"minLength": 2}, "then": {"pattern": "^a"}}, "ab", "bb"),
    "else": ({"type": "integer", "if": {"minimum": 3}, "else": {"const": 1}}, 1, 2),
    "uniqueItems": ({"uniqueItems": True}, [1, True, "1"], [1, 2, 1.0]),
    "contains": ({"items": {"type": ["integer", "null"]}, "contains": {"type": "null"}}, [1, None], [1]),
    "minContains": ({"items": {"enum": [1, 2]}, "contains": {"const": 2}, "minContains": 2}, [2, 1, 2], [2, 1]),
    "maxContains": ({"items": {"enum": [1, 2]}, "contains": {"const": 2}, "maxContains": 1}, [1, 2], [2, 2]),
    "dependentRequired": ({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
    "dependentSchemas": (
        {"properties": {"a": {}, "b": {}}, "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
        {"a": 1, "b": None},
        {"a": 1, "b": 1},
    ),
    "dependencies": ({"properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    "unevaluatedProperties": ({"properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
    "divisibleBy": ({"type": "integer", "divisibleBy": 7}, 21, 22),
    "extends": ({"type": "integer", "extends": [{"minimum": 3}]}, 3, 2),
    "disallow": ({"disallow": ["string", "null"]}, 1, "a"),
}
"""Keyword to a schema, a value that satisfies it and one that only this keyword excludes."""


def dialect_of(keyword: str) -> Any:
    """The validator of a dialect that has the keyword."""
    if keyword in ("disallow", "divisibleBy", "extends"):
        return Draft3Validator
    if keyword in ("additionalItems", "dependencies"):
        return Draft7Validator
    return Draft201909Validator if keyword.startswith("$recursive") else Draft202012Validator
