r"""Expressions that take a search, such as ``(a|b)\1``: where dialects agree, in bounded time, as models write them."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from enginehouse.contract.composition import InOrder, Matching, Text, compose
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_llguidance.patterns import AutomatonError, Backtracker, PatternError, matcher_of, translate_pattern
from enginehouse_llguidance.schemas.texts import Texts
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

from .differential.walks import allowed_ids, takes, walk

atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "a?", "b*", "a+?", "(a)", "(a|b)", "(ab?)", "^", "$", "(?=a)"])
references = st.sampled_from(
    [
        "\\1",
        "\\2",
        "\\1?",
        "\\1*",
        "(?:\\1)+",
        "(?>a*)",
        "a*+",
        "(?:a|ab)++",
        "(?!\\1)",
        "(?=(a*))",
        "(?(1)a|b)",
        "(?>a|ab)",
    ]
)
expressions = st.recursive(
    st.lists(st.one_of(atoms, references), min_size=1, max_size=4).map("".join),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("|".join),
        st.tuples(inner, inner).map("".join),
        inner.map("({})".format),
        inner.map("^(?:{})$".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "*?"])).map(
            lambda one: f"(?:{one[0]}){one[1]}"
        ),
    ),
    max_leaves=4,
)
texts = st.text("ab", max_size=7)


def read(pattern: str) -> tuple[Backtracker, re.Pattern[str]]:
    """The search for a pattern, and Python's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            python = re.compile(pattern)
        except re.error:
            assume(False)
    try:
        found = matcher_of(pattern, is_widened=False)[0]
    except PatternError:
        assume(False)
    assume(isinstance(found, Backtracker))
    assert isinstance(found, Backtracker)
    return found, python


@settings(max_examples=1500)
@given(pattern=expressions, text=texts)
def test_what_is_found_python_finds_as_well(pattern: str, text: str) -> None:
    search, python = read(pattern)

    if search.matches(text):
        assert python.search(text)


@settings(max_examples=800)
@given(pattern=expressions, text=texts)
def test_what_is_not_found_in_any_dialect_python_does_not_find(pattern: str, text: str) -> None:
    read(pattern)

    if Texts().matches(pattern, text) is False:
        assert not re.search(pattern, text)


@settings(max_examples=800)
@given(pattern=expressions, text=texts)
def test_what_is_known_to_follow_follows(pattern: str, text: str) -> None:
    """In every text that matches."""
    search, _ = read(pattern)

    for size in range(len(text) + 1) if search.matches(text) else ():
        following = search.following(text[:size])
        rest = text[size:]
        assert following is None or any(rest.startswith(one) if one else not rest for one in following), text[:size]


@settings(max_examples=500)
@given(pattern=expressions, text=texts)
def test_the_grammar_allows_at_least_what_is_found(pattern: str, text: str) -> None:
    search, _ = read(pattern)
    try:
        found = translate_pattern(pattern, search=True)
    except PatternError:
        assume(False)

    assert not found.is_exact
    if search.matches(text):
        for regex in (found.regex, *found.conditions):
            assert re.fullmatch(re.sub(r"\\x\{(\w+)\}", lambda one: f"\\U{int(one[1], 16):08x}", regex), text)


AGREED = {
    r"^(a|b)\1$": (["aa", "bb"], ["ab", "a", "aaa"]),
    r"^(?<q>['\"]).*\k<q>$": (["''", '"a"'], ["'\""]),
    r"^(?P<x>a+)-(?P=x)$": (["a-a", "aa-aa"], ["a-aa"]),
    r"^(?!.*(.)\1)[abc]+$": (["abcab"], ["abba"]),
    r"^(?i)(a)\1$": (["aA"], ["ab"]),
    r"^((a)|b)\2$": (["aa"], ["ab"]),
    r"^(?>a*)b$": (["aab"], ["a"]),
    r"^(?>a*)ab$": ([], ["aab"]),
    r"^a{1,3}+a$": (["aaaa"], ["aaa"]),
    r"^(<)?a(?(1)>)$": (["a", "<a>"], ["<a", "a>"]),
    r"^(?=(a+))\1b$": (["aab"], ["b"]),
    r"^(a)(b)(c)(d)(e)(f)(g)(h)(i)(j)\10$": (["abcdefghijj"], ["abcdefghija0"]),
    r"(?<=(a)b)\1": (["aba"], ["abb"]),
}


