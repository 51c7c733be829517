"""Arguments of calls in a client's history reach the template as what it reads, through every surface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

CALLS = (
    "{%- set seen = namespace(text='') -%}{%- for m in messages -%}{%- for c in m.tool_calls or [] -%}"
    "ARGUMENTS{%- endfor -%}{%- endfor -%}{{ raise_exception('<' ~ seen.text ~ '>') }}"
)
# What these templates make of the arguments is in the error, so that a client reads it.
TEMPLATES = {
    "iterates": CALLS.replace(
        "ARGUMENTS",
        "{%- for k, v in c.function.arguments.items() -%}{%- set seen.text = seen.text ~ k ~ '=' ~ v -%}{%- endfor -%}",
    ),
    "encodes": CALLS.replace("ARGUMENTS", "{%- set seen.text = c.function.arguments | tojson -%}"),
    "prints": CALLS.replace("ARGUMENTS", "{%- set seen.text = 'a: ' + c.function.arguments -%}"),
}
# Methods of strings fail for objects; the model says whether it has read the text.
STRIPS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}<{{ c.function.arguments.strip() }}>{% endfor %}"
    "{% endfor %}"
)
ABSENT: Any = object()
# What clients send, and what each template shows.
CASES: list[tuple[Any, dict[str, str]]] = [
    ('{"at":"x y"}', {"iterates": "at=x y", "encodes": '{"at": "x y"}', "prints": 'a: {"at":"x y"}'}),
    ({"at": "x y"}, {"iterates": "at=x y", "encodes": '{"at": "x y"}', "prints": 'a: {"at":"x y"}'}),
    ('"{\\"at\\":1}"', {"iterates": "at=1", "encodes": '{"at": 1}', "prints": 'a: {"at":1}'}),
    (ABSENT, {"iterates": "", "encodes": "{}", "prints": "a: {}"}),
    (None, {"iterates": "", "encodes": "{}", "prints": "a: {}"}),
    ("", {"iterates": "", "encodes": "{}", "prints": "a: {}"}),
    (" null", {"iterates": "", "encodes": "{}", "prints": "a: {}"}),
    ([], {"iterates": "", "encodes": "{}", "prints": "a: {}"}),
    (
        '{"at": oops',
        {
            "iterates": 'invalid_arguments={"at": oops',
            "encodes": '{"invalid_arguments": "{\\"at\\": oops"}',
            "prints": 'a: {"invalid_arguments": "{\\"at\\": oops"}',
        },
    ),
]
REFUSED: list[Any] = [[1], 5, True, [{"at": "x"}]]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("arguments")
    source = write_script(folder / "script.json", ["Hi"], replies={'<{"at":1}>': ["I have", " read it."]})
    models = {}
    for name, template in {**TEMPLATES, "strips": STRIPS}.items():
        (folder / f"{name}.jinja").write_text(template, encoding="utf-8")
        models[name] = ModelSettings(
            source=source, backend="scripted", chat_template=str(folder / f"{name}.jinja"), tool_parser="hermes"
        )
    plugins = PluginsSettings(allow=("anthropic", "ollama", "parsers", "responses"))
    with served(Settings(models=models, plugins=plugins)) as client:
        yield client


def given(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not ABSENT}


def chat(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": given(name="look", arguments=arguments)}
    result = {"role": "tool", "tool_call_id": "c1", "content": "sea"}
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}, result]}


def responses(arguments: Any) -> dict[str, Any]:
    call = given(type="function_call", call_id="c1", name="look", arguments=arguments)
    result = {"type": "function_call_output", "call_id": "c1", "output": "sea"}
    return {"input": [{"role": "user", "content": "?"}, call, result]}


def anthropic(arguments: Any) -> dict[str, Any]:
    call = given(type="tool_use", id="c1", name="look", input=arguments)
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "sea"}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return {"messages": messages, "max_tokens": 5}


def ollama(arguments: Any) -> dict[str, Any]:
    call = {"function": given(name="look", arguments=arguments)}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sea", "tool_name": "look"},
    ]
    return {"messages": messages, "stream": False}


SURFACES: dict[str, tuple[str, Callable[[Any], dict[str, Any]], str]] = {
    "chat": ("/v1/chat/completions", chat, "messages[1].tool_calls[0].function.arguments"),
    "responses": ("/v1/responses", responses, "input[1].arguments"),
    "anthropic": ("/v1/messages", anthropic, "messages[1].content[0].input"),
    "ollama": ("/api/chat", ollama, "messages[1].tool_calls[0].function.arguments"),
}


def ask(client: httpx.Client, surface: str, arguments: Any, model: str) -> str:
    """Return the text of the error."""
    path, body, _ = SURFACES[surface]
    response = client.post(path, json={**body(arguments), "model": model})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("surface", SURFACES)
def test_arguments_reach_templates_of_both_kinds(client: httpx.Client, surface: str) -> None:
    seen = {
        (str(arguments), model): ask(client, surface, arguments, model).partition(": <")[2].removesuffix(">")
        for arguments, by_model in CASES
        for model in by_model
    }

    assert seen == {(str(arguments), model): text for arguments, by_model in CASES for model, text in by_model.items()}


@pytest.mark.parametrize("surface", SURFACES)
def test_arguments_are_text_for_templates_that_need_text(client: httpx.Client, surface: str) -> None:
    path, body, _ = SURFACES[surface]
    response = client.post(path, json={**body(' {"at":1} '), "model": "strips"})

    assert (response.status_code, "I have read it." in response.text) == (200, True), response.text


@pytest.mark.parametrize("surface", SURFACES)
def test_other_values_are_refused_by_their_path(client: httpx.Client, surface: str) -> None:
    for arguments in REFUSED:
        message = ask(client, surface, arguments, "prints")
        assert message.startswith(f"{SURFACES[surface][2]}: must be an object, or a string"), message
