"""What the prompt holds: tools, calls and results, in the template's own form or as text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from enginehouse.contract.parsers import ChatFormat
from enginehouse.contract.types import Message, ToolCall

from .answers import FORMATS, LAMP, NOW, PARSERS, SAY

TEMPLATES = {
    "hermes": '{% if tools %}{{ "<tool_call>\\n{\\"name\\": <name>}\\n</tool_call>" }}{% endif %}',
    "llama3": '<|start_header_id|>{% if tools %}{{ \'{"name": "f", "parameters": {}}\' }}{% endif %}',
    "mistral": "{{ '[AVAILABLE_TOOLS]' ~ tools }}[TOOL_CALLS]",
    "pythonic": "{% if tools %}[func_name1(params_name1=1)]{% endif %}",
}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        *((template, name) for name, template in TEMPLATES.items()),
        ("<|start_header_id|>{{ tools }}<|python_tag|>", "llama3"),
        ("{{ tools }}<|tool_call_start|>", "pythonic"),
        ("{{ messages }}", "default"),
        ("", "default"),
        ("never <tool_call> here", "default"),
        ("{{ tools }}<tool_call><function=f><parameter=a>", "qwen3-coder"),
        ("{{ tools }}<tool_call>name<arg_key>a</arg_key>", "glm"),
        ('{{ tools }}<tool_call>\n{"arguments": <args>, "name": <name>}', "hermes"),
        ("<|start_header_id|>{{ tools }}<|python_tag|><function=f>{}</function>", "functionary-v3.1"),
        ("{{ tools }} in a way of its own", "template"),
    ],
)
def test_the_surest_parser(template: str, name: str) -> None:
    best = max(PARSERS.values(), key=lambda parser: parser.match(ChatFormat(template)))

    assert best.name == name


def test_the_page_on_tools_lists_every_parser() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text(encoding="utf-8")

    assert [name for name in PARSERS if f"| `{name}` |" not in page] == []


def test_every_parser_gives_0_to_1() -> None:
    for parser in PARSERS.values():
        for template in ("", *TEMPLATES.values()):
            assert 0 <= parser.match(ChatFormat(template)) <= 1


def user(content: str) -> Message:
    return Message(role="user", content=content)


def calls(*named: tuple[str, str], content: str = "") -> Message:
    made = tuple(ToolCall(id=f"call_{n}", name=name, arguments=text) for n, (name, text) in enumerate(named))
    return Message(role="assistant", content=content, tool_calls=made)


def result(content: str, call_id: str | None = "call_0") -> Message:
    return Message(role="tool", content=content, tool_call_id=call_id)


def default(messages: list[Message], *tools) -> list[tuple[str, str]]:
    prepared = FORMATS["default"].prepare(tuple(messages), tools)
    assert prepared.tools == ()
    assert not any(message.tool_calls or message.role == "tool" for message in prepared.messages)
    return [(message.role, message.content) for message in prepared.messages]


def test_default_describes_tools_in_a_system_message() -> None:
    ((role, text), question) = default([user("Hi")], LAMP, SAY)

    assert role == "system" and question == ("user", "Hi")
    assert [json.loads(line) for line in text.splitlines() if line.startswith('{"type')] == [
        LAMP.definition,
        SAY.definition,
    ]
    assert "<tool_call>" in text and "</tool_call>" in text


@pytest.mark.parametrize("role", ["system", "developer"])
def test_default_joins_the_first_instructions(role: str) -> None:
    ((found, text), *_) = default([Message(role=role, content="Be brief."), user("Hi")], NOW)

    assert found == role
    assert text.startswith("Be brief.\n\n")


def test_default_writes_calls_and_results_as_text() -> None:
    turns = [user("Hi"), calls(("now", "{}"), ("say", '{"text": "é"}'), content="Wait."), result("5"), result("6")]

    assert default([*turns, user("So?")]) == [
        ("user", "Hi"),
        (
            "assistant",
            'Wait.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "say", "arguments": {"text": "é"}}\n</tool_call>',
        ),
        ("user", "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>\nSo?"),
    ]
    assert default(turns)[-1][0] == "user"
    assert [role for role, _ in default([*turns, Message(role="assistant", content="Done.")])] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]


def test_default_writes_damaged_arguments_as_they_are() -> None:
    assert '{"name": "now", "arguments": {oops}' in default([user("Hi"), calls(("now", "{oops"))])[1][1]
    assert '"arguments": {}' in default([user("Hi"), calls(("now", ""))])[1][1]


def test_native_formats_leave_the_chat_to_the_template() -> None:
    messages = (user("Hi"), calls(("now", "{}")), result("5"))
    for name in ("hermes", "pythonic", "llama3"):
        prepared = FORMATS[name].prepare(messages, (NOW,))
        assert (prepared.messages, prepared.tools) == (messages, (NOW,))


def test_llama_gets_one_call_per_message() -> None:
    turns = (
        user("Hi"),
        calls(("now", "{}"), ("say", "{}"), content="Wait."),
        result("5"),
        result("6", "call_1"),
        user("So?"),
    )
    prepared = FORMATS["llama3"].prepare(turns, ()).messages

    shown = [(m.role, m.content, [call.name for call in m.tool_calls]) for m in prepared]
    assert shown == [
        ("user", "Hi", []),
        ("assistant", "Wait.", ["now"]),
        ("tool", "5", []),
        ("assistant", "", ["say"]),
        ("tool", "6", []),
        ("user", "So?", []),
    ]


def test_mistral_gets_ids_of_nine_characters() -> None:
    turns = (calls(("now", "{}"), ("say", "{}")), result("5"), result("6", "abcdefgh9"), result("7", None))
    prepared = FORMATS["mistral"].prepare(turns, ()).messages

    ids = [call.id for call in prepared[0].tool_calls]
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids) and len(set(ids)) == 2
    assert prepared[1].tool_call_id == ids[0]
    assert prepared[2].tool_call_id == "abcdefgh9"
    assert len(prepared[3].tool_call_id or "") == 9
    answered = FORMATS["mistral"].prepare((*turns, user("So?")), ()).messages
    assert [message.role for message in answered][-3:] == ["tool", "assistant", "user"]


def test_sources_name_no_other_plugin() -> None:
    """The parsers know text only: no tokens, no wire formats."""
    folder = Path(__file__).parents[3] / "plugins" / "enginehouse_parsers"
    for path in folder.glob("*.py"):
        assert "enginehouse.api" not in path.read_text() and "enginehouse.engine" not in path.read_text()
