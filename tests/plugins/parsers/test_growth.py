"""Streamed answers are parsed in time that grows no faster than they do, whatever a model writes."""

from __future__ import annotations

from functools import partial

import pytest

from enginehouse.contract.parsers import ChatFormat
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse_parsers.harmony import HarmonyReasoningParser
from enginehouse_parsers.think import ThinkParser
from enginehouse_testkit.growth import assert_near_linear
from enginehouse_testkit.hostile_texts import HOSTILE_UNITS, hostile_text

from .answers import FORMATS, TOOLS

THINK = ThinkParser().bind(ChatFormat(""))
HARMONY = HarmonyReasoningParser().bind(ChatFormat(""))
OPENINGS = {
    "text": "",
    "hermes": '<tool_call>\n{"name": "say", "arguments": {"text": "',
    "hermes object": "<tool_call>\n",
    "llama3": '{"name": "say", "parameters": {"text": "',
    "tagged": "<|python_tag|>",
    "mistral": '[TOOL_CALLS] [{"name": "say", "arguments": {"text": "',
    "named": "[TOOL_CALLS]say[ARGS]",
    "name": "[TOOL_CALLS]say",
    "list": '[say(text="',
    "call": "[say(",
    "bracket": "[",
    "behind a call": '{"name": "now"}',
    "behind a tagged call": '<tool_call>{"name": "now"}',
    "behind a call in a list": "[now()",
    "tagged text": "<tool_call>\n<function=say>\n<parameter=text>",
    "tagged name": "<tool_call>say",
    "tagged key": "<tool_call>\n<function=say>\n<parameter=",
    "tagged number": "<tool_call>\n<function=set_lamp>\n<parameter=level>",
}
UNITS = {
    **HOSTILE_UNITS,
    "escapes": '\\"',
    "calls of hermes": '<tool_call>{"name": "now"}</tool_call>',
    "half a call": '<tool_call>{"name": "now", "arguments": {',
    "calls in a list": "now(), ",
    "objects": '{"name": "now"}; ',
    "marks of mistral": "[TOOL_CALLS]",
    "marks of llama": "<|python_tag|>",
}


def parse(parsing: AnswerParsing, text: str, step: int) -> None:
    parser = parsing.open()
    assert parser is not None
    for start in range(0, len(text), step):
        for _ in parser.push(text[start : start + step]):
            pass
    list(parser.flush())


READS = {
    "hermes": ["text", "hermes", "hermes object", "behind a call", "behind a tagged call"],
    "llama3": ["llama3", "tagged", "bracket"],
    "mistral": ["mistral"],
    "mistral-named": ["named", "name"],
    "pythonic": ["list", "call", "bracket", "behind a call in a list"],
    "qwen3-coder": ["tagged text", "tagged name", "tagged key", "tagged number"],
}
"""Formats, and the openings that lead into states of their sessions."""


@pytest.mark.parametrize(("format_name", "opening"), [(name, opening) for name in READS for opening in READS[name]])
def test_calls(format_name: str, opening: str) -> None:
    """In pieces of three characters, as tokens come."""
    parsing = AnswerParsing(tool_format=FORMATS[format_name], tools=TOOLS)
    for name, unit in UNITS.items():
        assert_near_linear(
            lambda size, unit=unit: OPENINGS[opening] + hostile_text(unit, size),
            partial(parse, parsing, step=3),
            2000,
            f"parsing {name}",
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("format_name", FORMATS)
def test_calls_of_every_format(format_name: str) -> None:
    """After the beginning of a call as the format writes it, with its own markers besides."""
    syntax = FORMATS[format_name].syntax
    call = f"{syntax.section_start}{syntax.call_start}say{'(' if syntax.kind == 'keywords' else syntax.name_end}"
    call = call.replace("{id}", "abcdef012").replace("{index}", "0").replace("{name}", "say")
    parsing = AnswerParsing(tool_format=FORMATS[format_name], tools=TOOLS)
    own = {f"marker {marker!r}": marker for marker in (*FORMATS[format_name].markers, call)}
    for opening, units in (("", own), (call, {**UNITS, **own})):
        for name, unit in units.items():
            assert_near_linear(
                lambda size, opening=opening, unit=unit: opening + hostile_text(unit, size),
                partial(parse, parsing, step=3),
                4000,
                f"parsing {name}",
            )


@pytest.mark.parametrize(
    ("is_open", "opening"),
    [
        *[(False, ""), (False, "<think>"), (False, "<think>a</think>"), (True, ""), (True, "a</think>")],
        *(pytest.param(is_open, "<think>a", marks=pytest.mark.slow) for is_open in (False, True)),
        pytest.param(True, "<think>", marks=pytest.mark.slow),
    ],
)
def test_reasoning(is_open: bool, opening: str) -> None:
    parsing = AnswerParsing(reasoning=THINK, reasoning_is_open=is_open, tool_format=FORMATS["hermes"], tools=TOOLS)
    for name, unit in UNITS.items():
        assert_near_linear(
            lambda size, unit=unit: opening + hostile_text(unit, size),
            partial(parse, parsing, step=3),
            2000,
            f"parsing {name}",
        )


@pytest.mark.parametrize("opening", ["", "<|channel|>", "<|start|>", "<|channel|>analysis<|message|>a<|end|>"])
def test_channels(opening: str) -> None:
    parsing = AnswerParsing(reasoning=HARMONY, tool_format=FORMATS["harmony"], tools=TOOLS)
    for name, unit in {**UNITS, "channels": "<|channel|>", "starts": "<|start|>", "ends": "<|end|>"}.items():
        assert_near_linear(
            lambda size, unit=unit: opening + hostile_text(unit, size),
            partial(parse, parsing, step=3),
            2000,
            f"parsing {name}",
        )
