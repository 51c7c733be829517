"""Calls in every format: found in one way however the text is cut, streamed early, and text when damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.parsers import AnswerText, CallArguments, CallStarted
from enginehouse.pipeline.answer_parser import AnswerParsing

from .answers import DRAWN, FORMATS, TOOLS, cuts, told

Check = Callable[[AnswerParsing, str], dict[str, Any]]

TAGS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|python_start|>", "<|python_end|>")

ODD = (
    r"quotes \" braces } { ]} backslashes \\ \\\\ tags </tool_call> <tool_call> [TOOL_CALLS] 🧑🏽‍🚀 \ud83d\ude00 \n end"
)
"""The inside of a JSON string that a careless parser trips over."""

ONE = ("set_lamp", '{"on": true, "level": 3}')
LONG = ("say", f'{{"text": "{ODD}"}}')
EMPTY = ("now", "{}")


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


GOLDEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>\n{"name": "set_lamp", "arguments": {"on": true, "level": 3}}\n</tool_call>', "", [ONE]),
    ("hermes", f'<tool_call>{{"name": "say", "arguments": {LONG[1]}}}</tool_call>', "", [LONG]),
    ("hermes", '<tool_call>\n{"arguments": {"on": true, "level": 3}, "name": "set_lamp"}\n</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [EMPTY]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [EMPTY]),
    ("hermes", f'<tool_call>{{"name": "set_lamp", "arguments": {json.dumps(ONE[1])}}}</tool_call>', "", [ONE]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "set_lamp", "arguments": {"on": true, "level": 3}}\n</tool_call>\n',
        "Let me see.",
        [EMPTY, ONE],
    ),
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call> Done.', "Done.", [EMPTY, EMPTY]),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n{"name": "now"}\n</tool_call>', "", [EMPTY, EMPTY]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call>', "", [EMPTY]),  # a brace was forgotten
    ("hermes", '<tool_call>{"id": 7, "why": [1, {"a": null}], "name": "now"}</tool_call>', "", [EMPTY]),
    ("llama3", '{"name": "set_lamp", "parameters": {"on": true, "level": 3}}', "", [ONE]),
    ("llama3", '<|python_tag|>{"name": "set_lamp", "parameters": {"on": true, "level": 3}}', "", [ONE]),
    ("llama3", '\n {"type": "function", "name": "say", "parameters": ' + LONG[1] + "}", "", [LONG]),
    ("llama3", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "", [EMPTY, EMPTY]),
    ("llama3", 'I call. <|python_tag|>{"name": "now", "parameters": {}}', "I call.", [EMPTY]),
    ("mistral", '[TOOL_CALLS] [{"name": "set_lamp", "arguments": {"on": true, "level": 3}}]', "", [ONE]),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abc"}, {"name": "say", "arguments": '
     + LONG[1] + "}]", "", [EMPTY, LONG]),
    ("mistral-named", '[TOOL_CALLS]set_lamp[ARGS]{"on": true, "level": 3}', "", [ONE]),
    ("mistral-named", "Well.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]say[CALL_ID]a1[ARGS]" + LONG[1], "Well.", [EMPTY, LONG]),
    ("mistral-named", '[TOOL_CALLS]now {}', "", [EMPTY]),
    ("pythonic", "[set_lamp(on=True, level=3)]", "", [ONE]),
    ("pythonic", "<|python_start|>[set_lamp(on=true, level=3), now()]<|python_end|>", "", [ONE, EMPTY]),
    ("pythonic", "\n[ now( ) ,\nset_lamp( on = True,level=3 , ) ]", "", [EMPTY, ONE]),
    ("pythonic", f'[say(text="{ODD}")]', "", [("say", as_json({"text": json.loads(f'"{ODD}"')}))]),
    ("pythonic", "[say(text='it\\'s, (a) \"test\"]')]", "", [("say", '{"text": "it\'s, (a) \\"test\\"]"}')]),
    ("pythonic", '[set_lamp(**{"on": true, "level": 3})]', "", [ONE]),
    ("pythonic", "[say(text={'a': (2, None), 'b': -1.5})]", "", [("say", '{"text": {"a": [2, null], "b": -1.5}}')]),
]  # fmt: skip


def parsing(name: str, max_calls: int | None = None) -> AnswerParsing:
    return AnswerParsing(tool_format=FORMATS[name], tools=TOOLS, max_calls=max_calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOLDEN)
def test_golden_corpus_however_it_is_cut(
    same_however_cut: Check, name: str, text: str, content: str, calls: Any
) -> None:
    said = same_however_cut(parsing(name), text)

    assert said == {"content": content, "reasoning": "", "calls": calls}
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in said["calls"])


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, _, _ in GOLDEN])
def test_no_piece_of_a_tag_is_ever_shown(name: str, text: str) -> None:
    """Neither as content nor, outside strings, as arguments."""
    for pieces in cuts(text):
        said = told(parsing(name), pieces)
        assert not any(tag in said["content"] for tag in TAGS)
        for _, arguments in said["calls"]:
            assert name == "pythonic" or "tool_call" not in arguments.replace(ODD, "")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "Paris.",
        "  indented\n\ncode  ",
        "a < b, a << b; if (x <to) [1, 2] {y}",
        "[1, 2, 3] is a list and [TO is not a tag",
        '{"city": "Paris"}',
        '{"a": {"b": [1]}} and more',
        "{not json}",
        "[link](https://example.org)",
        "<tool> is no tag </tool>",
        "",
        " ",
        "ends with <",
    ],
)
def test_text_without_calls_stays_as_it_is(same_however_cut: Check, name: str, text: str) -> None:
    assert same_however_cut(parsing(name), text) == {"content": text, "reasoning": "", "calls": []}


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("all\nHi", "Hi"),
        ("all", "all"),
        ("almost\n", "almost\n"),
        ("all\nHi>>>all\nthere", "Hithere"),
        ("all\nHi>>>", "Hi"),
        ("nowhere", "nowhere"),
    ],
)
def test_the_text_before_an_answer_is_not_part_of_it(same_however_cut: Check, text: str, content: str) -> None:
    """Functionary names the recipient of each message, also where that is everybody."""
    assert same_however_cut(parsing("functionary-v3.2"), text) == {"content": content, "reasoning": "", "calls": []}


DAMAGED = [
    ("hermes", "<tool_call>no json</tool_call>", "no json"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', '{"name": "unknown", "arguments": {}}'),
    ("hermes", '<tool_call>{"nam', '{"nam'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call> So', '{"name": 3, "arguments": {}} So'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', '{"name": "now", "arguments": [1]}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>', '{"name": "now", "arguments": "[1]"}'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '{"arguments": {}}'),
    ("hermes", "<tool_call></tool_call>", ""),
    ("hermes", '<tool_call>{**{"a": 1}}</tool_call>', '{**{"a": 1}}'),
    ("hermes", '{**{"name": "now"}}', '{**{"name": "now"}}'),
    ("hermes", "Hm </tool_call> yes <tool_call>", "Hm  yes"),
    ("hermes", "cut <tool_ca", "cut"),
    ("llama3", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}'),
    ("llama3", "<|python_tag|>print(1)", "print(1)"),
    ("mistral", "[TOOL_CALLS] no list", "no list"),
    ("mistral", '[TOOL_CALLS][{"name": "other"}]', '{"name": "other"}]'),
    ("mistral-named", "[TOOL_CALLS]other[ARGS]{}", "other{}"),
    ("pythonic", "[other(a=1)]", "[other(a=1)]"),
    ("pythonic", "[now", "[now"),
    ("pythonic", "[now]", "[now]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content"), DAMAGED)
def test_damaged_calls_are_text_without_tags(same_however_cut: Check, name: str, text: str, content: str) -> None:
    said = same_however_cut(parsing(name), text)

    assert said["calls"] == []
    assert said["content"].strip() == content


LONG_HEADS = [
    ("atem", "<atem:function_calls>" + '"' * 399 + "say</atem:function_calls>"),
    ("kimi-k2", "<|tool_call_begin|>" + "i" * 500 + "<|tool_call_begin|>functions.now:0"),
    ("mistral-named", "[TOOL_CALLS]now" + " " * 500 + "{}"),
    ("functionary-v3.2", ">>>now" + " " * 500 + "{}"),
    ("pythonic", "[now" + " " * 500 + "()]"),
]


@pytest.mark.parametrize(("name", "text"), LONG_HEADS)
def test_a_head_beyond_what_is_held_back_is_the_same_however_it_is_cut(
    same_however_cut: Check, name: str, text: str
) -> None:
    same_however_cut(parsing(name), text)


LATE = [
    ("hermes", '<tool_call>{"name": "say", "arguments": {"text": n}}</tool_call>Hm', [("say", '{"text": "n"}')], "Hm"),
    ("hermes", '<tool_call>{"name": "say", "arguments": {"text": "cut', [("say", '{"text": "cut"}')], ""),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}} rubbish</tool_call>', [EMPTY], ""),
    (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {\n\u2028"text":\xa0"a"}}</tool_call>',
        [("say", '{\n "text": "a"}')],
        "",
    ),
    ("llama3", '{"name": "say", "parameters": {"text": nope}}', [("say", '{"text": "nope"}')], ""),
    ("mistral-named", '[TOOL_CALLS]say[ARGS]{"text": nope}', [("say", '{"text": "nope"}')], ""),
    ("mistral-named", "[TOOL_CALLS]now[ARGS]", [EMPTY], ""),
    ("pythonic", "[say(text=nope)]", [("say", '{"text": "nope"}')], ""),
    ("pythonic", "[say('positional')]", [("say", '{"text": "positional"}')], ""),
    ("pythonic", "[say(text=1e999)]", [("say", '{"text": 1e999}')], ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls", "content"), LATE)
def test_what_is_malformed_later_is_read_as_it_is_meant(
    same_however_cut: Check, name: str, text: str, calls: Any, content: str
) -> None:
    """The call has left already; what is handed out is JSON in any case."""
    assert same_however_cut(parsing(name), text) == {"content": content, "reasoning": "", "calls": calls}


@pytest.mark.parametrize(("name", "text", "calls"), [(n, t, c) for n, t, _, c in GOLDEN if c == [LONG]])
def test_arguments_stream_in_several_pieces(name: str, text: str, calls: Any) -> None:
    parser = parsing(name).open()
    assert parser is not None
    parts = [part for start in range(0, len(text), 4) for part in parser.push(text[start : start + 4])]

    started = next(index for index, part in enumerate(parts) if isinstance(part, CallStarted))
    assert sum(isinstance(part, CallArguments) for part in parts[started:]) > len(LONG[1]) / 8


def test_plain_text_streams_with_every_piece() -> None:
    """Only what may be markup waits, and white space that a call might make needless."""
    for name in FORMATS:
        parser = parsing(name).open()
        assert parser is not None
        words = [f" word{number}" for number in range(20)]

        assert [[part.text for part in parser.push(word) if isinstance(part, AnswerText)] for word in words] == [
            [word] for word in words
        ], name


def test_further_calls_are_dropped_where_one_is_allowed(same_however_cut: Check) -> None:
    text = "".join(f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in ("now", "say", "now"))

    assert same_however_cut(parsing("hermes", max_calls=1), text)["calls"] == [EMPTY]


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral-named"])
def test_a_call_that_a_limit_cuts_before_it_starts_is_nothing(name: str) -> None:
    """It is not damaged: more tokens would have made it a call."""
    text = next(text for format_name, text, _, calls in GOLDEN if format_name == name and calls == [ONE])
    for end in range(1, text.index("{" if name == "mistral-named" else '"on') - 1):
        parser = parsing(name).open()
        assert parser is not None
        parts = [*parser.push(text[:end]), *parser.flush(is_cut=True)]

        assert [part for part in parts if isinstance(part, AnswerText) and len(part.text) > 4] == [], text[:end]


def test_without_tools_every_call_is_text(same_however_cut: Check) -> None:
    nothing = AnswerParsing(tool_format=FORMATS["hermes"], tools=())
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

    assert same_however_cut(nothing, text) == {
        "content": '{"name": "now", "arguments": {}}\n',
        "reasoning": "",
        "calls": [],
    }


MARKUP = st.sampled_from([
    *TAGS, "{", "}", "[", "]", "(", ")", '"', "'", ",", ":", ";", "=", "\\", "\n", " ", "**", "1", "true", "None", "x",
    '{"name": "now"', '"arguments": {', '"name": "say"', '"text": ', "say(", "text=", "now()", "now[ARGS]{", "é", "🙂",
])  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
@given(tokens=st.lists(MARKUP, max_size=25))
def test_anything_is_the_same_token_by_token_and_whole(name: str, tokens: list[str]) -> None:
    whole = told(parsing(name), ["".join(tokens)])

    assert told(parsing(name), tokens) == whole
    assert told(parsing(name), list("".join(tokens))) == whole
    assert told(parsing(name), ["".join(tokens[start : start + 4]) for start in range(0, len(tokens), 4)]) == whole


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(max_size=5), VALUES, max_size=4), ascii_only=st.booleans())
def test_any_arguments_arrive_word_for_word(arguments: dict[str, Any], ascii_only: bool) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    texts = {
        "hermes": f'<tool_call>\n{{"name": "say", "arguments": {written}}}\n</tool_call>',
        "llama3": f'{{"name": "say", "parameters": {written}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "say", "arguments": {written}}}]',
        "mistral-named": f"[TOOL_CALLS]say[ARGS]{written}",
    }
    for name, text in texts.items():
        assert told(parsing(name), list(text))["calls"] == [("say", written)], name
    assert [json.loads(text) for _, text in told(parsing("pythonic"), [f"[say(**{written})]"])["calls"]] == [arguments]


DOTTED = {"set_lamp": "home.set-lamp", "say": "v1.0.say", "now": "now."}


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOLDEN)
def test_names_may_hold_dots(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """As those of MCP servers' tools do; whole and cut everywhere."""
    for plain, dotted in DOTTED.items():
        text = text.replace(f"{plain}(", f"{dotted}(").replace(f'"{plain}"', f'"{dotted}"')
        text = re.sub(rf"\b{plain}(\[(?:ARGS|CALL_ID)\]| ?{{)", rf"{dotted}\1", text)
    tools = tuple(evolve(tool, name=DOTTED[tool.name]) for tool in TOOLS)
    parsing = AnswerParsing(reasoning=None, reasoning_is_open=False, tool_format=FORMATS[name], tools=tools)
    for pieces in cuts(text):
        said = told(parsing, pieces)
        assert [(called, json.loads(arguments)) for called, arguments in said["calls"]] == [
            (DOTTED[called], json.loads(arguments)) for called, arguments in calls
        ]
