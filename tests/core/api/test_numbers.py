"""Numbers in request bodies: those that no frame between processes holds, whole ones written as floats, bounds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from enginehouse.contract.errors import ConfigError
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings, load_settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

MESSAGES = [{"role": "user", "content": "hi"}]
WIDE = [2**64, -(2**63) - 1, 10**300, {"deep": [1, {"x": 2**64}]}]
ROUTES = ["/v1/chat/completions", "/apply-template", "/tokenize"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server with a scripted model, a fake one in a worker process, and the plugins that declare request fields."""
    folder = tmp_path_factory.mktemp("numbers")
    models = {
        "m": ModelSettings(source=write_script(folder / "m.json", ["Hel", "lo"]), backend="scripted"),
        "fake": ModelSettings(source="fake", backend="fake"),
    }
    plugins = PluginsSettings(allow=("parsers", "samplers", "bans"))
    with served(Settings(models=models, plugins=plugins), timeout=30) as client:
        yield client


def processes() -> set[int]:
    """The rendering and worker processes of this server."""
    return {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}


def refused(response: httpx.Response) -> dict[str, Any]:
    """The error of a refusal."""
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("value", WIDE)
def test_wide_integers_in_template_variables_are_refused_by_name(client: httpx.Client, path: str, value: Any) -> None:
    before = processes()
    body = {"model": "m", "messages": MESSAGES, "chat_template_kwargs": {"x": value}}
    for stream in (False, True) if path == ROUTES[0] else (False,):
        error = refused(client.post(path, json={**body, **({"stream": True} if stream else {})}))

        assert error["param"] == "chat_template_kwargs.x"
        assert "64 bits" in error["message"]
    assert processes() == before


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("value", WIDE)
def test_wide_integers_in_tools_cost_no_process(client: httpx.Client, path: str, value: Any) -> None:
    before = processes()
    parameters = {"type": "object", "properties": {"x": {"type": "integer", "default": value}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    response = client.post(path, json={"model": "m", "messages": MESSAGES, "tools": tools})

    assert response.status_code in (200, 400), response.text
    assert processes() == before


FIELDS = [
    *("max_tokens", "max_completion_tokens", "min_tokens", "n", "seed", "priority", "top_k", "top_logprobs"),
    *("prompt_logprobs", "thinking_budget", "stop_token_ids", "temperature", "top_p", "logit_bias", "metadata"),
    *("presence_penalty", "response_format", "messages", "tools", "mirostat", "dry_allowed_length"),
    *("dry_penalty_last_n", "no_repeat_ngram_size", "unknown_field"),
]


@pytest.mark.parametrize("model", ["m", "fake"])
@pytest.mark.parametrize("value", [2**63, 2**64, -(2**63) - 1, 10**30, 10**400])
def test_wide_integers_in_any_field_are_an_answer_or_a_refusal(client: httpx.Client, model: str, value: int) -> None:
    before = processes()
    for field in FIELDS:
        for shaped in (value, [value], {"1": value}):
            body = {"model": model, "messages": MESSAGES, "max_tokens": 2, "logprobs": True, field: shaped}
            response = client.post("/v1/chat/completions", json=body)
            assert response.status_code in (200, 400), (field, shaped, response.text)
    for path, body in (
        ("/detokenize", {"tokens": [value]}),
        ("/v1/completions", {"prompt": [value], "max_tokens": 2}),
        ("/v1/completions", {"prompt": "a", "logprobs": value}),
        ("/v1/completions", {"prompt": "a", "best_of": value}),
    ):
        assert client.post(path, json={"model": model, **body}).status_code == 400, (path, body)
    assert processes() == before


@pytest.mark.parametrize("text", ['{"x": NaN}', '{"x": Infinity}', '{"x": 1e999}', '{"x": "\\ud800"}'])
def test_what_json_does_not_have_is_refused(client: httpx.Client, text: str) -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": ' + text + "}"
    for path in ROUTES:
        refused(client.post(path, content=body, headers={"content-type": "application/json"}))


def test_calls_of_earlier_turns_may_hold_any_number(client: httpx.Client, tmp_path: Path) -> None:
    """Arguments are text: they are rendered as they were written."""
    before = processes()
    for arguments in ('{"x": 18446744073709551616}', {"x": 2**70}, '{"x": 1e999}', '{"x": "\\ud800"}', "[" * 100_000):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}, *MESSAGES]
        response = client.post("/v1/chat/completions", json={"model": "m", "messages": turns, "max_tokens": 2})
        assert response.status_code == 200, response.text
    assert processes() == before


WHOLE = {
    "max_tokens": 2.0,
    "max_completion_tokens": 2.0,
    "min_tokens": 1.0,
    "n": 2.0,
    "seed": 7.0,
    "priority": -1.0,
    "top_k": 40.0,
    "thinking_budget": 10.0,
    "stop_token_ids": [3.0, 4],
    "dry_allowed_length": 2.0,
    "mirostat": 0.0,
    "no_repeat_ngram_size": 3.0,
}
"""Fields that ask for integers, some of plugins, as clients without an integer type write them."""


@pytest.mark.parametrize("stream", [False, True])
def test_whole_floats_stand_for_integers(client: httpx.Client, stream: bool) -> None:
    for field, value in WHOLE.items():
        body = {"model": "fake", "messages": MESSAGES, "max_tokens": 2, field: value, "stream": stream}
        response = client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, (field, response.text)
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 3.0, "temperature": 1, "n": 2.0, "seed": 5.0}
    plain = {**body, "max_tokens": 3, "n": 2, "seed": 5}
    first, second = (client.post("/v1/chat/completions", json=one).json() for one in (body, plain))
    assert [c["message"] for c in first["choices"]] == [c["message"] for c in second["choices"]]
    assert first["usage"]["completion_tokens"] == 6


def test_whole_floats_in_arrays_and_other_routes(client: httpx.Client) -> None:
    logprobs = {"logprobs": True, "top_logprobs": 2.0, "prompt_logprobs": 1.0}
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **logprobs}),
        ("/v1/completions", {"prompt": [1.0, 2.0, 3], "max_tokens": 1.0, "logprobs": 2.0, "best_of": 1.0}),
        ("/v1/completions", {"prompt": [[1.0, 2], [3]], "max_tokens": 1}),
        ("/detokenize", {"tokens": [1.0, 2]}),
        ("/v1/route", {"messages": MESSAGES, "max_tokens": 16.0}),
    ):
        response = client.post(path, json={"model": "fake", **body})
        assert response.status_code == 200, (path, response.text)


@pytest.mark.parametrize("value", [16.5, "16", "16.0", True, 2.0**60, -1e300, [16.0], {"a": 1.0}])
def test_nothing_else_stands_for_an_integer(client: httpx.Client, value: Any) -> None:
    for field in ("max_tokens", "n", "seed", "top_k", "stop_token_ids", "no_repeat_ngram_size"):
        body = {"model": "fake", "messages": MESSAGES, field: value}
        if field != "stop_token_ids" or not isinstance(value, list):
            error = refused(client.post("/v1/chat/completions", json=body))
            assert error["param"].startswith(field)
    refused(client.post("/v1/completions", json={"model": "fake", "prompt": [value, 1.0]}))
    refused(client.post("/detokenize", json={"model": "fake", "tokens": [value]}))


def test_settings_stay_strict(tmp_path: Path) -> None:
    """TOML has integers; only ``defaults``, which are request fields, are read as requests are."""
    path = tmp_path / "enginehouse.toml"
    path.write_text('[models.m]\nsource = "x"\nslots = 2.0\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="a whole number"):
        load_settings(path, {}, {})
