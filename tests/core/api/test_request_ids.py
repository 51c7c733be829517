"""The id of a request: in every answer, a client's own where it is a word, and nothing that breaks headers or logs."""

import logging
import socket
from collections.abc import Iterator

import httpx
import pytest

from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    source = write_script(tmp_path_factory.mktemp("ids") / "hello.json", ["Hel", "lo"])
    settings = Settings(
        models={"m": ModelSettings(source=source, backend="scripted")}, plugins=PluginsSettings(allow=())
    )
    with served(settings, timeout=20) as client:
        yield client


def send(client: httpx.Client, *header_lines: bytes) -> bytes:
    """One raw request for the list of models, with further header lines."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
        head = b"\r\n".join(
            [b"GET /v1/models HTTP/1.1", b"host: localhost", b"connection: close", *header_lines, b"", b""]
        )
        connection.sendall(head)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("GET", "/health", None, 200),
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/chat/completions", None, 405),
        ("POST", "/v1/chat/completions", CHAT, 200),
        ("POST", "/v1/chat/completions", CHAT | {"stream": True}, 200),
        ("POST", "/v1/chat/completions", {}, 400),
        ("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 2}, 200),
    ],
)
def test_every_answer_has_an_id(client: httpx.Client, method: str, path: str, body: object, status: int) -> None:
    own = client.request(method, path, json=body)
    sent = client.request(method, path, json=body, headers={"x-request-id": "mine-1.2_3"})

    assert own.status_code == sent.status_code == status
    assert own.headers.get_list("x-request-id") == [own.headers["x-request-id"]] and own.headers["x-request-id"]
    assert sent.headers.get_list("x-request-id") == ["mine-1.2_3"]


def test_without_one_it_is_that_of_the_answer(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=CHAT)

    assert answer.headers["x-request-id"] == answer.json()["id"]


def test_with_one_the_answer_keeps_its_own(client: httpx.Client) -> None:
    """Two running requests may have the same id; their answers may not."""
    answer = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"})

    assert answer.headers["x-request-id"] == "mine" and answer.json()["id"].startswith("chatcmpl-")


@pytest.mark.parametrize(
    "value", [b"two words", b"a" * 129, b"a,b", b'"quoted"', "ümlaut".encode(), b"tab\there", b"a;b", b""]
)
def test_what_is_no_word_is_refused_and_not_repeated(client: httpx.Client, value: bytes) -> None:
    answer = send(client, b"x-request-id: " + value)
    head = answer.partition(b"\r\n\r\n")[0]

    assert head.startswith(b"HTTP/1.1 400")
    assert b'"param":"X-Request-Id"' in answer
    assert head.count(b"x-request-id: req-") == 1


def test_several_ids_are_refused(client: httpx.Client) -> None:
    assert send(client, b"x-request-id: a", b"x-request-id: b").startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "line", [b"x-request-id: a\rx-evil: 1", b"x-request-id: a\nx-evil: 1", b"x-request-id: a\x00b"]
)
def test_no_header_is_injected(client: httpx.Client, line: bytes) -> None:
    head = send(client, line).partition(b"\r\n\r\n")[0]

    assert b"x-evil" not in head.lower()
    assert b"\x00" not in head


def test_the_log_has_the_same_id(client: httpx.Client, caplog: pytest.LogCaptureFixture, access_lines) -> None:
    with caplog.at_level(logging.INFO, "enginehouse.access"):
        answer = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-2"})
        refused = client.post("/v1/chat/completions", json={})
        lines = access_lines(2)

    assert f"id=mine-2 answer_id={answer.json()['id']} " in lines[0]
    assert f"id={refused.headers['x-request-id']} " in lines[1] and "outcome=invalid_value" in lines[1]


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70_000 + b"\r\n\r\n"]
)
def test_what_is_no_request_has_an_id_and_a_line_too(
    client: httpx.Client, data: bytes, caplog: pytest.LogCaptureFixture, access_lines
) -> None:
    with caplog.at_level(logging.INFO, "enginehouse.access"):
        with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
            connection.sendall(data)
            answer = connection.recv(65536)
        (line,) = access_lines(1)
    request_id = answer.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()

    assert request_id.startswith("req-")
    assert f"id={request_id} method=- path=- status={answer.split()[1].decode()} outcome=" in line
