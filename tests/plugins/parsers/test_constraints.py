"""Enforced calls: what each format's constraint allows, and that its session reads all of it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from attrs import evolve

from enginehouse.contract.errors import InvalidRequest, UnsupportedParameter
from enginehouse.contract.structured import BacktrackingMatcher, Grammar
from enginehouse.contract.types import Constraint, Tool
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse_testkit.fake_tokenizer import FakeTokenizer

from .answers import DRAWN, FORMATS, LAMP, NOW, told

pytestmark = pytest.mark.llguidance

TOKENIZER = FakeTokenizer()


def raw_tool(name: str, parameters: dict[str, Any]) -> Tool:
    return Tool(name=name, parameters=parameters, definition={}, param="tools[0].function")


OPTIONAL = raw_tool(
    "optional",
    {
        "type": "object",
        "properties": {
            "a": {"type": "boolean"},
            "b": {"enum": ["x", 1, None]},
            "c": {"$ref": "#/$defs/c"},
        },
        "required": ["b"],
        "$defs": {"c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    },
)
NONE_REQUIRED = raw_tool("none_required", {"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}})
BRANCHED = raw_tool(
    "branched",
    {
        "anyOf": [
            {"type": "object", "properties": {"if": {"const": True}}, "required": ["if"], "additionalProperties": False}
        ]
    },
)
ODD_NAMES = raw_tool("odd-names", {"properties": {"a b": {"const": 1}, "if": {"const": 2}}, "required": ["a b"]})
TOOLS = (LAMP, NOW, OPTIONAL, NONE_REQUIRED, BRANCHED, ODD_NAMES)


@pytest.fixture(scope="module")
def compile_constraint():
    from enginehouse_llguidance.decoder import LlguidanceDecoder
    from enginehouse_llguidance.options import LlguidanceOptions

    return LlguidanceDecoder(LlguidanceOptions()).bind(TOKENIZER).compile


def allows(grammar: Grammar, text: str) -> bool:
    """Whether the whole text may be written, and may end there."""
    matcher = grammar.start()
    bitmask = np.zeros((TOKENIZER.vocab_size + 31) // 32, np.int32)
    for token_id in TOKENIZER.encode(text, special=False):
        matcher.fill_bitmask(bitmask)
        if not bitmask[token_id // 32] >> (token_id % 32) & 1:
            return False
        matcher.accept(token_id)
    if matcher.is_finished():
        return True
    matcher.fill_bitmask(bitmask)
    return any(bitmask[end // 32] >> (end % 32) & 1 for end in TOKENIZER.end_token_ids)


def draw(grammar: Grammar, chance: random.Random, max_tokens: int = 400) -> str | None:
    """A text drawn by chance alone; None when it did not end."""
    matcher = grammar.start()
    bitmask = np.zeros((TOKENIZER.vocab_size + 31) // 32, np.int32)
    token_ids: list[int] = []
    for _ in range(max_tokens):
        if matcher.is_finished():
            return text_of(token_ids)
        matcher.fill_bitmask(bitmask)
        allowed = [n for n in range(TOKENIZER.vocab_size) if bitmask[n // 32] >> (n % 32) & 1]
        ends = [token_id for token_id in allowed if token_id in TOKENIZER.end_token_ids]
        is_end = bool(ends) and (len(ends) == len(allowed) or chance.random() < 0.3)
        token_ids.append(ends[0] if is_end else chance.choice([one for one in allowed if one not in ends]))
        matcher.accept(token_ids[-1])
        if num_wrong := matcher.backtrack() if isinstance(matcher, BacktrackingMatcher) else 0:
            del token_ids[-num_wrong:]
        elif is_end:
            return text_of(token_ids[:-1])
    return None


def text_of(token_ids: list[int]) -> str:
    return b"".join(TOKENIZER.token_bytes[one] for one in token_ids).decode()


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("parallel", [False, True, None])
def test_whatever_is_allowed_is_read_as_valid_calls(compile_constraint, name: str, parallel: bool | None) -> None:
    grammar = compile_constraint(FORMATS[name].constraint(TOOLS, parallel))
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    chance, num_read, most = random.Random(3), 0, 0

    while num_read < 30:
        text = draw(grammar, chance)
        if text is None:
            continue
        num_read += 1
        said = told(AnswerParsing(tool_format=FORMATS[name], tools=TOOLS), list(text))
        assert said["content"] == "" and said["calls"], text
        most = max(most, len(said["calls"]))
        for called, arguments in said["calls"]:
            jsonschema.validate(json.loads(arguments), schemas[called])
    allows_several = name != "default" if parallel is None else parallel
    assert (most > 1) == (allows_several and name != "llama3")


SEARCHED = raw_tool(
    "pay",
    {
        "type": "object",
        "properties": {
            "price": {"type": "string", "pattern": "^([a-z]{2,4})-\\1$"},
            "code": {"type": "string", "pattern": "^(?>[ab]+)c$", "maxLength": 4},
            "numbers": {"type": "array", "items": {"enum": [1, 2, 2**70]}, "uniqueItems": True, "minItems": 3},
        },
        "required": ["price", "code", "numbers"],
    },
)
TEXTS = raw_tool(
    "pay",
    {
        "type": "object",
        "properties": {
            "price": {"type": "string", "pattern": "^US\\$[0-9]+$", "maxLength": 5},
            "code": {"type": "string", "pattern": "^[ab]{2}|c$", "minLength": 3, "maxLength": 4},
        },
        "required": ["price", "code"],
    },
)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("tool", [TEXTS, SEARCHED])
def test_texts_have_their_patterns_and_lengths_in_every_form(compile_constraint, name: str, tool: Tool) -> None:
    """Also where they are without quotation marks, the end of an expression is escaped, or it takes a search."""
    grammar = compile_constraint(FORMATS[name].constraint((tool,), parallel=False))
    chance, num_read = random.Random(5), 0
    while num_read < 15:
        if (text := draw(grammar, chance)) is None:
            continue
        num_read += 1
        ((_, arguments),) = told(AnswerParsing(tool_format=FORMATS[name], tools=(tool,)), list(text))["calls"]
        jsonschema.validate(json.loads(arguments), tool.parameters)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "set_lamp", "arguments": {"on": true, "level": 3}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        ("llama3", '{"name": "set_lamp", "parameters": {"on": true, "level": 3}}'),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'),
        ("mistral-named", "[TOOL_CALLS]now[ARGS]{}"),
        ("pythonic", "[set_lamp(on=true, level=3)]"),
        ("pythonic", "[now()]"),
        ("pythonic", '[optional(b="x", a=true, c=[false, true])]'),
        ("pythonic", "[optional(b=null, c=[])]"),
        ("pythonic", "[none_required()]"),
        ("pythonic", "[none_required(b=2)]"),
        ("pythonic", "[none_required(a=1, c=3)]"),
        ("pythonic", '[branched(**{"if": true})]'),
        ("pythonic", '[odd-names(**{"a b": 1})]'),
    ],
)
def test_allowed(compile_constraint, name: str, text: str) -> None:
    assert allows(compile_constraint(FORMATS[name].constraint(TOOLS, parallel=False)), text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", ""),
        ("hermes", "Hello"),
        ("hermes", '<tool_call>\n{"name": "say", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "set_lamp", "arguments": {"on": true, "level": 11}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "set_lamp", "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>'),
        ("pythonic", "[now()"),
        ("pythonic", "[now(), now()]"),
        ("pythonic", "[optional(a=true)]"),
        ("pythonic", "[none_required(, b=2)]"),
        ("pythonic", "[none_required(b=2 a=1)]"),
    ],
)
def test_refused(compile_constraint, name: str, text: str) -> None:
    assert not allows(compile_constraint(FORMATS[name].constraint(TOOLS, parallel=False)), text)


def test_several_calls_where_they_are_allowed(compile_constraint) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    parallel = compile_constraint(FORMATS["hermes"].constraint((NOW,), parallel=True))
    one = compile_constraint(FORMATS["hermes"].constraint((NOW,), parallel=False))

    assert allows(parallel, f"{call}\n{call}\n{call}") and allows(one, call)
    assert not allows(one, f"{call}\n{call}") and not allows(parallel, f"{call}{call}")
    assert not allows(parallel, "\n".join([call] * 17))


@pytest.mark.parametrize("name", DRAWN)
def test_a_call_or_an_answer_of_its_own_form(compile_constraint, name: str) -> None:
    """``response_format`` together with tools that need not be called."""
    answer = Constraint(
        kind="json_schema", text='{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}'
    )
    grammar = compile_constraint(FORMATS[name].constraint((LAMP,), parallel=False, answer=answer))

    assert allows(grammar, '{"a": 1}')
    assert not allows(grammar, "Hello")
    chance = random.Random(1)
    drawn = [text for text in (draw(grammar, chance) for _ in range(60)) if text is not None]
    read = [told(AnswerParsing(tool_format=FORMATS[name], tools=(LAMP,)), [text]) for text in drawn]
    assert any(said["calls"] for said in read)
    assert all(said["calls"] or json.loads(said["content"])["a"] == 1 for said in read)


STRICT = evolve(LAMP, strict=True, param="tools[4].function")
LOOSE = evolve(LAMP, name="loose")


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("hermes", '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
        ("mistral", '[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"),
        ("mistral-named", "[TOOL_CALLS]NAME[ARGS]", ""),
    ],
)
def test_strict_tools_are_checked_in_any_text(compile_constraint, name: str, before: str, after: str) -> None:
    constraint = FORMATS[name].constraint((STRICT, LOOSE), parallel=False, answer="any")
    grammar = compile_constraint(constraint)
    right, wrong = '{"on": true, "level": 3}', '{"on": true, "level": 99}'

    assert constraint.param == "tools[4].function.strict"
    assert allows(grammar, "Hello < [TOOL <tool_cal\n\nworld") and allows(grammar, "")
    for text in ("", "Let me see.\n"):
        assert allows(grammar, text + before.replace("NAME", "set_lamp") + right + after)
        assert not allows(grammar, text + before.replace("NAME", "set_lamp") + wrong + after)
        assert allows(grammar, text + before.replace("NAME", "loose") + wrong + after)
        assert not allows(grammar, text + before.replace("NAME", "other") + right + after)


@pytest.mark.parametrize("name", ["llama3", "pythonic"])
def test_strict_tools_are_refused_where_calls_have_no_tag(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        FORMATS[name].constraint((LOOSE, STRICT), parallel=False, answer="any")
    assert caught.value.param == "tools[4].function.strict"


def test_a_control_token_stands_for_its_marker(compile_constraint) -> None:
    """Where the model has the tag as a control token, the token is the only way to write it."""
    constraint = FORMATS["mistral-named"].constraint((NOW,), parallel=False)
    matcher = compile_constraint(
        Constraint(kind="composition", text=constraint.text.replace("[TOOL_CALLS]", "<|im_start|>"))
    ).start()

    assert list(matcher.forced_token_ids())[:1] == [TOKENIZER.special_tokens["<|im_start|>"]]


def test_schemas_that_cannot_be_enforced_are_named(compile_constraint) -> None:
    tool = raw_tool("f", {"properties": {"a": {"pattern": "(a)\\2"}}})
    for tool_format in FORMATS.values():
        with pytest.raises(InvalidRequest) as caught:
            compile_constraint(tool_format.constraint((tool,), parallel=False))
        assert (caught.value.param or "").startswith("tools[0].function.parameters")
