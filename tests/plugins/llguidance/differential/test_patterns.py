"""Translated expressions against Python's ``re``: what is written matches the original."""

from __future__ import annotations

import json
import random
import re
import warnings

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

from .walks import walk

atoms = st.one_of(
    st.sampled_from(
        ["a", "b", "é", "日", ".", "\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "\\.", "\\n", "\\x41", "\\u00e9"]
    ),
    st.sampled_from(
        ["[a-c]", "[^a-c]", "[\\w-]", "[^\\W_]", "[^\\s\\d]", "[]a]", "[a&&b]", "[\\]^-]", "[é-ü]", "[.$^]"]
    ),
    st.sampled_from(
        ["^", "$", "-", "/", '"', "\\\\", " ", "#", "~", "&", "}", "]", "\\/", "\\-", "{", "\\b", "\\B", "\\1", "{1-3}"]
    ),
    st.sampled_from(
        ["(?=a)", "(?!b)", "(?<=a)", "(?<!b)", "(?!a$)", "(?=[ab]{2})", "(?!(?=a)b)", "(?<=^a)", "\\Z", "(?!\\w+-)"]
    ),
)
expressions = st.recursive(
    st.lists(atoms, min_size=1, max_size=4).map("".join),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("|".join),
        st.tuples(inner, inner).map("".join),
        st.tuples(st.sampled_from(["({})", "(?:{})", "(?P<n>{})", "(?<n>{})", "^{}$", "^({})$"]), inner).map(
            lambda pair: pair[0].format(pair[1].replace("{", "{{").replace("}", "}}"))
        ),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,3}", "*?", "{2,1}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=5,
)
unhurried = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def written(compiler: GrammarCompiler, tokenizer: FakeTokenizer, expression: str, kind: str, seed: int) -> list[str]:
    """A few texts; none when the expression is refused."""
    text = expression if kind == "regex" else json_schema(expression)
    try:
        grammar = compiler.compile(Constraint(kind=kind, text=text, param="regex"))
    except InvalidRequest:
        return []
    walks = [walk(grammar, tokenizer, random.Random(f"{seed} {number}"), 60) for number in range(3)]
    return [text for text in walks if text is not None]


def json_schema(expression: str) -> str:
    return json.dumps({"type": "string", "pattern": expression})


def python_of(expression: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "[a&&b]" may come to mean something else
        try:
            return re.compile(expression.replace("(?<n>", "(?P<n>"))
        except re.error:
            assume(False)
            raise


@settings(unhurried)
@given(expression=expressions, seed=st.integers(0, 2**32))
def test_a_regex_is_matched_from_end_to_end(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, expression: str, seed: int
) -> None:
    python = python_of(expression)

    for text in written(compiler, tokenizer, expression, "regex", seed):
        assert python.fullmatch(text), text


@settings(unhurried)
@given(expression=expressions, seed=st.integers(0, 2**32))
def test_a_pattern_is_found_in_the_string(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, expression: str, seed: int
) -> None:
    python = python_of(expression)

    for text in written(compiler, tokenizer, expression, "json_schema", seed):
        assert python.search(json.loads(text)), text
