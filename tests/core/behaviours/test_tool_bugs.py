"""Public faults of tool calls (``../shared/bugs.md``, B22 to B35), over HTTP with the templates of whole families."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

from .client import Server, pairs, streamed_calls

_TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls %}START{% for c in m.tool_calls %}"
    "{% set f = c.function %}CALL{% endfor %}END{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_TOOLS = "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
_KEYWORDS = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
    "{{ ', ' if not loop.last }}"
)
_OBJECT = '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'


def _template(call: str, start: str = "", end: str = "", before: str = _TOOLS) -> str:
    return before + _TURNS.replace("START", start).replace("CALL", call).replace("END", end)


# The texts of the prompt name other formats, as real templates do.
TEMPLATES = {
    "llama4": _template(_OBJECT, before=_TOOLS + "{# [func_name1(params_name1=params_value1)] #}"),
    "lfm2": _template(_KEYWORDS, "<|tool_call_start|>[", "]<|tool_call_end|>", "List of tools: [" + _TOOLS + "]"),
    "hermes": _template('<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'),
    "needs": _template("{{ f.name }}", before="{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"),
}
ANSWERS = {
    "llama4": '{"name": "run", "parameters": {"command": "ls"}}',
    "lfm2": '<|tool_call_start|>[run(command="ls")]<|tool_call_end|>',
    "raw": "[run(command='a\nb'), run(command='c')]",
    "raw json": '<tool_call>\n{"name": "run", "arguments": {"command": "a\nb"}}\n</tool_call>',
    "needs": "seen",
}
MODELS = {  # template, answer
    "llama4": ("llama4", "llama4"),
    "lfm2": ("lfm2", "lfm2"),
    "raw": ("lfm2", "raw"),
    "raw json": ("hermes", "raw json"),
    "needs": ("needs", "needs"),
}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
RUN = {"type": "function", "function": {"name": "run", "parameters": SCHEMA}}
LS = ("run", {"command": "ls"})


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("tool-bugs")
    models = {}
    for name, (template, answer) in MODELS.items():
        pieces = [ANSWERS[answer][start : start + 3] for start in range(0, len(ANSWERS[answer]), 3)]
        replies = {"[run]": pieces} if template == "needs" else None
        source = write_script(folder / f"{name}.json", ["?"] if replies else pieces, replies=replies)
        (folder / f"{name}.jinja").write_text(TEMPLATES[template], encoding="utf-8")
        models[name] = ModelSettings(source=source, backend="scripted", chat_template=str(folder / f"{name}.jinja"))
    with served(Settings(models=models, plugins=PluginsSettings(allow=("parsers",)))) as client:
        yield client


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        ("llama4", [LS]),  # B22
        ("lfm2", [LS]),
        ("raw", [("run", {"command": "a\nb"}), ("run", {"command": "c"})]),  # B26
        ("raw json", [("run", {"command": "a\nb"})]),
    ],
)
def test_what_the_template_writes_for_a_call_is_read(client: httpx.Client, model: str, calls: list[Any]) -> None:
    """Whatever formats its text names, and with raw line breaks in texts; whole and in a stream."""
    server = Server(client, model)
    choice = server.chat(tools=[RUN])["choices"][0]
    made, streamed = pairs(choice["message"]["tool_calls"]), pairs(streamed_calls(server.stream_chat(tools=[RUN])))

    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert [(name, json.loads(arguments)) for name, arguments in made] == calls
    assert streamed == made


def test_a_template_that_needs_tools_gets_them(client: httpx.Client) -> None:
    """B35; without tools the message says what it needed."""
    server = Server(client, "needs")
    assert server.chat(tools=[RUN])["choices"][0]["message"]["content"] == "seen"
    refused = server.try_chat()
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
