"""Whole requests over HTTP: hostile bodies, the openai SDK, plugin fields, reported fields, errors, the log."""

import json
import logging
import socket
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from attrs import evolve, field, frozen
from attrs.validators import ge, le
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginehouse.contract.rows import fields_of
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@frozen(kw_only=True)
class SpiceFields:
    spice: float = field(default=0.0, validator=[ge(0), le(1)])
    spice_kind: str = "mild"


class SpiceSampler:
    """A sampler plugin as far as the API sees it."""

    name = "spice"
    api_version = 1
    request_fields = SpiceFields
    order = 55

    def create(self, fields):
        return None


def make_settings(folder, **parts) -> Settings:
    hello = write_script(folder / "hello.json", ["Hel", "lo", " wor", "ld"])
    broken = write_script(folder / "broken.json", ["Hel", {"error": "boom"}, "lo"])
    failing = write_script(folder / "failing.json", [{"error": "boom"}])
    models = {
        "org/hello:q4": ModelSettings(source=hello, backend="scripted", aliases=("hi",), defaults={"max_tokens": 3}),
        "broken": ModelSettings(source=broken, backend="scripted"),
        "failing": ModelSettings(source=failing, backend="scripted"),
    }
    return Settings(models=models, plugins=PluginsSettings(allow=()), **parts)


def serve(settings: Settings, sampler: SpiceSampler | None = None) -> Iterator[httpx.Client]:
    registry = PluginRegistry.for_settings(settings)
    if sampler is not None:
        declared = {field.name: field for field in fields_of(sampler.request_fields, sampler.name, "test")}
        registry = evolve(registry, samplers={sampler.name: sampler}, request_fields=declared)
    with served(settings, registry, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    yield from serve(make_settings(tmp_path_factory.mktemp("scripts")), SpiceSampler())


@pytest.fixture(scope="module")
def reporting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    parts = {
        "server": ServerSettings(unsupported_parameters="report"),
        "limits": LimitsSettings(max_body_bytes=2000, max_tokens=100, max_messages=3, max_choices=2, max_stop=2),
    }
    yield from serve(make_settings(tmp_path_factory.mktemp("scripts"), **parts))


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# -- any JSON ---------------------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    "model", "messages", "prompt", "stream", "stream_options", "n", "temperature", "top_p", "top_k", "min_p", "seed",
    "stop", "max_tokens", "max_completion_tokens", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice",
    "response_format", "user", "metadata", "priority", "cache_salt", "ignore_eos", "repetition_penalty", "best_of",
    "spice", "echo", "é", "a,b",
]  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": JSON_VALUES},
        optional={"name": JSON_VALUES, "tool_calls": JSON_VALUES, "x": JSON_VALUES},
    )
    | JSON_VALUES,
    max_size=3,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=5).flatmap(
    lambda fields: st.fixed_dictionaries({"messages": MESSAGES}).map(lambda base: {**base, **fields})
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES | JSON_VALUES, path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
def test_no_json_body_makes_the_server_fail(client: httpx.Client, body, path: str) -> None:
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    response = client.post(path, content=content, headers={"content-type": "application/json"})

    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error_of(response, response.status_code)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60))
def test_no_bytes_make_the_server_fail(client: httpx.Client, content: bytes) -> None:
    response = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})

    error_of(response, 400)


@pytest.mark.parametrize("name", ["messages", "stop", "logit_bias", "metadata"])
def test_very_many_wrong_items_are_refused_quickly(client: httpx.Client, name: str) -> None:
    wrong = [[5]] * 400_000 if name in ("messages", "stop") else {str(n): [] for n in range(200_000)}
    body = json.dumps(CHAT | {name: wrong})
    began = time.process_time()  # the server is a thread of this process
    response = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})

    assert error_of(response, 400)["param"] == name
    assert len(response.text) < 5000
    assert time.process_time() - began < 5


# -- models, defaults, plugin fields ----------------------------------------------------------------


def test_aliases_and_names_with_slashes(client: httpx.Client) -> None:
    for name in ("hi", "org/hello:q4", "org%2Fhello%3Aq4"):
        assert client.get(f"/v1/models/{name}").json()["id"] == "org/hello:q4"
    assert client.post("/v1/chat/completions", json=CHAT | {"model": "hi"}).json()["model"] == "org/hello:q4"


