"""Group J: models, malformed requests, too long prompts."""

import time
from urllib.parse import quote

import pytest

from .client import Server, check_client_error

JSON = {"content-type": "application/json"}
PATHS = ["/v1/chat/completions", "/v1/completions"]


def test_h27_models(server: Server) -> None:
    listed = server.client.get("/v1/models").json()

    assert listed["object"] == "list"
    for model in listed["data"]:
        assert model["object"] == "model"
        assert isinstance(model["created"], int) and isinstance(model["owned_by"], str)
        one = server.client.get(f"/v1/models/{quote(model['id'], safe='')}")
        assert one.status_code == 200 and one.json()["id"] == model["id"]
    assert server.model in [model["id"] for model in listed["data"]]
    assert server.chat(max_tokens=1)["model"] == server.model


@pytest.mark.parametrize("name", ["no-such-model", "../../etc", "org/model:q4", "/etc/passwd", ""])
def test_h27_unknown_models(server: Server, name: str) -> None:
    error = check_client_error(server.try_chat(model=name), "model", status=404)
    assert error["code"] == "model_not_found"
    if name and not name.startswith(("/", ".")):
        check_client_error(server.client.get(f"/v1/models/{name}"), status=404)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":',
        b"",
        b"[]",
        b'"x"',
        b"42",
        b"null",
        b'{"model": "\xff\xfe"}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"temperature": NaN}',
        b'{"seed": 1' + b"0" * 10_000 + b"}",
        b'{"temperature": 1e999}',
        b"{} {}",
    ],
)
def test_h28_malformed_bodies(server: Server, path: str, body: bytes) -> None:
    check_client_error(server.client.post(path, content=body, headers=JSON))


def test_h28_still_alive(server: Server) -> None:
    server.check_alive()


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", None])
def test_h28_other_content_types(server: Server, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    response = server.client.post("/v1/chat/completions", content=b"{}", headers=headers)

    check_client_error(response, status=415)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("messages", {}),
        ("stream", "yes"),
        ("stream", 1),
        ("max_tokens", []),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", {}),
        ("tools", "t"),
        ("model", 5),
        ("model", ["a"]),
        ("seed", "1"),
        ("logit_bias", "x"),
        ("user", 5),
        ("stream_options", 1),
        ("n", []),
        ("top_p", {}),
        ("logprobs", "true"),
        ("ignore_eos", 0),
    ],
)
def test_h28_wrong_types_name_the_field(server: Server, name: str, value) -> None:
    check_client_error(server.try_chat(**{name: value}), name)


def test_h28_unknown_paths_and_methods(server: Server) -> None:
    check_client_error(server.client.get("/v1/nothing"), status=404)
    check_client_error(server.client.post("/nothing", json={}), status=404)
    assert server.client.post("/", json={}).status_code in (404, 405)  # plugins' surfaces have it for GET and HEAD
    response = server.client.get("/v1/chat/completions")
    check_client_error(response, status=405)
    assert "POST" in response.headers["allow"]
    check_client_error(server.client.delete("/v1/models"), status=405)


@pytest.mark.parametrize("stream", [False, True])
def test_h29_prompt_longer_than_the_context(server: Server, stream: bool) -> None:
    long = "word " * 60_000
    began = time.perf_counter()
    for response, param in (
        (server.try_chat(messages=[{"role": "user", "content": long}], stream=stream), "messages"),
        (server.try_complete(prompt=long, stream=stream), "prompt"),
    ):
        error = check_client_error(response, param)
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "context_length_exceeded"
        numbers = [int(word) for word in error["message"].split() if word.isdigit()]
        # The length alone may tell that it does not fit; then the number of tokens is a lower bound, and says so.
        assert len(numbers) >= 2 and max(numbers) > (3000 if "at least" in error["message"] else 10_000)
    assert time.perf_counter() - began < 60
    server.check_alive()


def test_h29_max_tokens_beyond_the_context_ends_there(server: Server) -> None:
    models = server.client.get("/v1/models").json()["data"]
    context = next(model["max_context"] for model in models if model["id"] == server.model)
    prompt_tokens = server.complete(prompt="a " * 50, max_tokens=1)["usage"]["prompt_tokens"]
    per_word = max(1, round(prompt_tokens / 50))
    words = (context - 60) // per_word
    answer = server.complete(prompt="a " * words, max_tokens=100_000, ignore_eos=True)
    usage = answer["usage"]

    assert usage["total_tokens"] <= context + 1
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    server.check_alive()
