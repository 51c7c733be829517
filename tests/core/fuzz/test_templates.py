"""Chats of every kind through templates of every kind: segments, or an error that is ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from enginehouse.contract.errors import RenderError
from enginehouse.contract.types import Message, Segment, ToolCall
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.templates import render

from .cases import JSON, NASTY_TEXT, NUM_CASES, run_cases

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parents[1] / "pipeline" / "templates").glob("*.jinja"))
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "[INST]", "<s>", "</s>")
MAX_CHARS = 100_000

_TOOL_CALLS = st.lists(
    st.builds(ToolCall, id=NASTY_TEXT, name=NASTY_TEXT, arguments=st.one_of(NASTY_TEXT, st.just('{"a": 1}'))),
    max_size=2,
).map(tuple)
_MESSAGE = st.one_of(
    st.builds(
        Message, role=st.sampled_from(["system", "developer", "user"]), content=NASTY_TEXT, name=st.none() | NASTY_TEXT
    ),
    st.builds(
        Message, role=st.just("assistant"), content=NASTY_TEXT, reasoning=st.none() | NASTY_TEXT, tool_calls=_TOOL_CALLS
    ),
    st.builds(Message, role=st.just("tool"), content=NASTY_TEXT, tool_call_id=st.none() | NASTY_TEXT),
)
_MESSAGES = st.lists(_MESSAGE, max_size=5).map(tuple)
_EXTRA = st.dictionaries(
    st.sampled_from(["tools", "documents", "enable_thinking", "messages", "bos_token", "range", "loop", "self", "x"]),
    JSON,
    max_size=3,
)

_VALUES = st.sampled_from(
    [
        *(
            "messages",
            "messages[0].content",
            "message.role",
            "message.tool_calls",
            "tools",
            "x",
            "bos_token",
            "loop.index",
        ),
        *(
            "range(9)",
            "messages | length",
            "x.__class__",
            "''.__class__.__mro__",
            "self",
            "cycler",
            "namespace()",
            "lipsum",
        ),
        *(
            "messages | tojson",
            "message.content.split('</think>')",
            "strftime_now('%Y')",
            "raise_exception('no')",
            "x[0:2]",
        ),
        *(
            "1 // 0",
            "x + 1",
            "messages | map(attribute='content') | join",
            "'%s' * 9",
            "x | attr('y')",
            "2 ** 9",
            "'a' ~ x",
        ),
        *(
            "x | batch(0)",
            "dict(a=1)",
        ),
    ]
)


def _block(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(_VALUES, inner).map(lambda two: "{% if " + two[0] + " %}" + two[1] + "{% endif %}"),
        st.tuples(_VALUES, inner).map(lambda two: "{% for message in " + two[0] + " %}" + two[1] + "{% endfor %}"),
        st.tuples(_VALUES, inner).map(lambda two: "{% set x = " + two[0] + " %}" + two[1]),
        st.tuples(inner, inner).map(
            lambda two: "{%- macro m(a) -%}" + two[0] + "{%- endmacro -%}" + two[1] + "{{ m(1) }}"
        ),
        st.lists(inner, max_size=3).map("".join),
    )


_TEMPLATE = st.recursive(
    st.one_of(
        _VALUES.map(lambda value: "{{ " + value + " }}"),
        NASTY_TEXT,
        st.sampled_from(["{%", "}}", "{% break %}", "{% include 'x' %}", "{% import 'os' as o %}", "{# ", "{% raw %}"]),
        st.sampled_from(["<|im_start|>{{ messages[0].role }}\n", "{% generation %}a{% endgeneration %}"]),
    ),
    _block,
    max_leaves=6,
)


def _check(template: str, messages: tuple[Message, ...], extra: dict) -> None:
    prompt = ChatPrompt(
        template=template, messages=messages, bos_token="<s>", eos_token="</s>", special_tokens=SPECIAL, extra=extra
    )
    try:
        segments = render(prompt, MAX_CHARS)
    except RenderError as error:
        assert error.message
        return
    assert all(isinstance(segment, Segment) and segment.text for segment in segments)
    assert sum(len(segment.text) for segment in segments) <= MAX_CHARS


@pytest.mark.parametrize("name", TEMPLATES)
def test_written_templates(name: str) -> None:
    run_cases(
        500 // len(TEMPLATES), lambda **values: _check(TEMPLATES[name], **values), messages=_MESSAGES, extra=_EXTRA
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TEMPLATES)
def test_written_templates_for_long(name: str) -> None:
    run_cases(
        10_000 // len(TEMPLATES), lambda **values: _check(TEMPLATES[name], **values), messages=_MESSAGES, extra=_EXTRA
    )


@NUM_CASES
def test_random_templates(num_cases: int) -> None:
    """Without bombs of time and memory: those are for the rendering processes, see test_renderer."""
    run_cases(num_cases, _check, template=_TEMPLATE, messages=_MESSAGES, extra=_EXTRA)


@NUM_CASES
def test_users_never_write_control_tokens(num_cases: int) -> None:
    """What users write changes nothing about the control tokens of a prompt."""

    def trusted(template: str, content: str) -> list[str]:
        messages = (Message(role="user", content=content),)
        prompt = ChatPrompt(
            template=template, messages=messages, bos_token="<s>", eos_token="</s>", special_tokens=SPECIAL
        )
        text = "\0".join(segment.text for segment in render(prompt, MAX_CHARS) if segment.trusted)
        return sorted(token for token in SPECIAL for _ in range(text.count(token)))

    def check(name: str, content: str, tokens: list[str]) -> None:
        written = content.join(["", *tokens, ""])
        assert trusted(TEMPLATES[name], f"a{written}b") == trusted(TEMPLATES[name], "ab")

    run_cases(
        num_cases,
        check,
        name=st.sampled_from(sorted(TEMPLATES)),
        content=NASTY_TEXT,
        tokens=st.lists(st.sampled_from(SPECIAL), max_size=3),
    )
