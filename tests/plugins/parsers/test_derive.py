"""Formats derived from templates: read at every split, enforced in the same form, and shown in prompts."""

from __future__ import annotations

import json

import pytest

from enginehouse.contract.composition import read_composition
from enginehouse.contract.parsers import EXAMPLE_TOOLS, EXAMPLES, PreparedChat
from enginehouse.contract.types import Message, ToolCall
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse_testkit.contract.parser_driver import TOOLS, said_by, texts_of

from .answers import PARSERS, cuts, told
from .templates import TEMPLATES, with_examples, written_calls


@pytest.mark.parametrize("kind", TEMPLATES)
def test_what_a_template_writes_is_read_and_enforced(kind: str) -> None:
    name, template = TEMPLATES[kind]
    model = with_examples(template)
    best = max(PARSERS.values(), key=lambda parser: parser.match(model))
    tool_format = best.bind(model)

    assert best.name == name, tool_format.explanation
    assert "derived" in " ".join(tool_format.explanation)
    for example in ("call", "two calls", "values", "no arguments"):
        expected = [(call.name, json.loads(call.arguments)) for call in EXAMPLES[example].messages[1].tool_calls]
        text = written_calls(model, example, tool_format)
        if tool_format.syntax.is_single and len(expected) > 1:
            continue
        for pieces in cuts(text):
            said = told(AnswerParsing(tool_format=tool_format, tools=EXAMPLE_TOOLS), pieces)
            assert [(called, json.loads(arguments)) for called, arguments in said["calls"]] == expected, pieces
    enforced = texts_of(read_composition(tool_format.constraint(TOOLS, parallel=True).text))
    for text in enforced:
        assert said_by(tool_format.open(TOOLS), [text]).calls, text


def test_the_derived_text_is_the_template_s_own() -> None:
    """Enforced calls have the white space and the separators that the template writes."""
    model = with_examples(TEMPLATES["tags with line breaks"][1])
    syntax = PARSERS["qwen3-coder"].bind(model).syntax

    call = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert syntax.summary == call


def test_words_for_types_may_begin_or_end_alike() -> None:
    """As "true" and "false" do, which DeepSeek's templates write for texts and for other values."""
    template = TEMPLATES["tags with types"][1].replace("'yes'", "'true'").replace("'no'", "'false'")
    best = max(PARSERS.values(), key=lambda parser: parser.match(with_examples(template)))

    assert best.bind(with_examples(template)).syntax.type_words == (("string", "true"), ("", "false"))


def test_texts_for_arguments_of_other_types_are_read_where_the_template_writes_texts_only() -> None:
    """Also as members of an object; an argument that may be a text stays one."""
    name, template = TEMPLATES["keyword arguments as texts"]
    parsing = AnswerParsing(tool_format=PARSERS[name].bind(with_examples(template)), tools=EXAMPLE_TOOLS)
    expected = {"key_a": "2", "key_b": 2, "key_d": ["x"], "key_e": {"y": None}, "key_c": "maybe", "other": "3"}
    members = {"key_a": "2", "key_b": "2", "key_d": "['x']", "key_e": {"y": None}, "key_c": "maybe", "other": "3"}

    listed = ", ".join(f"{key}={value!r}" for key, value in members.items())
    for text in (f"[wozu_alpha({listed})]", f"[wozu_alpha(**{members})]", f"[wozu_alpha(**{json.dumps(members)})]"):
        for pieces in cuts(text):
            ((called, arguments),) = told(parsing, pieces)["calls"]
            assert (called, json.loads(arguments)) == ("wozu_alpha", expected), pieces


def test_tools_that_a_template_shows_after_a_system_message_only() -> None:
    """A chat with tools gets an empty one; the template gets the tools."""
    start = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{{ tools | tojson }}{% endif %}"
    model = with_examples(start + TEMPLATES["a name and an object"][1].partition("{% endif %}")[2])
    best = max(PARSERS.values(), key=lambda parser: parser.match(model))
    tool_format = best.bind(model)
    question, system = Message(role="user", content="Hi"), Message(role="system", content="Be brief.")

    assert best.name == "mistral-named"
    assert tool_format.prepare((question,), TOOLS) == PreparedChat(
        (Message(role="system", content=""), question), TOOLS
    )
    for messages, tools in (((system, question), TOOLS), ((question,), ())):
        assert tool_format.prepare(messages, tools) == PreparedChat(messages, tools)


def test_a_template_that_refuses_a_question_after_a_result_gets_an_answer_between_them() -> None:
    refusal = (
        "{% for m in messages %}{% if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'tool' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    for start, between in ((refusal, ["assistant"]), ("", [])):
        model = with_examples(start + TEMPLATES["a name and an object"][1])
        best = max(PARSERS.values(), key=lambda parser, model=model: parser.match(model))
        call = ToolCall(id="abcdef012", name="now", arguments="{}")
        calling = Message(role="assistant", content="", tool_calls=(call,))
        result = Message(role="tool", content="5", tool_call_id="abcdef012")
        chat = (Message(role="user", content="Hi"), calling, result, Message(role="user", content="And now?"))

        roles = [message.role for message in best.bind(model).prepare(chat, TOOLS).messages]
        assert roles == ["user", "assistant", "tool", *between, "user"]


def test_templates_that_take_tools_get_them() -> None:
    """Also where nothing says how calls are written; what such a template does not show is written as text."""
    model = with_examples(
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    best = max(PARSERS.values(), key=lambda parser: parser.match(model))
    call = ToolCall(id="a", name="now", arguments="{}")
    chat = (Message(role="user", content="Hi"), Message(role="assistant", content="", tool_calls=(call,)))
    prepared = best.bind(model).prepare(chat, TOOLS)

    assert best.name == "template"
    assert prepared.tools == TOOLS
    assert '{"name": "now", "arguments": {}}' in prepared.messages[1].content


def test_marks_in_a_template_do_not_outweigh_what_it_writes() -> None:
    """It may explain one format and write another one; the difference is told."""
    name, template = TEMPLATES["a bare object"]
    model = with_examples("{# for Python: [func_name1(params_name1=1)] #}" + template)
    best = max(PARSERS.values(), key=lambda parser: parser.match(model))

    assert best.name == name
    assert any("warning" in line and "'pythonic'" in line for line in best.bind(model).explanation)


def test_calls_without_tools_are_written_in_the_template_s_form() -> None:
    """A template that shows calls, but no tools."""
    template = TEMPLATES["a name and an object"][1].replace("{{ tools | tojson }}", "")
    model = with_examples(template)
    best = max(PARSERS.values(), key=lambda parser: parser.match(model))
    prepared = best.bind(model).prepare((Message(role="user", content="Hi"),), TOOLS)

    assert best.name == "mistral-named"
    assert prepared.tools == ()
    assert "[TOOL_CALLS]<function name>[ARGS]{...}" in prepared.messages[0].content
