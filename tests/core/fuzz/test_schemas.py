"""Schemas, expressions and grammars, whole and damaged: a grammar, or a refusal that names the field."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import strategies as st

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

from .cases import JSON, NASTY_TEXT, NUM_CASES, run_cases, some_members

pytestmark = pytest.mark.llguidance

MAX_S = 20.0
"""Far more than any of these takes: what is looked for are hangs."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    pytest.importorskip("llguidance")
    from enginehouse_llguidance.decoder import LlguidanceDecoder
    from enginehouse_llguidance.options import LlguidanceOptions

    return LlguidanceDecoder(LlguidanceOptions()).bind(FakeTokenizer())


_PATTERN_PARTS = (
    r"a b [a-z] \d . ( ) (?: | * + ? {2} {1,3} {0,99999} ^ $ [^ ] \p{L} \u0041 (?=a) \1 \b [\w-] { } é \ "
    "(a*)* ((a{9}){9}){9}"
)
_PATTERNS = st.lists(st.sampled_from(_PATTERN_PARTS.split()), max_size=8).map("".join)
_REFERENCES = st.sampled_from(
    ["#", "#/$defs/a", "#/$defs/b", "#/$defs/missing", "http://a.example/s", "#/properties/a", "a"]
)
_TYPES = st.sampled_from(
    ["string", "integer", "number", "object", "array", "boolean", "null", "strnig", 7, ["string", "null"]]
)
_COUNTS = st.one_of(st.integers(-1, 5), st.sampled_from([10**6, 10**30, 1.5, "3", None]))


def _schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", '"', "é", ""])
    members = st.dictionaries(names, inner, max_size=3)
    many = st.lists(inner, max_size=3)
    return some_members(
        {
            "type": _TYPES,
            "properties": members,
            "required": st.lists(names, max_size=2),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "patternProperties": st.dictionaries(_PATTERNS, inner, max_size=1),
            "items": inner,
            "prefixItems": many,
            "minItems": _COUNTS,
            "maxItems": _COUNTS,
            "minLength": _COUNTS,
            "maxLength": _COUNTS,
            "minimum": _COUNTS,
            "exclusiveMaximum": _COUNTS,
            "multipleOf": _COUNTS,
            "pattern": _PATTERNS,
            "format": st.sampled_from(["date", "uuid", "email", "nothing"]),
            "enum": st.lists(JSON, max_size=3),
            "const": JSON,
            "anyOf": many,
            "oneOf": many,
            "allOf": many,
            "not": inner,
            "$ref": _REFERENCES,
            "$defs": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
            "title": NASTY_TEXT,
        },
        most=5,
    )


_SCHEMA = st.recursive(st.one_of(st.booleans(), st.fixed_dictionaries({"type": _TYPES}), JSON), _schema, max_leaves=8)


def _compile(compiler: GrammarCompiler, constraint: Constraint) -> None:
    began = time.process_time()
    try:
        compiler.compile(constraint).start()
    except InvalidRequest as error:
        assert error.param == constraint.param and error.message.startswith(constraint.param)
    assert time.process_time() - began < MAX_S, constraint.text


@NUM_CASES
def test_schemas(compiler: GrammarCompiler, num_cases: int) -> None:
    def check(schema: Any) -> None:
        _compile(compiler, Constraint(kind="json_schema", text=json.dumps(schema)))

    run_cases(num_cases, check, schema=_SCHEMA)


@NUM_CASES
def test_expressions(compiler: GrammarCompiler, num_cases: int) -> None:
    def check(pattern: str) -> None:
        _compile(compiler, Constraint(kind="regex", text=pattern, param="guided_regex"))

    run_cases(num_cases, check, pattern=st.one_of(_PATTERNS, NASTY_TEXT))


_RULE_PARTS = (
    'start: ;root ::= ;a: ;a ::= ;start;root;a;"x";/x+/;[a-z];|;*;+;?;(;);\n;"x"{3};a{1,9};a{99999};%ignore /x/;'
    "%import common.WS\n;%json {};<|im_end|>;A: /a/\n;# x\n;~2"
)
_RULES = st.lists(st.sampled_from(_RULE_PARTS.split(";")), max_size=14).map(" ".join)


@pytest.mark.parametrize("kind", ["lark", "gbnf"])
@NUM_CASES
def test_grammars(compiler: GrammarCompiler, kind: Any, num_cases: int) -> None:
    start = {"lark": "start: ", "gbnf": "root ::= "}[kind]

    def check(text: str, with_start: bool) -> None:
        _compile(compiler, Constraint(kind=kind, text=(start if with_start else "") + text, param="guided_grammar"))

    run_cases(num_cases // 2, check, text=st.one_of(_RULES, NASTY_TEXT), with_start=st.booleans())
