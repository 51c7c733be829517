"""llama-server's own API on the wire: completions, infill, properties, slots and control."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from attrs import evolve

from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

BOB = {"authorization": "Bearer bob"}
FINAL = {
    *("index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated", "prompt"),
    *("generation_settings", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached", "timings"),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose caller has the scope ``infer`` only; ``bob`` is another one."""
    folder = tmp_path_factory.mktemp("llama_server")
    scripts: dict[str, dict[str, Any]] = {
        "hello": {"tokens": ["Hel", "lo", "\n", "there"]},
        "euro": {"tokens": [{"bytes": [0xE2, 0x82]}, {"bytes": [0xAC]}, "x", {"bytes": [0xE2]}]},
        "slow": {"tokens": ["a", {"delay_s": 0.02}], "loop": True},
        "thinker": {"tokens": ["<think>", *["so ", {"delay_s": 0.02}] * 2000, "</think>", "7"]},
    }
    models = {
        name: ModelSettings(source=write_script(folder / f"{name}.json", **script), backend="scripted", context=4096)
        for name, script in scripts.items()
    }
    models["fake"] = ModelSettings(source=str(folder), backend="fake", isolation="thread")
    (folder / "open.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n", encoding="utf-8")
    models["reasoner"] = evolve(
        models["fake"], chat_template=str(folder / "open.jinja"), context=4096, options={"step_delay_s": 0.01}
    )
    settings = Settings(
        auth=AuthSettings(keys=(KeySettings(name="alice", key="alice"), KeySettings(name="bob", key="bob"))),
        models=models,
        plugins=PluginsSettings(allow=("llama_server", "parsers", "samplers")),
    )
    with served(settings, headers={"authorization": "Bearer alice"}) as client:
        yield client


def complete(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/completion", json={"prompt": "Hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line.startswith("data")]


def test_a_completion_is_one_object_or_events(client: httpx.Client) -> None:
    whole = complete(client, return_tokens=True)
    response = client.post("/completion", json={"prompt": "Hi", "stream": True})
    *parts, last = events(response)

    assert whole.keys() == FINAL == last.keys()
    assert (whole["content"], whole["stop_type"], whole["stopping_word"]) == ("Hello\nthere", "eos", "")
    assert (whole["tokens_evaluated"], whole["tokens_predicted"], whole["has_new_line"]) == (2, 4, True)
    assert whole["timings"]["prompt_n"] == 2 and whole["timings"]["predicted_n"] == 4
    assert "".join(part["content"] for part in parts) == whole["content"] and last["content"] == ""
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["tokens_predicted"] for part in parts] == [1, 2, 3, 4]
    assert not any(part["stop"] for part in parts) and last["stop"] and "[DONE]" not in response.text
    assert complete(client)["tokens"] == []


def test_the_tokens_of_a_stream_are_all_tokens(client: httpx.Client) -> None:
    """Also those of which no text can be shown, at its end."""
    whole = complete(client, model="euro", return_tokens=True)
    scored = complete(client, model="euro", n_probs=1)
    *parts, last = events(client.post("/completion", json={"prompt": "Hi", "model": "euro", "stream": True}))

    assert "".join(part["content"] for part in parts) == whole["content"] == "€x"
    assert [token for part in [*parts, last] for token in part["tokens"]] == whole["tokens"]
    assert len(whole["tokens"]) == len(scored["completion_probabilities"]) == last["tokens_predicted"] == 4


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"n_predict": 2}, {"content": "Hello", "stop_type": "limit"}),
        ({"max_tokens": 1}, {"content": "Hel", "stop_type": "limit"}),
        ({"n_predict": -1, "seed": -1}, {"stop_type": "eos"}),
        ({"stop": ["there"]}, {"content": "Hello\n", "stop_type": "word", "stopping_word": "there"}),
        ({"prompt": [72, 105]}, {"tokens_evaluated": 2, "prompt": "Hi"}),
        ({"prompt": [72, "ello", 33]}, {"tokens_evaluated": 6, "prompt": "Hello!"}),
        ({"prompt": {"prompt_string": "Hey"}}, {"tokens_evaluated": 3, "prompt": "Hey"}),
        ({"response_fields": ["content", "generation_settings/n_predict", "no/such"], "n_predict": 8}, None),
    ],
    ids=str,
)
def test_bodies_are_llama_servers(client: httpx.Client, body: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = complete(client, **body)

    if expected is None:
        assert found == {"content": "Hello\nthere", "generation_settings/n_predict": 8}
    else:
        assert {name: found[name] for name in expected} == expected


def test_several_prompts_and_choices_are_a_list(client: httpx.Client) -> None:
    many = complete(client, prompt=["Hi", [72, 105, 33], {"prompt_string": "Hello"}])
    chosen = complete(client, n_cmpl=2)

    assert [one["tokens_evaluated"] for one in many] == [2, 3, 5]
    assert [one["prompt"] for one in many] == ["Hi", "Hi!", "Hello"]
    assert [one["index"] for one in chosen] == [0, 1] and [one["tokens_predicted"] for one in chosen] == [4, 4]
    assert isinstance(complete(client, prompt=["Hi"]), list)


def test_probabilities_are_per_token(client: httpx.Client) -> None:
    whole = complete(client, n_probs=3)["completion_probabilities"]
    *parts, last = events(client.post("/completion", json={"prompt": "Hi", "n_probs": 3, "stream": True}))

    assert [entry["token"] for entry in whole] == ["Hel", "lo", "\n", "there"]
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) <= 3 for entry in whole)
    assert [entry for part in parts for entry in part["completion_probabilities"]] == whole
    assert "completion_probabilities" not in last


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_probabilities_after_sampling_have_other_names(client: httpx.Client, temperature: float) -> None:
    """The best of two tokens that may be drawn; with a temperature of 0 the others have the probability 0."""
    body = {"prompt": "Hi", "model": "fake", "n_predict": 4, "n_probs": 3, "post_sampling_probs": True, "top_k": 2}
    found = complete(client, **body, temperature=temperature)

    assert found["generation_settings"]["post_sampling_probs"] is True
    assert len(found["completion_probabilities"]) == 4
    for entry in found["completion_probabilities"]:
        assert entry.keys() == {"id", "token", "bytes", "prob", "top_probs"} and 0 < entry["prob"] <= 1
        probs = [one["prob"] for one in entry["top_probs"]]
        assert all(one.keys() == {"id", "token", "bytes", "prob"} for one in entry["top_probs"])
        assert probs == [1, 0, 0] if temperature == 0 else len(probs) == 2
        assert sum(probs) == pytest.approx(1)
        assert entry["prob"] in probs


