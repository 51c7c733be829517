"""Schemas as people have them: nearly all are taken, and what is written under them validates."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
from jsonschema import (
    Draft3Validator,
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
)

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

from .walks import ENFORCED, dialect_of, takes, walk
from .wild import WILD

REFUSED = {
    "remote": "'/$ref': 'https://example.org/other.json' is not part of this schema; nothing is fetched",
}


def check(compiler: GrammarCompiler, tokenizer: FakeTokenizer, schema: Any, dialect: Any, seeds: range) -> str:
    """The reason why a schema is refused, or "" after texts at random validated."""
    try:
        grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema), param="schema"))
    except InvalidRequest as error:
        return error.message
    validator = dialect(schema, format_checker=dialect.FORMAT_CHECKER)
    texts = {walk(grammar, tokenizer, random.Random(seed), 400) for seed in seeds} - {None}
    assert texts, schema
    for text in texts:
        assert [error.message for error in validator.iter_errors(json.loads(text))] == [], (schema, text)
    return ""


@pytest.mark.parametrize("name", WILD)
def test_schemas_as_people_have_them_are_taken(compiler: GrammarCompiler, tokenizer: FakeTokenizer, name: str) -> None:
    reason = check(compiler, tokenizer, WILD[name], Draft202012Validator, range(5))

    assert reason.startswith(f"schema: {REFUSED[name]}" if name in REFUSED else "")
    assert bool(reason) == (name in REFUSED)


def combined(keyword: str) -> Iterator[Any]:
    """The example of a keyword in each combination with others."""
    schema, good, _ = ENFORCED[keyword]
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    if "#" in (schema.get("$ref"), schema.get("items", {}) if isinstance(schema.get("items"), dict) else ""):
        return
    yield schema
    yield {"type": "object", "properties": {"x": schema, "y": {"type": "null"}}, "required": ["x"], **definitions}
    yield {"type": "array", "items": schema, "maxItems": 3, "uniqueItems": True, **definitions}
    yield {"anyOf": [schema, {"const": "other"}], **definitions}
    yield {"allOf": [schema, {"title": "t"}], **definitions}
    yield {"oneOf": [schema, {"const": {"other": [1]}}], **definitions}
    yield {"if": {"const": good}, "then": {}, "else": schema, **definitions}
    yield {"not": {"not": schema}, **definitions}
    yield {"$ref": "#/$defs/it", "$defs": {"it": schema, **definitions.get("$defs", {})}}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_all_combinations_few_are_refused_and_none_is_wrong(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer
) -> None:
    reasons = [
        check(compiler, tokenizer, schema, dialect_of(keyword), range(12))
        for keyword in ENFORCED
        for schema in combined(keyword)
    ]

    assert len(reasons) > 350
    refused = [reason for reason in reasons if reason]
    assert len(refused) <= 0.1 * len(reasons), refused


DIALECTS = {
    **{"draft3": Draft3Validator, "draft4": Draft4Validator, "draft6": Draft6Validator, "draft7": Draft7Validator},
    **{"draft2019-09": Draft201909Validator, "draft2020-12": Draft202012Validator},
}
RIGHT_REFUSALS = ("nothing is fetched", "Unsatisfiable schema")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Any, list[dict[str, Any]]]]:
    """Dialect, schema and tests of the cases of JSON-Schema-Test-Suite, which is in jsonschema's source archive."""
    folder = tmp_path_factory.mktemp("jsonschema")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
    subprocess.run([*command, "--dest", str(folder), "jsonschema"], capture_output=True, timeout=600, check=False)
    archive = next(folder.glob("*.tar.gz"), None)
    if archive is None:
        pytest.skip("the source archive of jsonschema could not be downloaded")
    found = []
    with tarfile.open(archive) as opened:
        for member in opened:
            folders = PurePosixPath(member.name).parts[1:-1]
            if folders[:2] != ("json", "tests") or folders[-1] not in DIALECTS or not member.name.endswith(".json"):
                continue
            file = opened.extractfile(member)
            assert file is not None
            found += [(folders[-1], case["schema"], case["tests"]) for case in json.load(file)]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_the_cases_of_the_json_schema_test_suite_few_are_refused_and_none_is_wrong(
    compiler: GrammarCompiler, tokenizer: FakeTokenizer, suite: list[tuple[str, Any, list[dict[str, Any]]]]
) -> None:
    """No value that a case calls invalid can be written, and most of the valid ones can."""
    refused, num_valid, num_taken = [], 0, 0
    for name, schema, tests in suite:
        if isinstance(schema, dict):
            schema.setdefault("$schema", DIALECTS[name].META_SCHEMA["$schema"])
        if reason := check(compiler, tokenizer, schema, DIALECTS[name], range(8)):
            refused.append(reason)
            continue
        grammar = compiler.compile(Constraint(kind="json_schema", text=json.dumps(schema), param="schema"))
        for test in tests:
            is_taken = takes(grammar, tokenizer, json.dumps(test["data"], ensure_ascii=False))
            assert test["valid"] or not is_taken, (schema, test)
            num_valid += test["valid"]
            num_taken += is_taken
    assert len(suite) > 1400
    assert len(refused) <= 0.1 * len(suite)
    assert [reason for reason in refused if not any(right in reason for right in RIGHT_REFUSALS)] == []
    assert num_taken > 0.9 * num_valid
