"""Tool turns in templates of real models, read from a package: the right parser is chosen, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from enginehouse.contract.errors import RenderError
from enginehouse.contract.parsers import ChatFormat, ToolParser
from enginehouse.contract.types import Message, Tool, ToolCall
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.templates import render
from enginehouse_parsers.llama import LlamaToolParser
from enginehouse_parsers.mistral import MistralToolParser
from enginehouse_parsers.pythonic import PythonicToolParser
from enginehouse_parsers.tagged_json import DefaultToolParser, HermesToolParser
from enginehouse_parsers.think import ThinkParser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PARSERS: tuple[ToolParser, ...] = (
    HermesToolParser(),
    LlamaToolParser(),
    MistralToolParser(),
    PythonicToolParser(),
    DefaultToolParser(),
)
CHOSEN = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "Qwen3-Coder": "default",
    "GLM-4.6": "default",
    "openai-gpt-oss-120b": "default",
    "google-gemma-2-2b-it": "default",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meetkai-functionary-medium-v3.1": "default",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "LFM2.5-8B-A1B": "pythonic",
}
# Templates for tool calls in ways of their own, which cannot be used without them.
UNUSABLE = {"CohereForAI-c4ai-command-r-plus-tool_use", "fireworks-ai-llama-3-firefunction-v2"}
OPEN = {"llama-cpp-deepseek-r1": True, "Qwen3.5-4B": True, "Qwen-Qwen3-0.6B": False, "deepseek-ai-DeepSeek-V3.1": False}

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "a town"}}, "required": ["city"]}


def tool(name: str) -> Tool:
    function = {"name": name, "description": f"Get {name}", "parameters": SCHEMA}
    return Tool(name=name, parameters=SCHEMA, definition={"type": "function", "function": function})


def call(number: int, name: str, city: str) -> ToolCall:
    return ToolCall(id=f"call_abcdef012345678{number}", name=name, arguments=f'{{"city":"{city}"}}')


def result(number: int, name: str, content: str) -> Message:
    return Message(role="tool", content=content, name=name, tool_call_id=f"call_abcdef012345678{number}")


TURNS = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="Rain?"),
    Message(role="assistant", content="", tool_calls=(call(1, "weather", "Rome"), call(2, "news", "Oslo"))),
    result(1, "weather", "sunny123"),
    result(2, "news", "quiet456"),
)
SHOWN = ("Rome", "Oslo", "sunny123", "quiet456", "Get weather", "Get news")


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """About 70 templates that llama.cpp tests with; read from llama-cpp-python's source archive."""
    folder = tmp_path_factory.mktemp("download")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*command, "--dest", str(folder), "llama-cpp-python"], capture_output=True, timeout=600, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        pytest.skip("the source archive of llama-cpp-python could not be downloaded")
    found = {}
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".jinja" and "templates" in path.parts and (file := archive.extractfile(member)):
                found[path.stem] = file.read().decode()
    assert len(found) >= 40
    return found


def text_of(template: str, turns: tuple[Message, ...]) -> str:
    model = ChatFormat(template)
    best = max(PARSERS, key=lambda parser: parser.match(model)).bind(model)
    prepared = best.prepare(turns, (tool("weather"), tool("news")))
    extra = {"tools": [one.definition for one in prepared.tools]} if prepared.tools else {}
    prompt = ChatPrompt(template=template, messages=prepared.messages, bos_token="<s>", eos_token="</s>", extra=extra)
    return "".join(segment.text for segment in render(prompt, 1_000_000))


def test_the_right_parser_is_chosen(templates: dict[str, str]) -> None:
    for name in CHOSEN.keys() & templates.keys():
        best = max(PARSERS, key=lambda parser: parser.match(ChatFormat(templates[name])))
        assert best.name == CHOSEN[name], name


@pytest.mark.parametrize("more", [(), (Message(role="user", content="And now?"),)])
def test_tools_calls_and_results_are_in_every_prompt(templates: dict[str, str], more: tuple[Message, ...]) -> None:
    for name in templates.keys() - UNUSABLE:
        text = text_of(templates[name], TURNS + more)
        assert [part for part in (*SHOWN, *(message.content for message in more)) if part not in text] == [], name


def test_templates_that_need_more_are_refused(templates: dict[str, str]) -> None:
    for name in UNUSABLE & templates.keys():
        with pytest.raises(RenderError):
            text_of(templates[name], TURNS)


def test_prompts_that_open_reasoning_are_noticed(templates: dict[str, str]) -> None:
    for name in OPEN.keys() & templates.keys():
        model = ChatFormat(templates[name])
        assert ThinkParser().match(model) == 0.9
        assert ThinkParser().bind(model).is_open(text_of(templates[name], TURNS)) == OPEN[name], name