def test_settings_show_what_was_in_force(client: httpx.Client) -> None:
    asked = {"temperature": 0.5, "repeat_penalty": 1.2, "typical_p": 0.7, "adaptive_target": 0.2, "seed": 7}
    asked |= {"top_k": 3, "n_predict": 2}
    shown = complete(client, **asked, logit_bias=[[72, 1.5], [73, False]])["generation_settings"]

    assert {name: shown[name] for name in asked} == asked
    assert shown["logit_bias"] == [{"token": 72, "bias": 1.5}, {"token": 73, "bias": -100.0}]
    assert shown["mirostat"] == 0 and shown["stop"] == []


def test_a_bias_of_a_text_is_that_of_its_tokens(client: httpx.Client) -> None:
    shown = complete(client, logit_bias={"Hi": -1, "33": 2})["generation_settings"]["logit_bias"]

    assert sorted((one["token"], one["bias"]) for one in shown) == [(33, 2), (72, -1), (105, -1)]


def test_streams_tell_times_and_progress(client: httpx.Client) -> None:
    body = {"prompt": "Hi", "stream": True, "timings_per_token": True}
    *parts, _ = events(client.post("/completion", json=body))

    assert [part["timings"]["predicted_n"] for part in parts] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": []}, "prompt"),
        ("/completion", {"prompt": [1, None]}, "prompt[1]"),
        ("/completion", {"prompt": "x", "n_predict": -2}, "n_predict"),
        ("/completion", {"prompt": "x", "temperature": "hot"}, "temperature"),
        ("/completion", {"prompt": "x", "repeat_penalty": 0}, "repeat_penalty"),
        ("/completion", {"prompt": "x", "n_probs": 101}, "n_probs"),
        ("/completion", {"prompt": "x", "lora": [{"id": 0, "scale": 1}]}, "lora"),
        ("/completion", {"prompt": "x", "logit_bias": [5]}, "logit_bias"),
        ("/completion", {"prompt": "x", "json_schema": "{}"}, "json_schema"),
        ("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["AA"]}}, "prompt.multimodal_data"),
        ("/infill", {"input_suffix": "b"}, "input_prefix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "f"}]}, "input_extra[0]"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "suffix"),
        ("/v1/chat/completions/control", {"id": "x", "action": "stop"}, "action"),
    ],
    ids=str,
)
def test_errors_name_the_member(client: httpx.Client, path: str, body: dict[str, Any], problem: str) -> None:
    response = client.post(path, json=body)
    error = response.json()["error"]

    assert (response.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert error["message"].startswith(problem), error


def test_properties_are_those_of_a_model(client: httpx.Client) -> None:
    first, slow = client.get("/props").json(), client.get("/props?model=slow").json()

    assert (first["model_alias"], slow["model_alias"]) == ("hello", "slow")
    assert first["default_generation_settings"]["n_ctx"] == 4096
    assert first["default_generation_settings"]["params"]["n_predict"] == -1
    assert client.get("/props?model=none").status_code == 404


def test_slots_and_control_are_those_of_the_caller(client: httpx.Client) -> None:
    body = {"model": "thinker", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}

    def slots(headers: dict[str, str] | None = None) -> list[bool]:
        return [slot["is_processing"] for slot in client.get("/slots?model=thinker", headers=headers).json()]

    def control(headers: dict[str, str] | None = None) -> httpx.Response:
        asked = {"id": request_id, "action": "reasoning_end"}
        return client.post("/v1/chat/completions/control", json=asked, headers=headers)

    assert slots() == [False]
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        next(lines)

        assert slots() == [True] and slots(BOB) == [False]
        assert control(BOB).status_code == 404
        assert control().status_code in (200, 409)  # a script's engine may not be able to


def test_control_ends_the_reasoning_and_the_answer_follows(client: httpx.Client) -> None:
    body = {"model": "reasoner", "stream": True, "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}

    def control(request_id: str, **more: Any) -> httpx.Response:
        asked = {"id": request_id, "action": "reasoning_end"}
        return client.post("/v1/chat/completions/control", json=asked, **more)

    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        chunks = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        first = next(chunk for chunk in chunks if chunk["choices"][0]["delta"].get("reasoning_content"))
        assert control(first["id"], headers=BOB).status_code == 404
        assert control(first["id"]).json() == {"success": True}
        assert next(chunk for chunk in chunks if chunk["choices"][0]["delta"].get("content"))
        assert control(first["id"]).status_code == 409
    assert control("chatcmpl-none").status_code == 404
