"""Templates that read contents as lists of parts get them in that form; all others get texts."""

from __future__ import annotations

import pytest

from enginehouse.contract.errors import RenderError
from enginehouse.contract.types import DecodedAudio, DecodedImage, Message, Segment, ToolCall
from enginehouse.pipeline.prompt.chat_prompt import CHATML, GEMMA, ChatPrompt
from enginehouse.pipeline.prompt.content_parts import media_form, roles_with_parts
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


IMAGES_FIRST = (  # as LLaVA's
    "{% for m in messages %}{{ m.role | upper }}: {% for part in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>\n{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    "{% endfor %}<end>{% endfor %}"
)
WRAPPED = (  # as Qwen2-VL's
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' or 'image' in part %}<|start|><|pad|><|stop|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end>\n{% endfor %}"
)
BY_URL = (
    "{% for m in messages %}{% for p in m.content %}{{ '[IMG]' if p.type == 'image_url' else p.text }}"
    "{% endfor %}{% endfor %}"
)
NUMBERED = (
    "{% set n = namespace(i=0) %}{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}"
    "{% set n.i = n.i + 1 %}<image_{{ n.i }}>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "placeholder"),
    [
        (ITERATES, "<image>"),
        (IMAGES_FIRST, "<image>"),
        (WRAPPED, "<|start|><|pad|><|stop|>"),
        (BY_URL, "[IMG]"),
        (NUMBERED, None),
        (SELECTS, None),
        (EITHER, None),
        (CHATML, None),
        (GEMMA, None),
    ],
)
def test_the_text_that_a_template_writes_for_an_image_is_found(template: str, placeholder: str | None) -> None:
    form = media_form(compile_template(template), "image")

    assert (form.placeholder if form is not None else None) == placeholder


def _placed(template: str, *messages: Message) -> str:
    """The rendered prompt, with the digests of media in braces in place of them."""
    special = ("<|pad|>", "<end>")
    prompt = ChatPrompt(template=template, messages=messages, special_tokens=special, add_generation_prompt=False)
    segments = render(prompt, 1000)
    return "".join(one.text if one.media is None else f"{{{one.media.digest}}}" for one in segments)


def _image(width: int) -> DecodedImage:
    return DecodedImage(str(width), width, 1, b"", param=f"messages[0].content[{width}]")


def test_images_stand_where_the_template_writes_them() -> None:
    """In their order; equal text of a client stays text, also where two texts make it."""
    asked = Message(role="user", content="<im\nage> <image>", parts=("<im", _image(1), "age> <image>", _image(2)))

    assert _placed(ITERATES, asked) == "user: <im{1}age> <image>{2}<end>\n"
    assert _placed(IMAGES_FIRST, asked) == "USER: {1}\n{2}\n<image> <image><end>"
    assert _placed(WRAPPED, Message(role="user", content="", parts=(_image(1),))) == "[user]{1}<end>\n"


def test_text_added_to_a_content_stays_around_its_images() -> None:
    """As instructions are, for templates without a role for them."""
    no_system = ITERATES.replace("{% for m in messages %}", "{% for m in messages if m.role == 'user' %}", 1)
    asked = Message(role="user", content="What?", parts=(_image(1), "What?"))

    system = Message(role="system", content="Be brief.")
    assert _placed(no_system, system, asked) == "user: Be brief.\n\n{1}What?<end>\n"


@pytest.mark.parametrize(
    ("content", "texts", "expected"),
    [
        ("\n".join([" "] * 200), [" "] * 200, " " * 200),
        ("<a>\n" + "\n".join([" "] * 200) + "\n</a>", ["<a>\n", *[" "] * 200, "\n</a>"], f"<a>\n{' ' * 200}\n</a>"),
        ("Be\tbrief.\n\nx y  z ", ["x y", "z "], "Be\tbrief.\n\nx yz "),
        ("x x", ["x"], "x x"),
    ],
    ids=["spaces", "spaces in a result", "another separator", "twice"],
)
def test_texts_are_found_in_a_content_whatever_is_between_them(content: str, texts: list[str], expected: str) -> None:
    asked = Message(role="user", content=content, parts=(*texts, _image(1)))

    assert _placed(ITERATES, asked).replace("{1}", "") == f"user: {expected}<end>\n"


@pytest.mark.parametrize("content", ["xy", "x y", "z"])
def test_content_without_the_texts_of_its_parts_is_refused(content: str) -> None:
    with pytest.raises(RenderError, match=r"^m: a content with media cannot be rewritten for this model$"):
        _placed(ITERATES, Message(role="user", content=content, parts=("xy", " ", "z", _image(1)), param="m"))


def test_an_image_that_the_template_leaves_out_is_refused() -> None:
    only_first = WRAPPED.replace("'image' in part %}", "'image' in part %}{% if m.role == 'user' %}", 1).replace(
        "<|stop|>", "<|stop|>{% endif %}", 1
    )
    result = Message(role="tool", content="", parts=(_image(2),))
    with pytest.raises(
        RenderError, match=r"messages\[0\].content\[2\]: the chat template wrote 1 placeholders for 2 images"
    ):
        _placed(only_first, Message(role="user", content="", parts=(_image(1),)), result)


@pytest.mark.parametrize("template", [CHATML, GEMMA, ITERATES, EITHER], ids=["ChatML", "Gemma", "parts", "either"])
def test_recordings_are_between_the_texts_of_any_template(template: str) -> None:
    recordings = [DecodedAudio(name, 8000, b"", param=name) for name in ("first", "second")]
    asked = Message(role="user", content="a\nb", parts=("a", recordings[0], "b", recordings[1]))

    assert "a\n{first}\nb\n{second}" in _placed(template, asked)


def test_images_and_recordings_are_placed_by_their_kinds() -> None:
    sound = "{% if part['type'] == 'audio' %}<audio>{% endif %}"
    both = ITERATES.replace("{% endfor %}<end>", sound + "{% endfor %}<end>", 1)
    recording = DecodedAudio("sound", 8000, b"", param="sound")
    asked = Message(role="user", content="<audio>", parts=(recording, _image(1), "<audio>", recording))

    for template in (both, ITERATES):
        written = _placed(template, asked)
        assert written.index("{sound}") < written.index("{1}") < written.index("<audio>") < written.rindex("{sound}")
