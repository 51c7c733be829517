"""Answers of every kind through every parser of tools and reasoning: the same however cut, and never a crash."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st

from enginehouse.contract.parsers import ChatFormat
from enginehouse_parsers.think import ThinkParser
from enginehouse_parsers.tool_format import tool_parsers
from enginehouse_testkit.contract.parser_driver import TOOLS, said_by

from .cases import NASTY_TEXT, NUM_CASES, run_cases

FORMATS = {parser.name: parser.bind(ChatFormat("")) for parser in tool_parsers()}
_PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "[",
        "]",
        "(",
        ")",
        "{",
        "}",
    ),
    *(
        '{"name": "set_lamp", "arguments": {"on": true, "level": 3}}',
        '{"name":"now"',
        "<function=say>",
        "<parameter=text>",
        "</parameter>",
        "<arg_key>",
        "<arg_value>",
        '"parameters": {}',
        "set_lamp(on=True, level=3)",
    ),
    *(
        "set_lamp",
        "say",
        "now()",
        "nobody",
        "text='",
        'text="',
        "\\'",
        '\\"',
        "\\u12",
        ": ",
        ", ",
        "\n",
        "null",
        "-1.5e",
        "True",
    ),
    *("<think>", "</think>", "<thi", "nk>", "Hello ", '"', "'", "=", "\\", "```json\n", "{'a': 1}"),
)
_ANSWER = st.lists(st.one_of(st.sampled_from(_PIECES), NASTY_TEXT), max_size=12).map("".join)
_CUTS = st.lists(st.integers(0, 10_000), max_size=12)


def _cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize("name", FORMATS)
@NUM_CASES
def test_tool_parsers(name: str, num_cases: int) -> None:
    """Content, names and arguments are the same in one piece, in single characters and cut anywhere."""
    tool_format = FORMATS[name]

    def check(text: str, cuts: list[int], is_cut: bool) -> None:
        whole = said_by(tool_format.open(TOOLS), [text], is_cut)
        assert {called for called, _ in whole.calls} <= {tool.name for tool in TOOLS}
        assert said_by(tool_format.open(TOOLS), list(text), is_cut) == whole
        assert said_by(tool_format.open(TOOLS), _cut(text, cuts), is_cut) == whole

    run_cases(num_cases // len(FORMATS), check, text=_ANSWER, cuts=_CUTS, is_cut=st.booleans())


@NUM_CASES
def test_reasoning_parser(num_cases: int) -> None:
    reasoning = ThinkParser().bind(ChatFormat("{{ '<think>' }} enable_thinking </think>"))

    def check(text: str, cuts: list[int], is_cut: bool, is_open: bool) -> None:
        whole = said_by(reasoning.open(is_open), [text], is_cut)
        assert not whole.calls
        assert said_by(reasoning.open(is_open), list(text), is_cut) == whole
        assert said_by(reasoning.open(is_open), _cut(text, cuts), is_cut) == whole

    run_cases(num_cases, check, text=_ANSWER, cuts=_CUTS, is_cut=st.booleans(), is_open=st.booleans())
