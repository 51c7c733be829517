"""Tool turns in templates of real models, read from a package: the right parser is chosen, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from enginehouse.contract.composition import read_composition
from enginehouse.contract.errors import RenderError
from enginehouse.contract.parsers import EXAMPLE_TOOLS, EXAMPLES, ChatFormat, ToolFormat
from enginehouse.contract.types import Message, Tool, ToolCall
from enginehouse.pipeline.answer_parser import AnswerParsing
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.templates import render
from enginehouse_parsers.think import ThinkParser
from enginehouse_testkit.contract.parser_driver import TOOLS, said_by, texts_of

from .answers import PARSERS, cuts, told
from .templates import with_examples, written_calls

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEFAULT = {
    "HuggingFaceTB-SmolLM3-3B",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
"""Templates that know neither tools nor calls (the third one knows them by other names)."""
CHOSEN = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-3.3-2B-Instruct": "granite3",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5-4B": "qwen3-coder",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3-coder",
    "ByteDance-Seed-OSS": "seed-oss",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "deepseek-ai-DeepSeek-V3.1": "deepseek-v3.1",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-dsml",
    "deepseek-ai-DeepSeek-V4": "deepseek-dsml",
    "moonshotai-Kimi-K2": "kimi-k2",
    "Kimi-K2-Instruct": "kimi-k2",
    "Kimi-K3": "kimi-k3",
    "MiniMax-M2": "minimax-m2",
    "MiniMax-M3": "minimax-m3",
    "muse-glimmer": "atem",
    "openai-gpt-oss-120b": "harmony",
    "google-gemma-4-31B-it": "gemma",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command-r",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meetkai-functionary-medium-v3.1": "functionary-v3.1",
    "meetkai-functionary-medium-v3.2": "functionary-v3.2",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral-named",
    "LFM2-8B-A1B": "pythonic",
    "LFM2.5-8B-A1B": "pythonic",
    "vllm_functiongemma": "gemma",
    "vllm_glm4": "glm",
    "vllm_llama4_pythonic": "pythonic",
    "vllm_xlam_qwen": "phi4",
}
LOSSY = {("vllm_gemma3_pythonic", "values")}
"""It writes nothing between several arguments of a call, so that they cannot be told from each other."""
UNUSABLE = {"fireworks-ai-llama-3-firefunction-v2"}
"""Its tools have another name, which it cannot do without."""
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
def templates(llama_cpp_templates: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """About 70 templates that llama.cpp tests with, and the 27 with tools that vLLM's source archive has."""
    found = dict(llama_cpp_templates)
    folder = tmp_path_factory.mktemp("vllm")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "vllm", "--no-clean"]
    subprocess.run(  # pip leaves the unpacked archive, whether or not the package can be built here
        [*command, "--no-build-isolation", "--dest", str(folder), "vllm"],
        env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, timeout=600, check=False,
    )  # fmt: skip
    for path in folder.rglob("examples/tool_chat_template_*.jinja"):
        found[path.stem.replace("tool_chat_template", "vllm")] = path.read_text(encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def formats(templates: dict[str, str]) -> dict[str, tuple[str, ToolFormat, ChatFormat]]:
    """The format of each template by its name, with the name of its parser and the template's texts."""
    chosen = {}
    for name, template in templates.items():
        model = with_examples(template)
        best = max(PARSERS.values(), key=lambda parser, model=model: parser.match(model))
        chosen[name] = (best.name, best.bind(model), model)
    return chosen


def text_of(template: str, tool_format: ToolFormat, turns: tuple[Message, ...]) -> str:
    prepared = tool_format.prepare(turns, (tool("weather"), tool("news")))
    extra = {"tools": [one.definition for one in prepared.tools]} if prepared.tools else {}
    prompt = ChatPrompt(template=template, messages=prepared.messages, bos_token="<s>", eos_token="</s>", extra=extra)
    return "".join(segment.text for segment in render(prompt, 1_000_000))


def test_every_template_that_knows_tools_has_a_format(formats: dict[str, tuple[str, ToolFormat, ChatFormat]]) -> None:
    assert {name for name, (parser, _, _) in formats.items() if parser == "default"} == DEFAULT & formats.keys()
    assert {name: formats[name][0] for name in CHOSEN.keys() & formats.keys()} == {
        name: CHOSEN[name] for name in CHOSEN.keys() & formats.keys()
    }


def test_templates_whose_calls_are_not_derived_say_why(formats: dict[str, tuple[str, ToolFormat, ChatFormat]]) -> None:
    """Some do not write calls, others in ways that only a named format describes."""
    for name, (parser, tool_format, _) in formats.items():
        told_why = any(line.startswith(("derived", "no format was derived: ")) for line in tool_format.explanation)
        assert told_why or parser in ("default", "harmony"), name


def test_calls_that_a_template_writes_are_read_at_every_split(
    formats: dict[str, tuple[str, ToolFormat, ChatFormat]],
) -> None:
    num_read = 0
    for name, (parser, tool_format, model) in formats.items():
        for example in ("call", "two calls", "values", "no arguments"):
            text = written_calls(model, example, tool_format)
            if not text or parser == "default":
                continue
            if (name, example) in LOSSY:
                assert any(line.startswith("warning: what it writes for") for line in tool_format.explanation), name
                continue
            expected = [(call.name, json.loads(call.arguments)) for call in EXAMPLES[example].messages[1].tool_calls]
            expected = expected[:1] if tool_format.syntax.is_single else expected
            parsing = AnswerParsing(tool_format=tool_format, tools=EXAMPLE_TOOLS)
            for pieces in cuts(text):
                said = told(parsing, pieces)
                assert [(called, json.loads(arguments)) for called, arguments in said["calls"]] == expected, (
                    name,
                    pieces,
                )
            num_read += 1
    assert num_read > 150


def test_enforced_calls_are_in_the_form_of_the_template(
    formats: dict[str, tuple[str, ToolFormat, ChatFormat]],
) -> None:
    """They are read, and begin and end like the call that it writes where a format was derived."""
    for name, (parser, tool_format, model) in formats.items():
        for text in texts_of(read_composition(tool_format.constraint(TOOLS, parallel=False).text)):
            assert said_by(tool_format.open(TOOLS), [text]).calls, (name, text)
        syntax = tool_format.syntax
        written = written_calls(model, "call", tool_format)
        if not written or "derived from" not in "".join(tool_format.explanation):
            continue
        for text in (syntax.section_start, syntax.section_end):
            assert text.strip() in written, (name, parser, text)


@pytest.mark.parametrize("more", [(), (Message(role="user", content="And now?"),)])
def test_tools_calls_and_results_are_in_every_prompt(
    formats: dict[str, tuple[str, ToolFormat, ChatFormat]], more: tuple[Message, ...]
) -> None:
    for name in formats.keys() - UNUSABLE:
        text = text_of(formats[name][2].template, formats[name][1], TURNS + more)
        assert [part for part in (*SHOWN, *(message.content for message in more)) if part not in text] == [], name


def test_templates_that_need_more_are_refused(formats: dict[str, tuple[str, ToolFormat, ChatFormat]]) -> None:
    for name in UNUSABLE & formats.keys():
        with pytest.raises(RenderError):
            text_of(formats[name][2].template, formats[name][1], TURNS)


def test_prompts_that_open_reasoning_are_noticed(
    templates: dict[str, str], formats: dict[str, tuple[str, ToolFormat, ChatFormat]]
) -> None:
    for name in OPEN.keys() & templates.keys():
        model = ChatFormat(templates[name])
        assert ThinkParser().match(model) == 0.9
        assert ThinkParser().bind(model).is_open(text_of(templates[name], formats[name][1], TURNS)) == OPEN[name], name
