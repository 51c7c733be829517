"""A template that fails says where, at which message, and what it needed; lists that it has made it may change."""

from __future__ import annotations

from typing import Any

import pytest

from enginehouse.contract.errors import RenderError
from enginehouse.contract.types import Message, ToolCall
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.templates import check, render

USER = Message(role="user", content="Hi")
CALLING = Message(
    role="assistant", content="", tool_calls=(ToolCall(id="call_1", name="look", arguments='{"at": "sea"}'),)
)
TURNS = (USER, Message(role="assistant", content="Ho"), USER, USER)
ALTERNATE = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}{% endfor %}"
)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}
PARAMETERS = (
    "{% macro show(name, spec) %}\n{{ name + ': ' + spec.description }}\n{% endmacro %}"
    "{% for tool in tools %}{% for name, spec in tool.function.parameters.properties.items() %}"
    "{{ show(name, spec) }}{% endfor %}{% endfor %}"
)


def failure(template: str, messages: tuple[Message, ...] = (USER,), **extra: Any) -> tuple[str | None, str]:
    """The ``param`` and the message of the error."""
    with pytest.raises(RenderError) as caught:
        render(ChatPrompt(template=template, messages=messages, extra=extra, special_tokens=("<|x|>",)), 10_000)
    return caught.value.param, caught.value.message


def text_of(template: str, messages: tuple[Message, ...] = (USER,), **extra: Any) -> str:
    segments = render(ChatPrompt(template=template, messages=messages, extra=extra), 10_000)
    return "".join(segment.text for segment in segments)


@pytest.mark.parametrize(
    ("template", "messages", "extra", "param", "message"),
    [
        (
            ALTERNATE,
            TURNS,
            {},
            "messages[3]",
            "messages[3]: the chat template refused this message (role 'user' after 'user'; line 1): "
            "Roles must alternate.",
        ),
        (
            ALTERNATE,
            TURNS[1:],
            {},
            "messages[0]",
            "messages[0]: the chat template refused this message (role 'assistant' first; line 1): "
            "Roles must alternate.",
        ),
        (
            "a\nb{{ raise_exception('No ' ~ messages[0].content) }}",
            (USER,),
            {},
            "messages",
            "The chat template refused the messages (line 2): No Hi",
        ),
        (
            "\n{%- for tool   in\n tools %}{{ tool }}{% endfor %}",
            (USER,),
            {},
            "tools",
            "tools: the chat template needs tools, and this request offers none (line 2, {%- for tool in tools %})",
        ),
        (
            "{{ tools | length }}",
            (USER,),
            {},
            "tools",
            "tools: the chat template needs tools, and this request offers none (line 1, {{ tools | length }})",
        ),
        (
            "{{ tools[0].name }}",
            (USER,),
            {},
            "tools",
            "tools: the chat template needs tools, and this request offers none (line 1, {{ tools[0].name }})",
        ),
        (
            "{% for doc in documents %}{% endfor %}",
            (USER,),
            {},
            "chat_template_kwargs.documents",
            "chat_template_kwargs.documents: the chat template needs this value, which is missing "
            "(line 1, {% for doc in documents %})",
        ),
        (
            "Hi\n{{ 'Functions: ' + functions }}",
            (USER,),
            {},
            "chat_template_kwargs",
            "The chat template needs the variable 'functions' (line 2, {{ 'Functions: ' + functions }}); "
            "define it in chat_template_kwargs.",
        ),
        (
            "{% for m in messages %}{{ '[' + m.name + ']' }}{% endfor %}",
            (USER,),
            {},
            "messages[0].name",
            "messages[0].name: the chat template needs this value, which is missing (line 1, {{ '[' + m.name + ']' }})",
        ),
        (
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'in ' + c.function.arguments.near }}"
            "{% endfor %}{% endfor %}",
            (USER, CALLING),
            {},
            "messages[1].tool_calls[0].function.arguments.near",
            "messages[1].tool_calls[0].function.arguments.near: the chat template needs this value, which is missing "
            "(line 1, {{ 'in ' + c.function.arguments.near }})",
        ),
        (
            PARAMETERS,
            (USER,),
            {"tools": [LOOK]},
            "tools[0].function.parameters.properties.at.description",
            "tools[0].function.parameters.properties.at.description: the chat template needs this value, which is "
            "missing (line 2, {{ name + ': ' + spec.description }})",
        ),
        (
            "{% for m in messages %}{{ 1 + m.content }}{% endfor %}",
            TURNS,
            {},
            "messages[0]",
            "messages[0]: the chat template failed at this message (line 1, {{ 1 + m.content }}): "
            "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
        ),
        (
            "{% set n = namespace(v=0) %}{{ 1 / n.v }}",
            (USER,),
            {},
            "messages",
            "The chat template failed (line 1, {{ 1 / n.v }}): ZeroDivisionError: division by zero",
        ),
        (
            "{% for m in messages %}{{ m.content.items() }}{% endfor %}",
            (USER,),
            {},
            "messages[0]",
            "messages[0]: the chat template failed at this message (line 1, {{ m.content.items() }}): "
            "'str object' has no attribute 'items'",
        ),
        (
            "{% if messages %}{{ messages | nope }}{% endif %}",
            (USER,),
            {},
            "messages",
            "The chat template failed (line 1, {{ messages | nope }}): No filter named 'nope' found.",
        ),
        (
            "{{ strftime_now(5) }}",
            (USER,),
            {},
            "messages",
            "The chat template failed (line 1, {{ strftime_now(5) }}): "
            "TypeError: strftime() argument 1 must be str, not int",
        ),
        (
            "{{ messages.append(1) }}",
            (USER,),
            {},
            None,
            "The chat template tried something that is not allowed (line 1, {{ messages.append(1) }}): "
            "access to attribute 'append' of 'RequestList' object is unsafe.",
        ),
        (
            "{{ 9 ** (9 ** 9) }}",
            (USER,),
            {},
            None,
            "The chat template tried something that is not allowed (line 1, {{ 9 ** (9 ** 9) }}): "
            "a power of more than 4096 bits",
        ),
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            (USER,),
            {},
            None,
            "The chat template nests too deeply (line 1, {{ m() }}).",
        ),
    ],
)
def test_failures_name_place_message_and_need(
    template: str, messages: tuple[Message, ...], extra: dict[str, Any], param: str | None, message: str
) -> None:
    assert failure(template, messages, **extra) == (param, message)