@pytest.mark.parametrize("pattern", AGREED)
def test_forms_on_which_dialects_agree(pattern: str) -> None:
    good, bad = AGREED[pattern]

    assert [Texts().matches(pattern, text) for text in good] == [True] * len(good)
    assert [Texts().matches(pattern, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"^(?:(a)|b)\1$", "b"), (r"^(?:(a)|b)*\1$", "ab"), (r"^(?:(a)|(b)|c)*-\1\2$", "ab-ab"), (r"^(z*)*\1$", "")],
)
def test_a_group_that_did_not_take_part_is_undecided(pattern: str, text: str) -> None:
    """Its reference matches the empty text in ECMAScript, nothing in Python."""
    assert Texts().matches(pattern, text) in (None, True)
    assert not matcher_of(pattern, is_widened=False)[0].matches("b")


def test_a_reference_before_the_end_of_its_group_is_empty() -> None:
    """As in ECMAScript; other dialects refuse it."""
    assert Texts().matches(r"^\1(a)$", "a") is True
    assert Texts().matches(r"^(a\1)$", "aa") is False


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(a)\2", "there is no group 2"),
        (r"(a)\k<x>", "there is no group x"),
        (r"(?P=x)", "there is no group x"),
        (r"[\1](a)", r"\1: this escape is not supported"),
        (r"(?(x", "only the number or the name of a group"),
        (r"(a)(?(1)a|b|c)", "more than two alternatives"),
    ],
)
def test_malformed_references_are_refused(compiler: GrammarCompiler, pattern: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(Constraint(kind="json_schema", text=json.dumps({"type": "string", "pattern": pattern})))

    assert reason in refused.value.message


BOMBS = [r"^(a+)+\1b$", r"^(a*)*(b|\1)*c$", r"(a?){40}\1{40}$x", r"^((a|aa)+)+\2$b", r"(?=(a+)+b)\1"]


@pytest.mark.parametrize("pattern", BOMBS)
def test_no_search_takes_long(pattern: str) -> None:
    """One that takes too many states fails."""
    began = time.process_time()
    search = matcher_of(pattern, is_widened=False)[0]
    assert isinstance(search, Backtracker)
    for text in ("a" * 30, "a" * 2000):
        search.following(text)
        try:
            search.matches(text)
        except ValueError as error:
            assert "takes too long" in str(error)

    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "pattern", [r"(a)\1(?:(?:){90000}){90000}", r"((a{99}){99}){99}\1", r"(a)\1" + "(" * 60 + ")" * 60]
)
def test_no_program_is_large(pattern: str) -> None:
    began = time.process_time()
    with contextlib.suppress(AutomatonError):
        matcher_of(pattern, is_widened=False)

    assert time.process_time() - began < 5


def test_a_string_that_takes_too_long_is_an_error_of_the_answer(compiler: GrammarCompiler) -> None:
    schema = {"type": "string", "pattern": r"^(a*)(a*)(a*)b?\1\2\3$", "minLength": 60, "maxLength": 61}
    with pytest.raises(InvalidRequest, match="limit its length, for example with maxLength"):
        compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))


