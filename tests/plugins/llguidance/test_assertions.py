"""Assertions in expressions: what is translated matches what Python's own expressions match, and what models write
validates.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_llguidance.patterns import matcher_of, translate_pattern
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

from .differential.walks import takes, walk

ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


def decimal_of(digits: int, places: int) -> str:
    """As Pydantic writes it for ``max_digits`` and ``decimal_places``."""
    whole = digits - places
    fraction = rf"(?=[\d.]{{1,{digits + 1}}}0*$)\d{{0,{whole}}}\.\d{{0,{places}}}0*$"
    return rf"^(?!^[-+.]*$)[+-]?0*(?:\d{{0,{whole}}}|{fraction})"


EXACT = {
    ZOD_EMAIL: "a.@-1_",
    DECIMAL: "0+-.7a",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$": "0+-.7",
    r"^(?=.*\d)(?=.*[a-z])[a-z\d]{3,5}$": "a1-",
    r"^(?!ab)[abc]+$": "abc",
    r"^(?!.*(?:aa|bb))[ab]*c$": "abc",
    r"^a(?=b+c)[bc]{2,4}$": "abc",
    r"^(?:x(?!1)|y(?=1))\d*$": "xy12",
    r"^[ab]*(?!b)[abc]{2}$": "abc",
    r"(?!a)b": "ab",
    r"^(?!\d+$)\w+$": "1a_",
    r"^(?!a$)[ab]*$": "ab",
    r"^(?=a|bc)(?!ab$)[abc]{1,3}$": "abc",
    r"(?<=a)b": "abc",
    r"(?<!a)b": "abc",
    r"^(?<!a)b(?<=b)$": "abc",
    r"^(?! )[ab ]*(?<! )$": "ab ",
    r"(a(?!b))*c": "abc",
    r"^(?:(?!b)[abc])+c$": "abc",
    r"^a(?!b)|c$": "abc",
    r"(^a|b$)c?": "abc",
    r"a^|^$|b": "ab",
    r"^(?!a)*b$": "ab",
    r"\bab\b": "ab -",
    r"^a\B": "ab -",
    r"(?<=[b-])a": "ab-",
    r"^(?=.*[A-Z])(?=.*[^\w\s]).{2,40}$": "aA-",
    r"(?i)^ab[^c]$": "aABcC-",
    r"(?s)^a.b$": "ab\n",
    r"(?m)^b$": "ab\n",
    r"^a{b}{1-3}$": "ab{}1-3",
}
"""Expressions, and characters of which the interesting texts are made."""


@functools.cache
def translated(pattern: str) -> list[re.Pattern[str]]:
    """The translation, from the library's dialect to Python's."""
    found = translate_pattern(pattern, search=True)
    assert found.is_exact
    return [re.compile(python_of(regex)) for regex in (found.regex, *found.conditions)]


def python_of(regex: str) -> str:
    return re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", regex)


def matches(pattern: str, text: str) -> bool:
    return all(one.fullmatch(text) for one in translated(pattern))


@pytest.mark.parametrize("pattern", EXACT)
@settings(max_examples=400)
@given(data=st.data())
def test_translations_match_what_python_matches(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.text(EXACT[pattern], max_size=9))

    assert matches(pattern, text) == bool(re.search(pattern, text))


@pytest.mark.parametrize("pattern", [*EXACT, decimal_of(5, 2), decimal_of(12, 4)])
@settings(max_examples=200)
@given(text=st.text("01.+-a@\n٣é", max_size=8))
def test_translations_never_match_more(pattern: str, text: str) -> None:
    """Digits of other scripts and line breaks too, on which dialects disagree."""
    if matches(pattern, text):
        assert re.search(pattern, text)


@settings(max_examples=300)
@given(text=st.text("01.+-", max_size=9))
def test_decimals_with_bounds(text: str) -> None:
    """Matched is what is meant, not what the missing end of one alternative lets through."""
    meant = decimal_of(5, 2).replace(r"\d{0,3}|", r"\d{0,3}$|")

    assert matches(decimal_of(5, 2), text) == bool(re.search(meant, text))


INEXACT = {
    r"^(?!.*(?:a(?=b)))[abc]+$": "abc",
    r"^(?:(?!a(?!b))[abc])+$": "abc",
    r"^(?=a(?<!b(?=a)a))[ab]+$": "ab",
    r"^(?=[ab]*a[ab]{12}$)(?=[ab]*b[ab]{3}$)[ab]*$": "ab",
    "^" + "".join(f"(?=.*{char})" for char in "abcdef") + ".*$": "abcdef",
}
"""Expressions that a grammar does not say in full: texts are matched when they are complete."""


@pytest.mark.parametrize("pattern", INEXACT)
@settings(max_examples=200)
@given(data=st.data())
def test_others_are_matched_as_python_does(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.text(INEXACT[pattern], max_size=16))

    assert matcher_of(pattern, is_widened=False)[0].matches(text) == bool(re.search(pattern, text))


@pytest.mark.parametrize("pattern", INEXACT)
def test_others_are_checked_when_a_string_is_complete(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, pattern: str
) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}, "required": ["x"]}
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    texts = {walk(grammar, tokenizer, random.Random(seed), 400) for seed in range(12)} - {None}
    for text in texts:
        Draft202012Validator(schema).validate(json.loads(text))
    whole = ["".join(letters) for size in range(8) for letters in itertools.product(INEXACT[pattern][:3], repeat=size)]
    for one in random.Random(0).sample(whole, 60):
        is_valid = re.search(pattern, one) is not None
        assert takes(grammar, tokenizer, json.dumps({"x": one})) == is_valid, one


SCHEMAS = [
    {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
    {"type": "string", "pattern": ZOD_EMAIL, "maxLength": 30},
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
    {"type": "object", "properties": {"d": {"type": "string", "pattern": decimal_of(10, 2)}}, "required": ["d"]},
    {"type": "string", "pattern": r"^(?=.*\d)(?=.*[a-z])[a-z\d]{3,5}$"},
    {"type": "string", "pattern": r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?=.*[^\w\s]).{8,64}$"},
    {"type": "string", "pattern": r"^(?!-)[a-z-]{1,63}(?<!-)$", "maxLength": 20},
    {"type": "string", "pattern": r"^arn:(aws[a-z-]*)?:[a-z0-9-.]+:\b.*\b$", "maxLength": 2048},
    {"type": "string", "not": {"pattern": r"^(a|b)$|\bc\b"}, "maxLength": 3},
    {"type": "object", "patternProperties": {r"^(?!x-)[a-z-]+(?<!-)$": {"type": "null"}}, "minProperties": 1}
    | {"additionalProperties": False},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_what_is_written_validates(compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: dict) -> None:
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    texts = {walk(grammar, tokenizer, random.Random(seed), 400) for seed in range(60)} - {None}

    assert len(texts) > 10
    for text in texts:
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))


def test_an_expression_with_conditions_is_a_regex_as_well(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    pattern = r"(?=.*[ab])(?!b)[abc]{2,4}(?<!c)"
    grammar = compiler.compile(Constraint(kind="regex", text=pattern))
    texts = {walk(grammar, tokenizer, random.Random(seed), 20) for seed in range(40)} - {None}

    assert len(texts) > 5
    assert all(re.fullmatch(pattern, text) for text in texts)


BOMBS = [
    r"^(?=[ab]*a[ab]{12})(?=[ab]*b[ab]{11})[ab]*$",
    r"^(?!.*(a|b){1,500}c)[a-z]{1,2000}$",
    r"^(?!.{0,3000}x)[a-z]*$",
    r"^(?!((a{1,100}){1,100}){1,100})a*$",
    "^(?:" + "|".join(f"(?={char})" for char in "abcdefghijklmnopqrst") + ")*a$",
    r"^(?:(?!a{1,3000}b)[ab]){1,3000}$",
]


@pytest.mark.parametrize("pattern", BOMBS)
def test_bombs_are_left_to_the_check_in_time(pattern: str) -> None:
    began = time.process_time()

    assert not translate_pattern(pattern, search=True).is_exact
    assert time.process_time() - began < 5


@pytest.mark.parametrize("pattern", [BOMBS[0], BOMBS[-1]])
def test_bombs_are_refused_as_a_regex(compiler: GrammarCompiler, pattern: str) -> None:
    """Which is all of an answer, so that nothing of it could be sent before the check."""
    with pytest.raises(InvalidRequest, match="what the expression asserts is too large"):
        compiler.compile(Constraint(kind="regex", text=pattern))


@pytest.mark.parametrize("pattern", [r"^(?:(?!a{1,200}b)[ab])*$", r"(a|b|ab)*c", r"(?:(?<=a{1,300})b?a?)*$"])
def test_matching_takes_a_time_linear_in_the_text(pattern: str) -> None:
    expression = matcher_of(pattern, is_widened=False)[0]

    def seconds(size: int) -> float:
        began = time.process_time()
        expression.matches("ab" * size)
        return time.process_time() - began

    seconds(10)
    assert seconds(600) < 5 * seconds(300) + 0.05
