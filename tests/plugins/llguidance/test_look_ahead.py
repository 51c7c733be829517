"""Look-ahead: what is translated matches what Python's own expressions match, and what models write validates."""

from __future__ import annotations

import functools
import json
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_llguidance.patterns import PatternError, translate_pattern
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

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
}
"""Expressions, and characters of which the interesting texts are made."""


@functools.cache
def translated(pattern: str) -> re.Pattern[str]:
    """The translation, from the library's dialect to Python's."""
    regex = translate_pattern(pattern, search=True).regex
    return re.compile(re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", regex))


@pytest.mark.parametrize("pattern", EXACT)
@settings(max_examples=400)
@given(data=st.data())
def test_translations_match_what_python_matches(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.text(EXACT[pattern], max_size=9))

    assert bool(translated(pattern).fullmatch(text)) == bool(re.search(pattern, text))


@pytest.mark.parametrize("pattern", [*EXACT, decimal_of(5, 2), decimal_of(12, 4)])
@settings(max_examples=200)
@given(text=st.text("01.+-a@\n٣é", max_size=8))
def test_translations_never_match_more(pattern: str, text: str) -> None:
    """Digits of other scripts and line breaks too, on which dialects disagree."""
    if translated(pattern).fullmatch(text):
        assert re.search(pattern, text)


@settings(max_examples=300)
@given(text=st.text("01.+-", max_size=9))
def test_decimals_with_bounds(text: str) -> None:
    """Matched is what is meant, not what the missing end of one alternative lets through."""
    meant = decimal_of(5, 2).replace(r"\d{0,3}|", r"\d{0,3}$|")

    assert bool(translated(decimal_of(5, 2)).fullmatch(text)) == bool(re.search(meant, text))


SCHEMAS = [
    {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
    {"type": "string", "pattern": ZOD_EMAIL, "maxLength": 30},
    {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
    {"type": "object", "properties": {"d": {"type": "string", "pattern": decimal_of(10, 2)}}, "required": ["d"]},
    {"type": "string", "pattern": r"^(?=.*\d)(?=.*[a-z])[a-z\d]{3,5}$"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_what_is_written_validates(compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: dict) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    num_whole = 0
    for seed in range(60):
        rng, matcher, written = np.random.default_rng(seed), grammar.start(), b""
        bitmask = np.zeros((tokenizer.vocab_size + 31) // 32, np.int32)
        for _ in range(80):
            matcher.fill_bitmask(bitmask)
            bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
            ids = [int(token_id) for token_id in np.flatnonzero(bits)]
            if any(token_id in tokenizer.end_token_ids for token_id in ids):
                num_whole += 1
                value = json.loads(written)
                jsonschema.validate(value, schema)
                for one in value.values() if isinstance(value, dict) else [value]:
                    pattern = schema.get("pattern") or DECIMAL
                    assert not isinstance(one, str) or isinstance(value, dict) or re.search(pattern, one)
            ids = [token_id for token_id in ids if token_id not in tokenizer.end_token_ids]
            if not ids:
                break
            quotes = [token_id for token_id in ids if tokenizer.token_bytes[token_id] == b'"']
            chosen = int(rng.choice(quotes if quotes and rng.random() < 0.3 else ids))
            matcher.accept(chosen)
            written += tokenizer.token_bytes[chosen]

    assert num_whole > 10


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"(?<=a)b", "look-behind"),
        (r"(?<!a)b", "look-behind"),
        (r"(a(?!b))*c", "look-ahead"),
        (r"(?:(?!b)a)+c", "look-ahead"),
        (r"^(?!.*(?!x))y$", "look-ahead"),
        (r"^(?=b)a$", "look-ahead"),
        (r"^(?!\p{Lu})a$", "look-ahead"),
        (r"^(?!a)*b$", "look-ahead"),
    ],
)
def test_other_look_around_is_refused_by_name(compiler: GrammarCompiler, pattern: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        compiler.compile(Constraint(kind="json_schema", text=json.dumps({"type": "string", "pattern": pattern})))


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?=[ab]*a[ab]{12})(?=[ab]*b[ab]{11})[ab]*$",
        r"^(?!.*(a|b){1,500}c)[a-z]{1,2000}$",
        r"^(?!.{0,3000}x)[a-z]*$",
        "^" + "".join(f"(?=.*{char})" for char in "abcdefghijkl") + ".*$",
        r"^(?!((a{1,100}){1,100}){1,100})a*$",
    ],
)
def test_bombs_are_refused_in_time(pattern: str) -> None:
    began = time.process_time()
    with pytest.raises(PatternError, match="too large"):
        translate_pattern(pattern, search=True)

    assert time.process_time() - began < 5
