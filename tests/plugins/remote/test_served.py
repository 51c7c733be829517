"""A whole server over another whole server: what clients see through the remote backend."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import evolve

from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.served import wait_ready
from enginehouse_testkit.server_thread import ServerThread, server_thread
from enginehouse_testkit.waiting import wait_until

pytestmark = pytest.mark.remote


@pytest.fixture
def client(served: str) -> Any:
    with httpx.Client(base_url=served, timeout=120, trust_env=False) as client:
        yield client


def chat(client: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    fields.setdefault("messages", [{"role": "user", "content": "hi"}])
    return client.post("/v1/chat/completions", json={"model": model, **fields})


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_models_say_what_the_server_behind_them_can(client: httpx.Client) -> None:
    card = client.get("/v1/models/fake").json()

    assert (card["backend"], card["max_context"]) == ("remote", 2048)
    assert card["metadata"]["remote_kind"] == "enginehouse"
    capabilities = card["capabilities"]
    assert capabilities["temperature"]["support"] == "native"
    assert capabilities["response_format"]["support"] == "native"
    assert capabilities["xtc_probability"]["support"] == "native"
    assert capabilities["suffix"]["support"] == "refused"
    assert capabilities["return_progress"] == {"support": "refused", "reason": "it is not passed on to remote servers"}
    assert client.get("/v1/models/plain").json()["capabilities"]["response_format"]["support"] == "refused"


def test_answers_are_those_of_the_server_behind(client: httpx.Client, upstream: ServerThread) -> None:
    body = {"model": "fake", "seed": 5, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "n": 2}
    body |= {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]}
    here = client.post("/v1/chat/completions", json=body).json()
    there = httpx.post(f"{upstream.url}/v1/chat/completions", json=body, timeout=120, trust_env=False).json()

    assert [choice["message"]["content"] for choice in here["choices"]] == [
        choice["message"]["content"] for choice in there["choices"]
    ]
    assert here["choices"][0]["logprobs"] == there["choices"][0]["logprobs"]
    assert [choice["finish_reason"] for choice in here["choices"]] == ["length", "length"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert here["usage"][name] == there["usage"][name]


def test_defaults_here_are_written_out_there(client: httpx.Client) -> None:
    """The drawn seed reaches the other server: giving it again replays the answer."""
    response = client.post(
        "/v1/chat/completions",
        json={"model": "fake", "max_tokens": 12, "messages": [{"role": "user", "content": "hi"}]},
        headers={"x-enginehouse-details": "true"},
    ).json()
    seed = response["enginehouse"]["parameters"]["seed"]["value"]
    again = chat(client, "fake", max_tokens=12, seed=seed).json()

    assert response["enginehouse"]["parameters"]["seed"]["origin"] == "drawn"
    assert again["choices"][0]["message"]["content"] == response["choices"][0]["message"]["content"]


def test_streams_have_the_same_frame_and_text(client: httpx.Client) -> None:
    whole = chat(client, "bytes").json()
    events = events_of(chat(client, "bytes", stream=True, stream_options={"include_usage": True}))

    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Grüße 漢字 🧑🏽‍🚀"
    assert whole["choices"][0]["message"]["content"] == "Grüße 漢字 🧑🏽‍🚀"
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_stop_and_limits_are_kept_there(client: httpx.Client) -> None:
    stopped = chat(client, "plain", stop=["word3"]).json()
    limited = chat(client, "plain", max_tokens=4).json()

    assert stopped["choices"][0]["message"]["content"] == " word0 word1 word2 "
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert (limited["choices"][0]["finish_reason"], limited["usage"]["completion_tokens"]) == ("length", 4)


def test_schemas_are_enforced_there(client: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": "Grüße"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "t", "strict": True, "schema": schema}}
    answer = chat(client, "fake", response_format=form, max_tokens=60).json()
    wrong = chat(client, "fake", response_format={**form, "json_schema": {"name": "t", "schema": {"type": "strnig"}}})

    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": "Grüße"}
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"].startswith("response_format")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_found_there_and_arrive_as_calls(client: httpx.Client, stream: bool) -> None:
    parameters = {"type": "object", "properties": {"level": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "lamp", "parameters": parameters}}]
    response = chat(client, "call", tools=tools, stream=stream)
    if stream:
        choices = [choice for event in events_of(response) for choice in event["choices"]]
        pieces = [call for choice in choices for call in choice["delta"].get("tool_calls") or ()]
        name, call_id = pieces[0]["function"]["name"], pieces[0]["id"]
        arguments = "".join(piece["function"].get("arguments") or "" for piece in pieces)
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    else:
        choice = response.json()["choices"][0]
        call = choice["message"]["tool_calls"][0]
        name, call_id, arguments = call["function"]["name"], call["id"], call["function"]["arguments"]
        reasons = [choice["finish_reason"]]

    assert (name, json.loads(arguments), reasons) == ("lamp", {"level": 7}, ["tool_calls"])
    assert call_id


def test_what_the_server_behind_cannot_is_refused_here_by_name(client: httpx.Client, upstream: ServerThread) -> None:
    before = httpx.get(f"{upstream.url}/health", timeout=60, trust_env=False).status_code
    refused = chat(client, "plain", response_format={"type": "json_object"})
    infill = client.post("/v1/completions", json={"model": "fake", "prompt": "a", "suffix": "b"})
    guess = chat(client, "fake", prediction={"type": "content", "content": "x"})

    assert before == 200
    assert [answer.status_code for answer in (refused, infill, guess)] == [400, 400, 400]
    params = [answer.json()["error"]["param"] for answer in (refused, infill, guess)]
    assert params == ["response_format", "suffix", "prediction"]
    assert refused.json()["error"]["code"] == "unsupported_parameter"


def test_too_long_a_prompt_is_refused_with_both_numbers(client: httpx.Client) -> None:
    for stream in (False, True):
        answer = chat(client, "fake", messages=[{"role": "user", "content": "word " * 5000}], stream=stream)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "2048" in error["message"]


def test_raw_prompts_and_token_ids(client: httpx.Client, upstream: ServerThread) -> None:
    body = {"model": "fake", "max_tokens": 6, "temperature": 0}
    token_ids = client.post("/tokenize", json={"model": "fake", "content": "Hello"}).json()["tokens"]
    text = client.post("/detokenize", json={"model": "fake", "tokens": token_ids}).json()["content"]
    by_text = client.post("/v1/completions", json={**body, "prompt": ["Hello", "World"]}).json()
    there = httpx.post(
        f"{upstream.url}/v1/completions", json={**body, "prompt": ["Hello", "World"]}, timeout=60, trust_env=False
    ).json()
    shown = client.post("/apply-template", json={"model": "fake", "messages": [{"role": "user", "content": "x"}]})

    assert text == "Hello"
    assert [choice["text"] for choice in by_text["choices"]] == [choice["text"] for choice in there["choices"]]
    assert by_text["usage"]["prompt_tokens"] == there["usage"]["prompt_tokens"]
    assert shown.status_code == 400
    assert shown.json()["error"]["param"] == "messages"


def test_client_that_leaves_frees_the_slot_of_the_server_behind(client: httpx.Client, upstream: ServerThread) -> None:
    with client.stream("POST", "/v1/chat/completions", json={**_ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
    began = time.monotonic()
    answers = [chat(client, "endless", max_tokens=2) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200] * 3
    assert time.monotonic() - began < 60


_ENDLESS = {"model": "endless", "messages": [{"role": "user", "content": "hi"}]}


def test_settings_about_templates_have_no_place_here(upstream: ServerThread, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    right = ModelSettings(source=upstream.url, backend="remote", options={"model": "short"})
    models = {"m": evolve(right, chat_template=str(template)), "right": right}  # without any, a server ends
    with server_thread(Settings(models=models, plugins=PluginsSettings(allow=("remote",)))) as running:

        def shown() -> Any:
            return httpx.get(f"{running.url}/v1/models/m", timeout=60, trust_env=False).json()

        wait_until(lambda: shown()["state"] != "loading", "the end of the load")
        status = shown()

    assert status["state"] == "failed"
    assert "models.m.chat_template" in status["error"]


def test_prompts_of_answers_that_are_broken_off_count(upstream: ServerThread) -> None:
    """How long they were is said at the end only; till then their estimate holds."""
    endless = ModelSettings(source=f"{upstream.url}/v1", backend="remote", options={"model": "endless"})
    settings = Settings(
        models={"endless": endless},
        limits=LimitsSettings(tokens_per_minute=100_000),
        plugins=PluginsSettings(allow=("remote",)),
    )
    body = {"model": "endless", "prompt": "word " * 900, "stream": True, "max_tokens": 400}  # 1125 tokens, judged so
    with server_thread(settings) as running, httpx.Client(base_url=running.url, timeout=120, trust_env=False) as client:
        wait_ready(client)
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert "data" in next(line for line in answer.iter_lines() if line.startswith("data"))

        def used() -> int:
            refused = client.post("/v1/completions", json={"prompt": 1})
            return 100_000 - int(refused.headers["x-ratelimit-remaining-tokens"])

        deadline = time.monotonic() + 60
        while used() > 1400 and time.monotonic() < deadline:  # what was set aside for the answer comes back
            time.sleep(0.05)
        assert 1000 < used() < 1400