def test_paths_are_those_of_the_request() -> None:
    """Messages may have been merged and split before they are rendered."""
    messages = (
        Message(role="user", content="Hi", param="input[4]"),
        Message(role="user", content="<|x|>", param="input[7]"),
    )

    param, message = failure(ALTERNATE.replace("Roles must alternate.'", "not ' ~ message.content"), messages)
    assert (param, message.rpartition(": ")[2]) == ("input[7]", "not <|x|>")


def test_long_tags_are_shortened() -> None:
    _, message = failure("{{ '" + "x" * 500 + "' + 1 }}")

    assert "(line 1, {{ '" + "x" * 96 + "...)" in message


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{{ x }}{% if x %}", "in line 2, {% if x %}: Unexpected end of template"),
        ("a\n\n{{ x | nofilter }}b", "in line 3, {{ x | nofilter }}: No filter named 'nofilter'"),
        ("a\n{% frobnicate %}", "in line 2, {% frobnicate %}: Encountered unknown tag 'frobnicate'"),
        ("a\n{%", "in line 2, {%: "),
        ("a\n{{ 'open }}", "in line 2: unexpected char"),
        ("a\n{{ (1 }}", "in line 2: unexpected '}'"),
    ],
)
def test_errors_of_compilation_show_their_tag(template: str, message: str) -> None:
    with pytest.raises(RenderError) as caught:
        check(template)

    assert caught.value.message.startswith(f"The chat template has a syntax error {message}")


def test_templates_of_very_many_tags_are_not_compiled() -> None:
    """They would take a minute."""
    with pytest.raises(RenderError, match="has 30000 tags; at most 20000"):
        check("{{ x }}" * 30_000)


def test_templates_change_lists_of_their_own_only() -> None:
    own = "{% set q = [1] %}{% set _ = q.append(2) %}{% set _ = q.extend([3]) %}{{ q.pop(0) }}{{ q | join }}"

    assert text_of(own) == "123"
    assert text_of("{{ 2 ** 10 }} {{ 2.0 ** 3 }} {{ 2 ** -1 }}") == "1024 8.0 0.5"
    for given in ("messages.append(1)", "tools.pop()", "tools[0].function.parameters.required.append('x')"):
        tool = {"function": {"parameters": {"required": ["a"]}}}
        assert "not allowed" in failure("{{ " + given + " }}", tools=[tool])[1]
    assert text_of("{% set q = messages[:1] %}{% set _ = q.append(1) %}{{ q | length }}") == "2"


def test_what_filters_give_is_encoded_as_a_list() -> None:
    assert text_of("{{ messages | map(attribute='content') | tojson }}") == '["Hi"]'
    assert text_of("{{ messages | selectattr('role', 'in', []) | tojson }}") == "[]"
    assert "undefined" in failure("{{ nothing | tojson }}")[1].lower()
