"""Ollama's API on the wire: streams, whole responses, options, tools, thinking, models and errors."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import httpx
import pytest

BOB = {"authorization": "Bearer bob"}
ASKED = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}
FIGURES = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.split("\n") if line]


def chat(client: httpx.Client, model: str = "hello", **body: Any) -> httpx.Response:
    return client.post("/api/chat", json={"model": model, "messages": ASKED, **body})


def test_a_chat_is_a_stream_of_lines_unless_asked_otherwise(client: httpx.Client) -> None:
    *chunks, last = lines(chat(client))
    whole = chat(client, stream=False).json()

    assert [chunk["message"] for chunk in chunks] == [
        {"role": "assistant", "content": text} for text in ("Hel", "lo", " there")
    ]
    assert not any(chunk["done"] for chunk in chunks)
    assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", "hello")
    assert whole["message"] == {"role": "assistant", "content": "Hello there"}
    assert whole.keys() == last.keys()
    for answer in (last, whole):
        datetime.fromisoformat(answer["created_at"])
        assert all(isinstance(answer[name], int) and answer[name] >= 0 for name in FIGURES)
        assert (answer["prompt_eval_count"], answer["eval_count"]) == (len("[user:::Hi]"), 3)
        spent = answer["load_duration"] + answer["prompt_eval_duration"] + answer["eval_duration"]
        assert 0 < spent <= answer["total_duration"]


def test_generate_answers_or_continues(client: httpx.Client) -> None:
    def count(**body: Any) -> int:
        answer = client.post("/api/generate", json={"model": "hello", "stream": False, **body}).json()
        assert answer["response"] == "Hello there", answer
        return answer["prompt_eval_count"]

    *chunks, last = lines(client.post("/api/generate", json={"model": "hello", "prompt": "Hi"}))

    assert [chunk["response"] for chunk in chunks] == ["Hel", "lo", " there"] and last["response"] == ""
    assert count(prompt="Hi", raw=True) == 2
    assert count(prompt="Hi") == len("[user:::Hi]")
    assert count(prompt="Hi", system="S") == len("[system:::S][user:::Hi]")


def test_calls_have_objects_as_arguments(client: httpx.Client) -> None:
    *chunks, last = lines(chat(client, "caller", tools=[WEATHER]))
    whole = chat(client, "caller", tools=[WEATHER], stream=False).json()["message"]
    calls = [chunk["message"]["tool_calls"] for chunk in chunks if "tool_calls" in chunk["message"]]

    assert [len(group) for group in calls] == [1, 1] and last["done_reason"] == "stop"
    assert [call["function"] for (call,) in calls] == [
        {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}},
        {"index": 1, "name": "weather", "arguments": {"city": "Rome"}},
    ]
    assert [call["function"] for call in whole["tool_calls"]] == [call["function"] for (call,) in calls]
    assert whole["content"] == "".join(chunk["message"]["content"] for chunk in chunks)
    cut = chat(client, "caller", tools=[WEATHER], stream=False, options={"num_predict": 30}).json()
    assert cut["done_reason"] == "length" and "tool_calls" not in cut["message"], "its arguments have not begun"
    closed = chat(client, "caller", tools=[WEATHER], stream=False, options={"num_predict": 60}).json()
    (call,) = closed["message"]["tool_calls"]
    assert closed["done_reason"] == "length" and call["function"]["arguments"] == {"city": "Oslo"}


def test_results_of_tools_find_their_calls(client: httpx.Client) -> None:
    """By id, by name, or in order, each call once; the template writes name and id of each result."""
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("f", "g")]
    calls.append({"id": "mine", "function": {"name": "f"}})
    results = [{"tool_name": "g"}, {}, {"tool_call_id": "mine"}, {"tool_call_id": "mine"}, {"tool_name": "f"}, {}]
    chatted = [
        {"role": "User", "content": "Hi"},
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "content": "1", **result} for result in results),
    ]
    answer = client.post("/api/chat", json={"model": "hello", "messages": chatted, "stream": False})
    found = "[tool:g:call_1_1:1][tool:f:call_1_0:1][tool:f:mine:1]"
    called = '({"x": 1})({"x": 1})({})'
    prompt = f"[user:::Hi][assistant:::{called}]{found}[tool::mine:1][tool:f::1][tool:::1]"

    assert answer.json()["prompt_eval_count"] == len(prompt)


def test_thinking_is_separate(client: httpx.Client) -> None:
    *chunks, _ = lines(chat(client, "thinker", think=True))
    whole = chat(client, "thinker", stream=False).json()["message"]

    assert "".join(chunk["message"].get("thinking", "") for chunk in chunks) == "plan A"
    assert "".join(chunk["message"]["content"] for chunk in chunks) == "Answer 7"
    assert whole == {"role": "assistant", "content": "Answer 7", "thinking": "plan A"}
    for think in ("low", "medium", "high", "max"):
        assert chat(client, "thinker", think=think).status_code == 200
    generated = client.post("/api/generate", json={"model": "thinker", "prompt": "Hi", "stream": False}).json()
    assert (generated["thinking"], generated["response"]) == ("plan A", "Answer 7")


def test_log_probabilities_are_those_of_each_token(client: httpx.Client) -> None:
    *chunks, _ = lines(chat(client, logprobs=True, top_logprobs=2))
    entries = [entry for chunk in chunks for entry in chunk.get("logprobs", [])]

    assert [entry["token"] for entry in entries] == ["Hel", "lo", " there"]
    assert all(entry["bytes"] == list(entry["token"].encode()) and entry["logprob"] <= 0 for entry in entries)
    assert all(len(entry["top_logprobs"]) <= 2 for entry in entries)


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"num_predict": 2}, {"max_tokens": 2}),
        ({"num_predict": -1}, {}),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.4, "min_p": 0.1}, None),
        ({"repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2}, {"repetition_penalty": 1.2}),
        ({"seed": 7, "stop": ["x"]}, {"seed": 7, "stop": ["x"]}),
        ({"typical_p": 0.7, "mirostat": 0}, {"typical_p": 0.7}),
        ({"num_ctx": 2048, "seed": -1, "temperature": None}, {}),
    ],
    ids=str,
)
def test_options_are_applied(client: httpx.Client, options: dict[str, Any], parameters: dict[str, Any] | None) -> None:
    answer = chat(client, options=options, stream=False)
    shown = chat(client, options=options, stream=False)
    detailed = client.post(
        "/api/chat",
        json={"model": "hello", "messages": ASKED, "stream": False, "options": options},
        headers={"x-enginehouse-details": "true"},
    ).json()["enginehouse"]["parameters"]

    assert answer.status_code == 200 and "x-enginehouse-ignored" not in shown.headers, shown.text
    for name, value in (options if parameters is None else parameters).items():
        assert detailed[name] == {"value": value, "origin": "request"}


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"options": {"num_gpu": 99, "num_thread": 4, "nonsense": "x"}}, "options.num_gpu, options.num_thread, "),
        ({"options": {"num_ctx": 131072}}, "options.num_ctx"),
        ({"truncate": True, "shift": False}, "truncate, shift"),
        ({"keep_alive": "5m"}, "keep_alive"),
        (
            {
                "messages": [
                    *ASKED,
                    {"role": "assistant", "tool_calls": [{"x": 1, "function": {"index": 0, "name": "f", "y": 1}}]},
                ]
            },
            "messages[1].tool_calls[0].x, messages[1].tool_calls[0].function.y",
        ),
    ],
    ids=str,
)
def test_what_has_no_effect_is_told(client: httpx.Client, body: dict[str, Any], ignored: str) -> None:
    response = chat(client, **body)

    assert response.status_code == 200
    assert response.headers["x-enginehouse-ignored"].startswith(ignored)


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        ({"options": {"num_predict": "2"}}, 400, "options.num_predict: must be a whole number"),
        ({"options": {"temperature": -1}}, 400, "options.temperature"),
        ({"options": {"typical_p": 2}}, 400, "options.typical_p"),
        ({"format": "xml"}, 400, "format: must be 'json' or a JSON Schema"),
        ({"think": "deeply"}, 400, "think: must be true, false or one of"),
        ({"think": True}, 400, "think: the model 'hello' does not support thinking"),
        ({"keep_alive": "soon"}, 400, "keep_alive: must be a number of seconds"),
        ({"messages": [{"role": "robot"}]}, 400, "messages[0].role: must be one of"),
        ({"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]}, 400, "messages[0].images[0]: must be"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls[0].function: must"),
        ({"model": "nothing"}, 404, "nothing"),
        ({"model": ""}, 400, "model: is required"),
        ({"top_logprobs": 21}, 400, "top_logprobs"),
    ],
    ids=str,
)
def test_errors_have_one_member(client: httpx.Client, body: dict[str, Any], status: int, problem: str) -> None:
    response = chat(client, **body)

    assert response.status_code == status
    assert list(response.json()) == ["error"] and problem in response.json()["error"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"template": "{{ .Prompt }}"}, "template: not supported"),
        ({"context": [1, 2]}, "context: not supported; send the conversation to /api/chat"),
        ({"raw": True, "system": "S"}, "system: not together with raw"),
        ({"suffix": "x"}, "suffix: "),
    ],
    ids=str,
)
def test_generate_refuses_by_name(client: httpx.Client, body: dict[str, Any], problem: str) -> None:
    response = client.post("/api/generate", json={"model": "hello", "prompt": "Hi", **body})

    assert response.status_code == 400 and response.json()["error"].startswith(problem)


def test_a_stream_that_breaks_off_ends_with_the_error(client: httpx.Client) -> None:
    first, last = lines(chat(client, "broken"))

    assert first["message"]["content"] == "a"
    assert list(last) == ["error"] and "The model failed" in last["error"]


def test_a_format_is_a_constraint(client: httpx.Client) -> None:
    """A script follows none, so that its refusal names what the client wrote."""
    for wanted in ("json", {"type": "object"}):
        assert chat(client, format=wanted).json()["error"].startswith("format: ")


def test_models_are_listed_and_described(client: httpx.Client) -> None:
    listed = client.get("/api/tags").json()["models"]
    shown = {name: client.post("/api/show", json={"model": f"{name}:latest"}).json() for name in ("hello", "thinker")}
    architecture = shown["thinker"]["model_info"]["general.architecture"]

    assert [model["model"] for model in listed] == ["hello", "thinker", "caller", "broken"]
    assert all(len(model["digest"]) == 64 and model["size"] > 0 for model in listed)
    assert shown["thinker"]["model_info"]["general.basename"] == "thinker"
    assert shown["thinker"]["model_info"][f"{architecture}.context_length"] == 4096
    assert shown["thinker"]["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["hello"]["capabilities"] == ["completion", "tools"]
    assert client.post("/api/show", json={"name": "none"}).status_code == 404
    assert {model["name"] for model in client.get("/api/ps").json()["models"]} >= {"thinker", "caller"}
    assert all(datetime.fromisoformat(model["expires_at"]) for model in client.get("/api/ps").json()["models"])


def test_clients_find_a_server(client: httpx.Client) -> None:
    root, version = client.get("/"), client.get("/api/version").json()["version"]

    assert (root.text, root.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")
    assert client.head("/").status_code == 200 and client.head("/api/tags").status_code == 200
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]  # the oldest that VS Code takes


def test_keep_alive_loads_unloads_and_pins_for_admins_only(client: httpx.Client) -> None:
    def asked(headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return client.post("/api/generate", json={"model": "hello", **body}, headers=headers)

    def is_loaded() -> bool:
        return "hello" in {model["name"] for model in client.get("/api/ps").json()["models"]}

    assert asked().json()["done_reason"] == "load" and is_loaded()
    ignored = asked(BOB, keep_alive=0)
    assert ignored.headers["x-enginehouse-ignored"] == "keep_alive" and is_loaded()
    assert ignored.json()["done_reason"] == "load"  # nothing was unloaded
    assert asked(keep_alive=0).json()["done_reason"] == "unload" and not is_loaded()
    loaded = client.post("/api/chat", json={"model": "hello", "messages": [], "keep_alive": "-1m"})
    assert loaded.json()["message"] == {"role": "assistant", "content": ""} and is_loaded()
    assert "unload" in asked(keep_alive=0).json().get("error", "")  # pinned
    assert asked(BOB, prompt="Hi", keep_alive=-1).headers["x-enginehouse-ignored"] == "keep_alive"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/push"),
    ],
)
def test_the_rest_is_refused_by_name(client: httpx.Client, method: str, path: str) -> None:
    response = client.request(method, path, json={"model": "hello"})

    assert response.status_code == 501
    assert response.json()["error"].startswith(f"{path}: not supported; ")


def test_a_pull_finds_what_is_served(client: httpx.Client) -> None:
    assert lines(client.post("/api/pull", json={"model": "hello:latest"}))[-1] == {"status": "success"}
    assert client.post("/api/pull", json={"model": "hello", "stream": False}).json() == {"status": "success"}
    missing = client.post("/api/pull", json={"model": "other"})
    assert missing.status_code == 400 and "enginehouse[hub]" in missing.json()["error"]
    assert client.post("/api/pull", json={"model": "hello"}, headers=BOB).status_code == 403


def test_addresses_that_do_not_exist_have_ollamas_error(client: httpx.Client) -> None:
    for response, status in (
        (client.get("/api/nothing"), 404),
        (client.post("/api/blobs/sha256:0", json={}), 404),
        (client.get("/api/chat"), 405),
        (client.post("/api/chat", content=b"{"), 400),
    ):
        assert (response.status_code, type(response.json()["error"])) == (status, str), response.text


def test_a_body_is_json_whatever_its_type_says_but_not_from_web_pages(client: httpx.Client) -> None:
    """The examples of Ollama's documentation call ``curl -d``, which says that it sends a form."""
    body = b'{"model": "hello", "messages": [{"role": "user", "content": "hi"}], "stream": false}'
    form = {"content-type": "application/x-www-form-urlencoded"}

    assert client.post("/api/chat", content=body, headers=form).json()["done"] is True
    assert client.post("/api/chat", content=body).json()["done"] is True
    page = client.post("/api/chat", content=body, headers={**form, "origin": str(client.base_url).rstrip("/")})
    assert page.status_code == 415
    assert client.post("/v1/chat/completions", content=body, headers=form).status_code == 415
