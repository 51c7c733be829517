"""Reasoning between tags: told from the answer in one way however the text is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.parsers import ChatFormat
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse_parsers.think import ThinkParser

from .answers import FORMATS, TOOLS, told
from .templates import with_examples

Check = Callable[[AnswerParsing, str], dict[str, Any]]

THINK = ThinkParser().bind(ChatFormat("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"))
HERMES = FORMATS["hermes"]


def parsing(is_open: bool = False, calls: bool = False) -> AnswerParsing:
    tools = {"tool_format": HERMES, "tools": TOOLS} if calls else {}
    return AnswerParsing(reasoning=THINK, reasoning_is_open=is_open, **tools)


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize(
    ("is_open", "text", "said"),
    [
        (False, "<think>plan A</think>\n\nAnswer 7", ("plan A", "Answer 7")),
        (False, "\n<think>\n plan\n\nA \n</think>\n \n  Answer\n\n7", ("plan\n\nA", "  Answer\n\n7")),
        (True, "plan A</think>\n\nAnswer 7", ("plan A", "Answer 7")),
        (True, "\nplan < A </thin k </think>Answer", ("plan < A </thin k", "Answer")),
        (False, "<think>never closed", ("never closed", "")),
        (True, "never closed </thi", ("never closed", "")),
        (False, "<think>\n\n</think>\n\nAnswer", ("", "Answer")),
        (True, "</think>Answer", ("", "Answer")),
        (False, "</think>\n\nAnswer</think>", ("", "Answer</think>")),
        (False, "No <think>reasoning</think> here", ("", "No <think>reasoning</think> here")),
        (False, "\n\n Answer", ("", "\n\n Answer")),
        (False, "<thin", ("", "")),
        (False, "<", ("", "<")),
        (False, "<thanks>", ("", "<thanks>")),
        (False, "<think>a</think>b</think>c", ("a", "b</think>c")),
        (False, "", ("", "")),
    ],
)
def test_reasoning_and_answer(
    same_however_cut: Check, calls: bool, is_open: bool, text: str, said: tuple[str, str]
) -> None:
    """``said`` is the reasoning and the answer."""
    found = same_however_cut(parsing(is_open, calls), text)

    assert found == {"reasoning": said[0], "content": said[1], "calls": []}


def test_calls_behind_reasoning(same_however_cut: Check) -> None:
    text = '<think>\nI call <tool_call> now\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

    said = same_however_cut(parsing(calls=True), text)
    assert said == {"reasoning": "I call <tool_call> now", "content": "", "calls": [("now", "{}")]}


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", "\n", " ", "a", "<tool_call>", "🙂"])))
def test_anything_is_the_same_token_by_token_and_whole(tokens: list[str]) -> None:
    for is_open in (False, True):
        whole = told(parsing(is_open), ["".join(tokens)])
        assert told(parsing(is_open), tokens) == whole
        assert told(parsing(is_open), list("".join(tokens))) == whole


@pytest.mark.parametrize(
    ("template", "special_tokens", "pair", "score"),
    [
        ("{{ '<think>' }}{{ x.split('</think>') }}", (), ("<think>", "</think>"), 0.9),
        ("{{ c.split('[/THINK]') }}", ("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]"), 0.9),
        ("{{ messages }}", ("<think>", "</think>"), ("<think>", "</think>"), 0.5),
        ("{{ c.split('</reasoning>') }}", ("<think>", "</think>"), ("<reasoning>", "</reasoning>"), 0.9),
        ("{{ 'I think' }}", ("<s>",), None, 0.0),
    ],
)
def test_tags_come_from_the_template_or_the_vocabulary(template: str, special_tokens, pair, score: float) -> None:
    model = ChatFormat(template, dict.fromkeys(special_tokens, 1))

    assert ThinkParser().match(model) == score
    if pair is not None:
        bound = ThinkParser().bind(model)
        assert (bound.start, bound.end) == pair


@pytest.mark.parametrize(
    ("template", "enabled", "effort", "variables"),
    [
        ("{% if enable_thinking %}</think>{% endif %}", False, "high", {"enable_thinking": False}),
        ("{% if not thinking %}</think>{% endif %}", True, None, {"thinking": True}),
        ("{% if messages[0].thinking %}</think>{% endif %} thinking", True, None, {}),
        ("{{ '</think>' ~ reasoning_effort }}", None, "low", {"reasoning_effort": "low"}),
        ("{{ 'enable_thinking' ~ '</think>' }}", False, "low", {}),
        ("{% if enable_thinking %}</think>{% endif %}", None, None, {}),
    ],
)
def test_switches_are_variables_that_the_template_uses(template: str, enabled, effort, variables) -> None:
    bound = ThinkParser().bind(ChatFormat(template))

    assert bound.variables(enabled, effort) == variables
    assert bound.has_switch == any("thinking" in name for name in bound.switches)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("user: what is <think>?\nassistant:", False),
        ("", False),
    ],
)
def test_prompts_that_end_inside_reasoning(prompt: str, is_open: bool) -> None:
    assert THINK.is_open(prompt) == is_open


def test_tags_are_those_that_the_template_writes(same_however_cut: Check) -> None:
    """Also unknown ones, and those around the answer."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<|in|>thought<|x|>{{ m.reasoning_content }}"
        "<|out|>thought<|x|>{% endif %}<|say|>{{ m.content }}<|said|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    model = with_examples(template)
    reasoning = ThinkParser().bind(model)
    text = "<|in|>thought<|x|>Hm.<|out|>thought<|x|><|say|>Hi <b>there<|said|>"

    assert ThinkParser().match(model) == 0.9
    assert (reasoning.start, reasoning.end) == ("<|in|>thought<|x|>", "<|out|>thought<|x|>")
    assert same_however_cut(AnswerParsing(reasoning=reasoning), text) == {
        "content": "Hi <b>there",
        "reasoning": "Hm.",
        "calls": [],
    }