def test_without_a_model_the_first_one_answers(client: httpx.Client) -> None:
    assert client.post("/v1/chat/completions", json=CHAT).json()["model"] == "org/hello:q4"


def test_model_defaults_apply_unless_the_request_says_otherwise(client: httpx.Client) -> None:
    default = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]
    asked = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).json()["choices"][0]

    assert (default["message"]["content"], default["finish_reason"]) == ("Hello wor", "length")
    assert (asked["message"]["content"], asked["finish_reason"]) == ("Hello", "length")


def test_plugin_fields_are_known_and_checked(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=CHAT | {"spice": 0.5, "spice_kind": "hot"})
    assert response.status_code == 200
    assert "x-enginehouse-ignored" not in response.headers

    assert error_of(client.post("/v1/completions", json={"prompt": "a", "spice": 2}), 400)["param"] == "spice"
    assert error_of(client.post("/v1/chat/completions", json=CHAT | {"spice": "x"}), 400)["param"] == "spice"


@pytest.mark.parametrize("name", ["max_completion_tokens", "top_logprobs"])
def test_fields_of_chats_are_refused_elsewhere(client: httpx.Client, reporting: httpx.Client, name: str) -> None:
    body = {"prompt": "a", name: 3}

    refused = error_of(client.post("/v1/completions", json=body), 400)
    assert (refused["param"], refused["code"]) == (name, "unsupported_parameter")
    assert reporting.post("/v1/completions", json=body).headers["x-enginehouse-unsupported"] == name
    assert "x-enginehouse-ignored" not in client.post("/v1/completions", json={"prompt": "a", name: None}).headers


# -- reporting mode and limits ------------------------------------------------------------------------


def test_unsupported_parameters_can_be_reported_instead(reporting: httpx.Client) -> None:
    response = reporting.post("/v1/chat/completions", json=CHAT | {"functions": [1], "verbosity": "low", "odd": 1})

    assert response.status_code == 200
    assert response.headers["x-enginehouse-unsupported"] == "functions, verbosity"
    assert response.headers["x-enginehouse-ignored"] == "odd"
    stream = reporting.post("/v1/chat/completions", json=CHAT | {"functions": [1], "stream": True})
    assert stream.headers["x-enginehouse-unsupported"] == "functions"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 101}, "max_tokens"),
        ({"messages": CHAT["messages"] * 4}, "messages"),
        ({"n": 3}, "n"),
        ({"stop": ["a", "b", "c"]}, "stop"),
    ],
)
def test_server_limits(reporting: httpx.Client, fields, param: str) -> None:
    assert error_of(reporting.post("/v1/chat/completions", json=CHAT | fields), 400)["param"] == param


def test_long_bodies_are_refused(reporting: httpx.Client) -> None:
    response = reporting.post("/v1/chat/completions", json=CHAT | {"user": "x" * 3000})

    assert error_of(response, 413)["code"] == "body_too_large"
    assert reporting.post("/v1/chat/completions", json=CHAT).status_code == 200


# -- engine failures ----------------------------------------------------------------------------------


def test_failure_before_the_first_byte_is_a_status(client: httpx.Client) -> None:
    error = error_of(client.post("/v1/chat/completions", json=CHAT | {"model": "failing"}), 500)
    assert error["code"] == "generation_failed"
    assert error["message"].startswith("The model failed on this request.")

    error_of(client.post("/v1/chat/completions", json=CHAT | {"model": "broken"}), 500)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_failure_in_a_stream_is_an_error_event_without_done(client: httpx.Client, path: str) -> None:
    body = {"model": "broken", "stream": True} | (CHAT if "chat" in path else {"prompt": ["a", "b"]})
    response = client.post(path, json=body)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]

    assert response.status_code == 200
    assert json.loads(events[-1])["error"]["code"] == "generation_failed"
    assert "[DONE]" not in response.text
    assert "Hel" in response.text
    assert '"finish_reason":"' not in response.text


# -- the log ------------------------------------------------------------------------------------------


