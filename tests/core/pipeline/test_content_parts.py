"""Templates that read contents as lists of parts get them in that form; all others get texts."""

from __future__ import annotations

import pytest

from enginehouse.contract.types import Message, Segment, ToolCall
from enginehouse.pipeline.prompt.chat_prompt import CHATML, GEMMA, ChatPrompt
from enginehouse.pipeline.prompt.content_parts import roles_with_parts
from enginehouse.pipeline.prompt.sandbox import compile_template
from enginehouse.pipeline.prompt.templates import render

ALL = frozenset({"user", "system", "assistant", "tool"})
ITERATES = (
    "{% for m in messages %}{{ m.role }}{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% if part['type'] == 'image' %}<image>{% endif %}{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FIRST = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}<end>{% endfor %}"
SELECTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text | trim }}{% endfor %}<end>{% endfor %}"
)
STRICT = "{% for m in messages %}[{{ m.role }}]{{ (m.content | first)['text'].strip() }}<end>{% endfor %}"
USERS_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}{% for part in m.content %}{{ part.text }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<end>{% endfor %}"
)
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{{ m.content[0].text }}{% endif %}<end>{% endfor %}"
)
LOUD = "{% for m in messages %}[{{ m.role }}]{{ m.content | upper }}<end>{% endfor %}"
NO_SYSTEM = "{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content[0].text }}<end>{% endif %}{% endfor %}"

CALL = ToolCall(id="a", name="f", arguments="{}")
CHAT = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="Rain<end>?"),
    Message(role="assistant", content="", tool_calls=(CALL,)),
    Message(role="tool", content="sunny", tool_call_id="a"),
    Message(role="user", content="And now?"),
)


def rendered(template: str, messages: tuple[Message, ...], **options: bool) -> tuple[Segment, ...]:
    return render(ChatPrompt(template=template, messages=messages, special_tokens=("<end>",), **options), 10_000)


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (ITERATES, ALL),
        (FIRST, ALL),
        (SELECTS, ALL),
        (STRICT, ALL),
        (USERS_ONLY, {"user"}),
        (NO_SYSTEM, {"user"}),
        (EITHER, frozenset()),
        (LOUD, frozenset()),
        (CHATML, frozenset()),
        (GEMMA, frozenset()),
        ("", frozenset()),
        ("{{ raise_exception('never') }}", frozenset()),
        ("{% for m in messages %}{{ m.content.strip() }}{% endfor %}", frozenset()),
    ],
)
def test_roles_whose_contents_are_parts_are_found(template: str, roles: frozenset[str]) -> None:
    assert roles_with_parts(compile_template(template)) == roles


@pytest.mark.parametrize("template", [ITERATES, FIRST, SELECTS, STRICT, USERS_ONLY, EITHER])
def test_the_text_of_every_message_is_in_the_prompt(template: str) -> None:
    segments = rendered(template, CHAT)

    assert [part for one in CHAT if (part := one.content) not in "".join(segment.text for segment in segments)] == []
    assert [segment.text for segment in segments if not segment.trusted] == ["<end>"]


@pytest.mark.parametrize("template", [ITERATES, FIRST, USERS_ONLY])
def test_an_answer_is_continued(template: str) -> None:
    """Its content is a part as well."""
    segments = rendered(template, (*CHAT[:2], Message(role="assistant", content="It")), add_generation_prompt=True)

    assert segments[-1].text.endswith("It")


def test_instructions_are_in_the_question_where_a_template_has_no_role_for_them() -> None:
    text = "".join(segment.text for segment in rendered(NO_SYSTEM, CHAT[:2]))

    assert text == "[user]Be brief.\n\nRain<end>?<end>"
