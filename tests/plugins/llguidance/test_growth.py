"""Time and memory to compile a constraint grow no faster than it does, up to where it is refused."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc
from collections.abc import Callable

import pytest

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.structured import GrammarCompiler
from enginehouse.contract.types import Constraint
from enginehouse_llguidance.decoder import LlguidanceDecoder
from enginehouse_llguidance.options import LlguidanceOptions
from enginehouse_llguidance.schemas import prepare_schema
from enginehouse_testkit.fake_tokenizer import FakeTokenizer
from enginehouse_testkit.growth import assert_near_linear
from enginehouse_testkit.hostile_texts import HOSTILE_UNITS, hostile_text


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """A compiler that caches nothing."""
    return LlguidanceDecoder(LlguidanceOptions(max_cached_bytes=0)).bind(FakeTokenizer())


def compile_new(compiler: GrammarCompiler, kind: str, text: str) -> None:
    """Compile, or be refused."""
    with contextlib.suppress(InvalidRequest):
        compiler.compile(Constraint(kind=kind, text=text))  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", HOSTILE_UNITS.values(), ids=HOSTILE_UNITS)
def test_hostile_texts(compiler: GrammarCompiler, unit: str) -> None:
    """As an expression, a grammar, a schema, and inside of a schema."""
    wraps: dict[str, tuple[str, Callable[[str], str]]] = {
        "expression": ("regex", str),
        "lark": ("lark", lambda text: f"start: {text}"),
        "gbnf": ("gbnf", lambda text: f"root ::= {text}"),
        "literal": ("gbnf", lambda text: f"root ::= {json.dumps(text)}"),
        "schema": ("json_schema", str),
        "const": ("json_schema", lambda text: json.dumps({"const": text})),
        "pattern": ("json_schema", lambda text: json.dumps({"type": "string", "pattern": text})),
        "choice": ("choice", lambda text: json.dumps([text, "a"])),
    }
    for name, (kind, wrap) in wraps.items():
        assert_near_linear(
            lambda size, wrap=wrap: wrap(hostile_text(unit, size)),
            lambda text, kind=kind: compile_new(compiler, kind, text),
            1500,
            f"compiling {name}",
        )


@pytest.mark.parametrize("name", ["properties", "required", "enum", "anyOf", "allOf", "defs", "nested"])
def test_wide_schemas(compiler: GrammarCompiler, name: str) -> None:
    def schema(size: int) -> str:
        numbers = range(size)
        properties = {f"p{n}": {"type": "integer"} for n in numbers}
        shapes = {
            "properties": {"type": "object", "properties": properties},
            "required": {"type": "object", "properties": properties, "required": list(properties)},
            "enum": {"enum": [f"value {n}" for n in numbers]},
            "anyOf": {"anyOf": [{"const": n} for n in numbers]},
            "allOf": {"allOf": [{"type": "integer", "minimum": n} for n in numbers]},
            "defs": {"$defs": properties, "type": "object", "properties": {"a": {"$ref": "#/$defs/p0"}}},
            "nested": {"type": "array", "items": {"type": "object", "properties": properties}},
        }
        return json.dumps(shapes[name])

    assert_near_linear(schema, lambda text: compile_new(compiler, "json_schema", text), 120)


@pytest.mark.parametrize("is_nested", [False, True])
def test_many_optional_members_are_bounded(compiler: GrammarCompiler, is_nested: bool) -> None:
    """The library's time grows with their square, so their number is bounded: it ends after seconds."""

    def schema(size: int, member: dict[str, str]) -> str:
        record = {"type": "object", "properties": {f"p{n}": member for n in range(size)}}
        return json.dumps({"type": "array", "items": record} if is_nested else record)

    began_s = time.process_time()
    compile_new(compiler, "json_schema", schema(8500, {"type": "integer"}))

    assert time.process_time() - began_s < 20
    with pytest.raises(InvalidRequest, match="subschemas"):
        compiler.compile(Constraint(kind="json_schema", text=schema(10_001, {})))


def test_many_dynamic_anchors_beside_a_reference_that_depends_on_its_path() -> None:
    def peak_bytes(size: int) -> int:
        anchors = {f"d{n}": {"$dynamicAnchor": f"a{n}", "type": "string"} for n in range(size)}
        others = {name: {"$id": name, "$dynamicAnchor": "same", "$dynamicRef": "#same"} for name in ("x", "y")}
        properties = {name: {"$ref": f"#/$defs/{name}"} for name in anchors}
        tracemalloc.start()
        try:
            prepare_schema({"properties": properties, "$defs": anchors | others}, LlguidanceOptions())
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(1)  # what is kept
    assert peak_bytes(400) < 6 * peak_bytes(100)
