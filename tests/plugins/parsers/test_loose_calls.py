"""Loose ways in which models write calls, in every format: read as what they plainly mean, at every split."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from enginehouse.pipeline.answer_parser import AnswerParsing

from .answers import FORMATS, cuts, make_tool, told

Check = Callable[[AnswerParsing, str], dict[str, Any]]

RUN = make_tool("run", command={"type": "string"}, times={"type": "integer"}, quiet={"type": "boolean"})
LIST = make_tool("list_all")
TOOLS = (RUN, LIST)

OBJECTS: list[tuple[str, dict[str, Any]]] = [
    ('{"command": "a\nb"}', {"command": "a\nb"}),
    ('{"command": "a\tb"}', {"command": "a\tb"}),
    ('{"command": "a",}', {"command": "a"}),
    ('{"command": "a", "times": 2,\n}', {"command": "a", "times": 2}),
    ("{'command': 'a'}", {"command": "a"}),
    ("{'command': \"it's\"}", {"command": "it's"}),
    ("{'command': 'say \"x\"'}", {"command": 'say "x"'}),
    ('{command: "a"}', {"command": "a"}),
    ("{command: a}", {"command": "a"}),
    ('{"command": a b}', {"command": "a b"}),
    ('{"command": "a" "times": 2}', {"command": "a", "times": 2}),
    ('{"command": "a"\n "times": 2}', {"command": "a", "times": 2}),
    ('{"times": 2 "quiet": true}', {"times": 2, "quiet": True}),
    ('{"quiet": True}', {"quiet": True}),
    ('{"quiet": False, "command": None}', {"quiet": False, "command": None}),
    ('{"times": +2}', {"times": 2}),
    ('{"times": 2.}', {"times": 2.0}),
    ('{"times": .5}', {"times": 0.5}),
    ('{"times": 0x10}', {"times": 16}),
    ('{"times": 0x' + "f" * 5000 + "}", {"times": "0x" + "f" * 5000}),
    ('{"times": 1_000}', {"times": 1000}),
    ('{"times": NaN}', {"times": None}),
    ('{"command": "say "hi" there"}', {"command": 'say "hi" there'}),
    ('{"command": "C:\\dir"}', {"command": "C:\\dir"}),
    ('{"command": "it\\\'s"}', {"command": "it's"}),
    ('{"command": """a "b" c"""}', {"command": 'a "b" c'}),
    ('{"command": "a" /* x */, "times": 2}', {"command": "a", "times": 2}),
    ('{"command": "a", // x\n"times": 2}', {"command": "a", "times": 2}),
    ('{"command": "a", # x\n"times": 2}', {"command": "a", "times": 2}),
    ('{"command" = "a"}', {"command": "a"}),
    ('{"command": "a", "times": }', {"command": "a", "times": None}),
    ('{,"command": "a"}', {"command": "a"}),
    ('{"command": "a",, "times": 2}', {"command": "a", "times": 2}),
    ('{"command": ["a", "b",]}', {"command": ["a", "b"]}),
    ('{"command": ("a", "b")}', {"command": ["a", "b"]}),
    ('{"command": {"a": [1}}', {"command": {"a": [1]}}),
    ('{"command": "a"; "times": 2}', {"command": "a", "times": 2}),
    ("{}", {}),
    ("{ }", {}),
]
"""Arguments as an object, and their meaning. Where two are meant, the one without a line break is taken."""
OPEN_ENDED = [
    ('{"command": "a"', {"command": "a"}),
    ('{"command": "a', {"command": "a"}),
    ('{"times": 2', {"times": 2}),
]
"""Arguments whose end is missing."""

FRAMES = {
    "hermes": ('<tool_call>\n{"name": "run", "arguments": ', "}\n</tool_call>"),
    "llama3": ('{"name": "run", "parameters": ', "}"),
    "mistral": ('[TOOL_CALLS][{"name": "run", "arguments": ', "}]"),
    "mistral-named": ("[TOOL_CALLS]run[ARGS]", ""),
    "deepseek-v3.1": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),  # noqa: RUF001
    "kimi-k2": ("<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "command-r": ('<|START_ACTION|>[{"tool_name": "run", "parameters": ', "}]<|END_ACTION|>"),
    "functionary-v3.1": ("<function=run>", "</function>"),
    "harmony": ("<|channel|>commentary to=functions.run <|constrain|>json<|message|>", "<|call|>"),
    "pythonic": ("[run(**", ")]"),
    "qwen3-coder": ("<tool_call>\n<function=run>\n", "\n</function>\n</tool_call>"),
}
"""Text before and after an object of arguments."""


def frame(name: str) -> tuple[str, str]:
    """The same, for any format: as its syntax says."""
    if name in FRAMES:
        return FRAMES[name]
    syntax = FORMATS[name].syntax
    name_end = "(**" if syntax.kind == "keywords" else syntax.name_end
    after = f"{')' if syntax.kind == 'keywords' else ''}{syntax.call_end}{syntax.section_end}"
    before = f"{syntax.section_start}{syntax.call_start}run{name_end}"
    for placeholder, text in (("{id}", "abcdef012"), ("{index}", "0"), (" to={name}<|message|>", "")):
        before = before.replace(placeholder, text)
    return before, after


def calls_of(name: str, pieces: list[str]) -> list[tuple[str, Any]]:
    said = told(AnswerParsing(tool_format=FORMATS[name], tools=TOOLS), pieces)
    assert said["content"] == ""
    return [(called, json.loads(arguments)) for called, arguments in said["calls"]]


@pytest.mark.parametrize("name", FORMATS)
def test_loose_objects(name: str) -> None:
    before, after = frame(name)
    for text, meant in OBJECTS:
        whole = f"{before}{text}{after}"
        for pieces in ([whole], list(whole), [whole[:30], whole[30:]]):
            assert calls_of(name, pieces) == [("run", meant)], pieces


@pytest.mark.parametrize("name", FORMATS)
def test_objects_without_an_end(name: str) -> None:
    """The answer ends, or its end marker comes too early."""
    before, _ = frame(name)
    marker = next(iter(FORMATS[name].syntax.after_calls), "")
    for text, meant in OPEN_ENDED:
        for whole in {before + text, before + text + marker}:
            for pieces in ([whole], list(whole)):
                assert calls_of(name, pieces) == [("run", meant)], pieces


WRITTEN: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>{"name": "run", "arguments": {"command": "a"}}', [("run", {"command": "a"})]),
    ("hermes", '{"name": "run", "arguments": {"command": "a"}}', [("run", {"command": "a"})]),
    ("hermes", '```json\n{"name": "run", "arguments": {"times": 2}}\n```', [("run", {"times": 2})]),
    ("hermes", '<tool_call>\n```json\n{"name": "run", "arguments": {}}\n```\n</tool_call>', [("run", {})]),
    ("hermes", "<tool_call>{'name': 'run', 'arguments': {'quiet': True}}</tool_call>", [("run", {"quiet": True})]),
    ("hermes", '<tool_call>{name: run, arguments: {"times": 1}}</tool_call>', [("run", {"times": 1})]),
    ("hermes", '<tool_call>{"function": "run", "args": {"times": 1}}</tool_call>', [("run", {"times": 1})]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "run", "arguments": {"times": 1}}}</tool_call>',
     [("run", {"times": 1})]),
    ("hermes", '<tool_call>{"name": "run", "arguments": "{\\"times\\": 1}"}</tool_call>', [("run", {"times": 1})]),
    ("hermes", '<tool_call>{"run": {"times": 1}}</tool_call>', [("run", {"times": 1})]),
    ("hermes", '<tool_call>{"name": "functions.run", "arguments": {}}</tool_call>', [("run", {})]),
    ("hermes", '<tool_call>{"name": "run", "arguments": {}}}</tool_call>', [("run", {})]),
    ("hermes", '<tool_call><tool_call>{"name": "run", "arguments": {}}</tool_call></tool_call>', [("run", {})]),
    ("hermes", '<tool_call>{"name": "run", "arguments": ""}</tool_call>', [("run", {})]),
    ("hermes", '<tool_call>{"name": "run"}{"name": "list_all"}</tool_call>', [("run", {}), ("list_all", {})]),
    ("hermes", '<tool_call>{"name": "run", "arguments": {}},\n{"name": "list_all"}</tool_call>',
     [("run", {}), ("list_all", {})]),
    ("hermes", '<tool_call>{"name": "run", "arguments": {}}<tool_call>{"name": "list_all"}</tool_call>',
     [("run", {}), ("list_all", {})]),
    ("llama3", '[{"name": "run", "parameters": {}}, {"name": "list_all", "parameters": {}}]',
     [("run", {}), ("list_all", {})]),
    ("llama3", '<|python_tag|>{"name": "run", "parameters": {}}; {"name": "list_all", "parameters": {}}',
     [("run", {}), ("list_all", {})]),
    ("mistral", '[TOOL_CALLS]{"name": "run", "arguments": {}}', [("run", {})]),
    ("mistral-named", "[TOOL_CALLS]run{}", [("run", {})]),
    ("mistral-named", '[TOOL_CALLS][{"name": "run", "arguments": {"times": 1}}]', [("run", {"times": 1})]),
    ("pythonic", "[run(command='a\nb'), run(command='c')]", [("run", {"command": "a\nb"}), ("run", {"command": "c"})]),
    ("pythonic", "```python\n[run(command='a')]\n```", [("run", {"command": "a"})]),
    ("pythonic", "<|python_start|>run(command='a')<|python_end|>", [("run", {"command": "a"})]),
    ("pythonic", "[run('a', 2, True)]", [("run", {"command": "a", "times": 2, "quiet": True})]),
    ("pythonic", "[run(command='a', times=2", [("run", {"command": "a", "times": 2})]),
    ("pythonic", "[run(command='a'); list_all()]", [("run", {"command": "a"}), ("list_all", {})]),
    ("pythonic", "[list_all( )]", [("list_all", {})]),
    ("olmo3", "<function_calls>\nrun(command='a')\nlist_all()\n</function_calls>",
     [("run", {"command": "a"}), ("list_all", {})]),
    ("qwen3-coder", "<function=run>\n<parameter=command>\na\n</parameter>\n</function>", [("run", {"command": "a"})]),
    ("qwen3-coder", "<tool_call>\n<function=run>\n<parameter=command>\na\n</parameter>", [("run", {"command": "a"})]),
    ("qwen3-coder", "<tool_call>\n<function=run>\n<parameter=command>\na\nb", [("run", {"command": "a\nb"})]),
    ("qwen3-coder", "<tool_call><function=run><parameter=times>2</parameter></function></tool_call>",
     [("run", {"times": 2})]),
    ("qwen3-coder", "<tool_call>\n<function=run>\n<parameter=quiet>\nTrue\n</parameter>\n</function>\n</tool_call>",
     [("run", {"quiet": True})]),
    ("qwen3-coder", "<tool_call>\n<function=run>\n<parameter=times>\nmany\n</parameter>\n</function>\n</tool_call>",
     [("run", {"times": "many"})]),
    ("qwen3-coder", "<function=run>\n<parameter=command>\na\n<parameter=times>\n2\n</parameter>\n</function>",
     [("run", {"command": "a", "times": 2})]),
    ("qwen3-coder", "<tool_call>\n<function=list_all>\n</function>\n</tool_call>", [("list_all", {})]),
    ("glm", "<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>42</arg_value>\n</tool_call>",
     [("run", {"command": "42"})]),
    ("glm", "<tool_call>run<arg_key>times</arg_key><arg_value>42</arg_value></tool_call>", [("run", {"times": 42})]),
    ("glm", "<tool_call>list_all</tool_call>", [("list_all", {})]),
    ("gemma", '<|tool_call>call:run{command:<|"|>a "b"\n<|"|>,times:2}<tool_call|>',
     [("run", {"command": 'a "b"\n', "times": 2})]),
    ("gemma", '<|tool_call>call:run{"command": "a"}<tool_call|>', [("run", {"command": "a"})]),
    ("deepseek-v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n{"times": 1}<｜tool▁call▁end｜>',  # noqa: RUF001
     [("run", {"times": 1})]),
    ("functionary-v3.2", 'run\n{"times": 1}', [("run", {"times": 1})]),
    ("functionary-v3.2", 'run\n{"times": 1}>>>list_all\n{}', [("run", {"times": 1}), ("list_all", {})]),
    ("deepseek-v3.1", "<｜tool▁call▁begin｜>list_all<｜tool▁sep｜><｜tool▁call▁end｜>", [("list_all", {})]),  # noqa: RUF001
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "meant"), WRITTEN)
def test_loose_calls(name: str, text: str, meant: list[tuple[str, Any]]) -> None:
    for pieces in cuts(text):
        assert calls_of(name, pieces) == meant, pieces


def refused(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000, "NaN", "1e999"])
def test_values_without_bounds_are_no_failure(value: str) -> None:
    """In tags, nested in tags, as members of a call, and as its arguments; what comes out is JSON."""
    at = "]<]minimax[>["
    texts = [
        ("qwen3-coder", f"<tool_call>\n<function=run>\n<parameter=times>\n{value}\n</parameter>\n</function>"),
        ("minimax-m3", f'{at}<tool_call>{at}<invoke name="run">{at}<sizes>{at}<item>{value}{at}</item>{at}</sizes>'),
        ("hermes", f'<tool_call>{{"function": {{"name": "run", "arguments": {{"a": {value}}}}}}}</tool_call>'),
        ("hermes", f'<tool_call>{{"arguments": {value}, "name": "run"}}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": {value}}}</tool_call>'),
    ]
    tools = (*TOOLS, make_tool("run", sizes={"type": "array", "items": {"type": "number"}}))
    calls = [told(AnswerParsing(tool_format=FORMATS[name], tools=tools), [text])["calls"] for name, text in texts]
    assert [[name for name, _ in made] for made in calls[:2]] == [["run"], ["run"]]
    for _, arguments in (call for made in calls for call in made if "[[[" not in value):  # deeper than Python reads
        json.loads(arguments, parse_constant=refused, parse_int=str)