def test_one_log_line_per_request(client: httpx.Client, caplog: pytest.LogCaptureFixture, access_lines) -> None:
    prompt = "nobody may read this"
    with caplog.at_level(logging.INFO, "enginehouse.access"):
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": prompt}]})
        client.post("/v1/chat/completions", json={"model": "a b\nc", "messages": [{"role": "user", "content": prompt}]})
        client.post("/v1/chat/completions", json=CHAT | {"model": "broken", "stream": True})
        client.get("/no%20where%0A")
        lines = access_lines(4)

    assert len(lines) == 4
    assert f"id={answer.json()['id']}" in lines[0]
    for part in ("status=200", "outcome=length", "model=org/hello:q4", "completion_tokens=3", "total_s="):
        assert part in lines[0]
    assert "status=404" in lines[1] and "outcome=model_not_found" in lines[1]
    assert "status=200" in lines[2] and "outcome=generation_failed" in lines[2]
    assert r'path="/no where\n"' in lines[3]
    assert prompt not in caplog.text and "Hello" not in caplog.text
    assert caplog.records[0].access["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]


# -- HTTP itself --------------------------------------------------------------------------------------


def talk(client: httpx.Client, data: bytes) -> bytes:
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


def test_what_is_no_http_gets_a_json_error(client: httpx.Client) -> None:
    head, _, body = talk(client, b"HELLO THERE\r\n\r\n").partition(b"\r\n\r\n")

    assert b" 400 " in head.splitlines()[0]
    assert json.loads(body)["error"]["code"] == "bad_request"


@pytest.mark.parametrize("line", [b"a" * 1000, b"x: " + b"a" * 500 + b"\r\n"])
def test_a_head_without_an_end_is_refused(client: httpx.Client, line: bytes) -> None:
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
        for _ in range(65_536 // len(line) + 1):
            connection.sendall(line)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


def test_long_bodies_and_many_requests_on_one_connection_are_no_long_heads(client: httpx.Client) -> None:
    body = json.dumps({"model": "none", "prompt": "x" * 300_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    one = head + b"content-length: %d\r\n\r\n" % len(body) + body
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = talk(client, one * 3 + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50 + last)

    assert answer.count(b"HTTP/1.1 404") == 3
    assert answer.count(b"HTTP/1.1 200") + answer.count(b"HTTP/1.1 503") == 51


def test_requests_without_or_with_two_hosts_are_refused(client: httpx.Client) -> None:
    for hosts in (b"", b"host: localhost\r\nhost: evil\r\n"):
        answer = talk(client, b"GET /v1/models HTTP/1.1\r\n" + hosts + b"connection: close\r\n\r\n")
        assert b" 400 " in answer.splitlines()[0]


def test_a_body_in_pieces_is_read_whole(client: httpx.Client) -> None:
    body = json.dumps(CHAT).encode()
    pieces = (body[n : n + 7] for n in range(0, len(body), 7))
    response = client.post("/v1/chat/completions", content=pieces, headers={"content-type": "application/json"})

    assert response.status_code == 200


def test_two_requests_on_one_connection(client: httpx.Client) -> None:
    body = json.dumps(CHAT | {"stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    one = head + b"content-length: %d\r\n" % len(body)
    answer = talk(client, one + b"\r\n" + body + one + b"connection: close\r\n\r\n" + body)

    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.count(b"data: [DONE]") == 2


# -- the openai SDK -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdk(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1".replace("//v1", "/v1"), api_key="x", max_retries=0) as sdk:
        yield sdk


def test_sdk_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="hi", messages=CHAT["messages"], n=2, seed=1, stop=["wor"], max_completion_tokens=9, logprobs=True
    )

    assert [choice.index for choice in answer.choices] == [0, 1]
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", "Hello ", "stop")
    assert answer.choices[0].logprobs.content[0].token == "Hel"
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_sdk_chat_streamed(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="hi", messages=CHAT["messages"], stream=True, stream_options={"include_usage": True}, max_tokens=9
    )
    chunks = list(stream)

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 4


def test_sdk_completions_and_models(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="hi", prompt=["a", "b"], logprobs=1, max_tokens=2)

    assert [choice.text for choice in answer.choices] == ["Hello", "Hello"]
    assert answer.choices[0].logprobs.text_offset == [0, 3]
    assert [model.id for model in sdk.models.list()] == ["org/hello:q4", "broken", "failing"]
    assert sdk.models.retrieve("org/hello:q4").id == "org/hello:q4"


def test_sdk_errors(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.chat.completions.create(model="none", messages=CHAT["messages"])
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="hi", messages=CHAT["messages"], temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.APIError, match="The model failed"):
        list(sdk.chat.completions.create(model="broken", messages=CHAT["messages"], stream=True))
