"""Answers of every kind through every parser of tools and reasoning: the same however cut, and never a crash."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import strategies as st

from enginehouse.contract.parsers import ChatFormat, ReasoningParser
from enginehouse_parsers.harmony import HarmonyReasoningParser, RecipientsReasoningParser
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


def _written_in(name: str) -> st.SearchStrategy[str]:
    """Texts with the markers of a format, and with calls as it writes them."""
    tool_format = FORMATS[name]
    call = tool_format.syntax.summary.replace("{id}", "abcdef012").replace("{index}", "0")
    calls = [call, call.replace("f", "say", 1), call[: len(call) // 2], f"{tool_format.syntax.call_start}say"]
    own = st.sampled_from((*tool_format.markers, *calls, "say", "now"))
    return st.lists(st.one_of(own, st.sampled_from(_PIECES), NASTY_TEXT), max_size=12).map("".join)


_ANSWER = st.lists(st.one_of(st.sampled_from(_PIECES), NASTY_TEXT), max_size=12).map("".join)
_CUTS = st.lists(st.integers(0, 10_000), max_size=12)


def _cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize("name", FORMATS)
@NUM_CASES
def test_tool_parsers(name: str, num_cases: int) -> None:
    """Content, names and arguments are the same in one piece, in single characters and cut anywhere; they are JSON."""
    tool_format = FORMATS[name]

    def check(text: str, cuts: list[int], is_cut: bool) -> None:
        whole = said_by(tool_format.open(TOOLS), [text], is_cut)
        assert {called for called, _ in whole.calls} <= {tool.name for tool in TOOLS}
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
        assert said_by(tool_format.open(TOOLS), list(text), is_cut) == whole
        assert said_by(tool_format.open(TOOLS), _cut(text, cuts), is_cut) == whole

    run_cases(num_cases // len(FORMATS), check, text=_written_in(name), cuts=_CUTS, is_cut=st.booleans())


@pytest.mark.parametrize(
    ("parser", "pieces"),
    [
        (ThinkParser(), ("<think>", "</think>")),
        (
            HarmonyReasoningParser(),
            ("<|channel|>analysis<|message|>", "<|start|>assistant", "<|end|>", " to=functions.f"),
        ),
        (RecipientsReasoningParser(), (" to=self<|message|>", " to=user<|message|>", "<|eom|>", "<|start|>assistant")),
    ],
    ids=["think", "harmony", "recipients"],
)
@NUM_CASES
def test_reasoning_parser(parser: ReasoningParser, pieces: tuple[str, ...], num_cases: int) -> None:
    reasoning = parser.bind(ChatFormat("{{ '<think>' }} enable_thinking </think>"))
    texts = st.lists(st.one_of(st.sampled_from(pieces), _ANSWER), max_size=8).map("".join)

    def check(text: str, cuts: list[int], is_cut: bool, is_open: bool) -> None:
        whole = said_by(reasoning.open(is_open), [text], is_cut)
        assert not whole.calls
        assert said_by(reasoning.open(is_open), list(text), is_cut) == whole
        assert said_by(reasoning.open(is_open), _cut(text, cuts), is_cut) == whole

    run_cases(num_cases // 3, check, text=texts, cuts=_CUTS, is_cut=st.booleans(), is_open=st.booleans())
