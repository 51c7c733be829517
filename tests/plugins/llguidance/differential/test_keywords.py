"""The table of docs/structured.md says the truth about every keyword."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema_specifications import REGISTRY

from enginehouse.contract.schema_keywords import FORMAT_NAMES, KEYWORD_NAMES
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_llguidance.formats import FOREIGN_TEXTS, STRING_FORMATS
from enginehouse_llguidance.schemas.keywords import KEYWORDS
from enginehouse_llguidance.schemas.numbers import NUMBER_FORMATS
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

from .walks import ENFORCED, dialect_of, takes, walk

EVERY_TYPE = {"type": "object", "properties": {"a": {}}}


def may_write(compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: Any, value: Any) -> bool:
    """Whether a model may write exactly this value as the answer."""
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    return takes(grammar, tokenizer, json.dumps(value, ensure_ascii=False))


def test_the_table_knows_every_keyword_of_every_draft() -> None:
    """The meta-schemas list them: draft 3 to 2020-12, all vocabularies."""
    known = {name for uri in REGISTRY for name in REGISTRY[uri].contents.get("properties", {})}

    assert {"unevaluatedItems", "prefixItems", "dependentSchemas", "contentSchema", "disallow"} <= known
    assert known <= set(KEYWORDS) == KEYWORD_NAMES


def test_core_knows_the_formats_that_are_enforced() -> None:
    """The others are of schema generators, for any string; core lists unknown ones as ignored."""
    assert {*STRING_FORMATS, *NUMBER_FORMATS} < FORMAT_NAMES


def test_every_keyword_of_the_table_has_an_example_here() -> None:
    assert set(ENFORCED) == {name for name, keyword in KEYWORDS.items() if keyword.status == "enforced"}


@pytest.mark.parametrize("keyword", ENFORCED)
def test_enforced_keywords_are(compiler: GrammarCompiler, tokenizer: FakeTokenizer, keyword: str) -> None:
    schema, good, bad = ENFORCED[keyword]

    assert may_write(compiler, tokenizer, schema, good)
    assert not may_write(compiler, tokenizer, schema, bad)
    dialect = dialect_of(keyword)
    assert dialect(schema, format_checker=dialect.FORMAT_CHECKER).is_valid(good)
    assert not dialect(schema, format_checker=dialect.FORMAT_CHECKER).is_valid(bad)


@pytest.mark.parametrize("keyword", ENFORCED)
def test_what_is_written_under_an_enforced_keyword_validates(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, keyword: str
) -> None:
    schema = ENFORCED[keyword][0]
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    texts = {walk(grammar, tokenizer, random.Random(seed), 400) for seed in range(30)} - {None}
    dialect = dialect_of(keyword)
    validator = dialect(schema, format_checker=dialect.FORMAT_CHECKER)

    assert texts
    for text in texts:
        validator.validate(json.loads(text))


@pytest.mark.parametrize("keyword", [name for name, word in KEYWORDS.items() if word.status == "annotation"])
def test_annotations_change_nothing(compiler: GrammarCompiler, tokenizer: FakeTokenizer, keyword: str) -> None:
    schema = {"items": {"type": "null", keyword: {"type": "string", "not": {}}}}

    assert may_write(compiler, tokenizer, schema, [None])
    assert not may_write(compiler, tokenizer, schema, [1])


FORMATS = {
    "byte": ("YWI=", "YWI"),
    "date": ("0004-02-29", "1900-02-29"),
    "date-time": ("2024-12-31T23:59:59.5+05:30", "2024-12-31 23:59:59Z"),
    "duration": ("P1Y2M3DT4H5M6S", "P1S"),
    "email": ("a.b+c@ex-ample.org", "a b@example.org"),
    "hostname": ("a-1.example", "-a.example"),
    "idn-email": ("a@example.org", "a@"),
    "idn-hostname": ("example.org", "exa mple"),
    "ipv4": ("255.0.10.1", "256.0.0.1"),
    "ipv6": ("fe80::1:2", "fe80::1::2"),
    "iri": ("http://example.org/a?b#c", "no iri"),
    "iri-reference": ("urn:a:b", "\\\\"),
    "json-pointer": ("/a~0b/c", "a"),
    "regex": ("^[a-z]+x?$", "("),
    "relative-json-pointer": ("120/a~1b", "105/a"),  # which jsonschema takes for a leading zero
    "time": ("12:00:00Z", "24:00:00Z"),
    "uri": ("https://example.org:8080/a%20b", "//example.org"),
    "uri-reference": ("mailto:a@example.org", "a b"),
    "uri-template": ("/a/{b}", "/a/{b"),
    "uuid": ("01234567-89ab-cdef-0123-456789abcdef", "01234567-89ab-cdef-0123"),
}


def test_every_format_has_an_example_here() -> None:
    assert set(FORMATS) == set(STRING_FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_enforced(compiler: GrammarCompiler, tokenizer: FakeTokenizer, name: str) -> None:
    schema, (good, bad) = {"type": "string", "format": name}, FORMATS[name]

    assert may_write(compiler, tokenizer, schema, good)
    assert not may_write(compiler, tokenizer, schema, bad)
    assert Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).is_valid(good)


@pytest.mark.parametrize("name", FOREIGN_TEXTS)
def test_complements_of_formats_are_enforced(compiler: GrammarCompiler, tokenizer: FakeTokenizer, name: str) -> None:
    schema, (good, _) = {"type": "string", "not": {"format": name}}, FORMATS[name]
    grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    texts = {walk(grammar, tokenizer, random.Random(seed), 100) for seed in range(20)} - {None}

    assert not takes(grammar, tokenizer, json.dumps(good))
    assert texts
    for text in texts:
        assert not Draft202012Validator.FORMAT_CHECKER.conforms(json.loads(text), name), text