SCHEMAS = [
    {"type": "string", "pattern": r"^(a|b)\1$"},
    {"type": "string", "pattern": r"^([a-z]{3,8})-\1$"},
    {"type": "string", "pattern": r"^([\"'\\])[a-z]{0,5}\1$"},
    {"type": "string", "pattern": r"^<([a-z]{1,9})>[^<]{0,9}</\1>$"},
    {"type": "string", "pattern": r"^(?!.*(.)\1{2})[A-Za-z0-9]{8,20}$"},
    {"type": "string", "pattern": r"^([\n日é])-\1$"},
    {"type": "string", "pattern": r"^\d{4}([-/])\d{2}\1\d{2}$", "maxLength": 10},
    {"type": "string", "pattern": r"^(?>[a-c]+)(?:-(?>[a-c]+))*$", "maxLength": 12},
    {"anyOf": [{"type": "string", "pattern": r"^([a-z]{3,8})-\1$"}, {"type": "null"}]},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/p"}}, "required": ["x"]}
    | {"$defs": {"p": {"pattern": r"^(a|b)\1$"}}},
    {"type": "object", "propertyNames": {"pattern": r"^([a-z]{3})\1$"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {r"^([ab])\1$": {"type": "null"}}, "additionalProperties": False}
    | {"minProperties": 1},
    {"type": "string", "not": {"pattern": r"(.)\1"}, "maxLength": 4},
    {"type": "array", "items": {"type": "string", "pattern": r"^([ab])x\1$"}, "minItems": 2, "uniqueItems": True},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_what_is_written_validates(compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: dict) -> None:
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    found = {walk(grammar, tokenizer, random.Random(seed), 300) for seed in range(30)} - {None}

    assert found
    for text in found:
        Draft202012Validator(schema).validate(json.loads(text))


def test_all_that_agree_may_be_written(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    for pattern, (good, bad) in AGREED.items():
        if not good:
            continue
        grammar = compiler.compile(
            Constraint(kind="json_schema", text=json.dumps({"type": "string", "pattern": pattern}))
        )
        for text in good:
            assert takes(grammar, tokenizer, json.dumps(text)), (pattern, text)
        for text in bad:
            assert not takes(grammar, tokenizer, json.dumps(text)), (pattern, text)


def test_the_text_of_a_group_is_written_again_without_a_choice(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer
) -> None:
    """No token is taken back: while in a back-reference, only its text is allowed."""
    schema = {"type": "string", "pattern": r"^([a-z]{12})-\1$"}
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    matcher = grammar.start()
    for token_id in tokenizer.encode('"abcdefghijkl-', special=False):
        matcher.accept(token_id)
        assert matcher.backtrack() == 0
    written = ""
    while not matcher.is_finished():
        ids = allowed_ids(matcher, tokenizer)
        assert all('abcdefghijkl"'[len(written) :].startswith(tokenizer.token_bytes[one].decode()) for one in ids)
        written += tokenizer.token_bytes[ids[0]].decode()
        matcher.accept(ids[0])
        assert matcher.backtrack() == 0

    assert written == 'abcdefghijkl"'


def test_a_search_is_a_regex_as_well(compiler: GrammarCompiler, tokenizer: FakeTokenizer) -> None:
    for pattern in (r"([a-z]{2,5})-\1", r"(?>a+)b", r"a*+b", r"(?!.*(.)\1)[a-c]{3}", r"(a|b)\1|c"):
        grammar = compiler.compile(Constraint(kind="regex", text=pattern))
        found = {walk(grammar, tokenizer, random.Random(seed), 100) for seed in range(20)} - {None}

        assert found
        assert all(re.fullmatch(pattern, text) for text in found)
        assert not takes(grammar, tokenizer, "ab-ba")


def test_a_search_in_a_composition_ends_where_the_next_text_begins(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer
) -> None:
    """As the text of an argument between tags."""
    argument = Matching(Constraint(kind="regex", text=r"(?s:.*)(?:^([a-z]{2,5})-\1$)(?s:.*)"))
    whole = InOrder(
        (Text("<a>"), argument, Text("\n"), Text("</a>"), Matching(Constraint(kind="regex", text="!{1,9}")))
    )
    grammar = compiler.compile(compose(whole, "tools"))
    found = {walk(grammar, tokenizer, random.Random(seed), 100) for seed in range(20)} - {None}

    assert found
    assert all(re.fullmatch(r"<a>([a-z]{2,5})-\1\n</a>!{1,9}", text) for text in found)
    assert takes(grammar, tokenizer, "<a>abc-abc\n</a>!!")
    assert not takes(grammar, tokenizer, "<a>abc-abd\n</a>!!")
