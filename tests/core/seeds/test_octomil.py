"""Seed 000: the chat completions of `octomil serve`."""

import json
from collections.abc import Callable

import httpx
import pytest

from .page import Page, shape

PROFILE = "octomil"
Post = Callable[..., httpx.Response]


def events(body: str) -> list[dict]:
    blocks = [block.removeprefix("data: ") for block in body.strip().split("\n\n") if not block.startswith(":")]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


@pytest.mark.llamacpp
def test_request(page: Page) -> None:
    assert len(page.run("request.py.txt").split()) > 5


@pytest.mark.llamacpp
def test_streaming(page: Page) -> None:
    chunks = events(page.run("streaming.sh"))

    head = json.loads(page.read("chunk.json"))
    assert all(list(chunk) == list(head) for chunk in chunks)
    assert all(chunk["model"] == "phi-4-mini" and chunk["object"] == head["object"] for chunk in chunks)
    last = chunks[-1]["choices"][0]
    assert last["delta"] == {} and last["finish_reason"] in ("stop", "length")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@pytest.mark.llamacpp
@pytest.mark.llguidance
def test_json_mode(page: Page) -> None:
    answer = json.loads(page.run("json_mode.sh"))

    choice = answer["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":  # a small model may also write keys up to the limit
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.llamacpp
@pytest.mark.parametrize("name", ["phi-4-mini", "gemma-1b", "gemma-4b:8bit", "auto"])
def test_the_model_names_of_the_page(page: Page, name: str) -> None:
    body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = httpx.post(f"{page.url}/v1/chat/completions", json=body, timeout=60)

    assert answer.json()["model"] == name
    assert answer.headers.get("x-octomil-routed-model") == ("starter" if name == "auto" else None)


def test_shape_of_a_response(post: Post, scripted: Page) -> None:
    shown = json.loads(scripted.read("response.json"))
    answer = post().json()

    assert shape(answer) == shape(shown)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "an-alias"
    assert answer["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "Code flows."},
        "finish_reason": "stop",
    }


def test_shape_of_a_chunk(post: Post, scripted: Page) -> None:
    shown = json.loads(scripted.read("chunk.json"))
    chunks = events(post(stream=True).text)

    assert [shape(chunk) for chunk in chunks[1:-1]] == [shape(shown)] * 3
    assert chunks[-1]["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]


def test_defaults(client: httpx.Client, post: Post) -> None:
    for fields, temperature, top_p in (({}, 0.7, 0.9), ({"temperature": 1.5, "top_p": 0.5}, 1.5, 0.5)):
        response = client.post(
            "/v1/chat/completions",
            json={"model": "plain", "messages": [{"role": "user", "content": "hi"}], **fields},
            headers={"x-enginehouse-details": "true"},
        )
        told = response.json()["enginehouse"]["parameters"]

        assert (told["temperature"]["value"], told["top_p"]["value"]) == (temperature, top_p)


@pytest.mark.parametrize("stop", ["s.", ["nothing", " flows"]])
def test_stop(post: Post, stop) -> None:
    choice = post(stop=stop).json()["choices"][0]

    assert choice["message"]["content"] in ("Code flow", "Code")
    assert choice["finish_reason"] == "stop"


def test_n(post: Post) -> None:
    assert [choice["index"] for choice in post(n=3).json()["choices"]] == [0, 1, 2]


def test_telemetry_headers_are_sent_only_when_something_acted(post: Post) -> None:
    assert [name for name in post().headers if name.startswith("x-octomil")] == []


def test_errors(client: httpx.Client, post: Post) -> None:
    def error(response: httpx.Response, status: int) -> dict:
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return response.json()["error"]

    assert error(post(temperature="hot"), 400)["code"] == "bad_request"
    assert error(post(peft="x"), 400)["code"] == "bad_request"
    assert error(client.post("/v1/chat/completions", content=b"{"), 415)["code"] == "unsupported_media_type"
    assert error(client.get("/v1/models", headers={"authorization": "Bearer no"}), 401)["code"] == "unauthorized"
    assert error(post(model="none"), 404)["code"] == "not_found"
    assert error(client.get("/v1/nothing"), 404)["code"] == "not_found"
    failed = error(post(model="failing"), 500)
    assert failed["code"] == "internal_error" and "The model failed" in failed["message"]


def test_errors_in_streams(post: Post) -> None:
    body = post(model="failing", stream=True).text

    last = json.loads(body.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "internal_error"


def test_rate_limited(client: httpx.Client, post: Post) -> None:
    body = {"model": "slow", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as running:
        text = running.iter_text()  # closes the connection when it is dropped
        assert next(text)
        refused = post(model="slow")

    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limited"
    assert int(refused.headers["retry-after"]) >= 1
