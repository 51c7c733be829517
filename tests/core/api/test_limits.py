"""What one request may ask for: sizes as settings, images that are never fetched, prompts that are not logged."""

import json
import logging
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

from .harness import chat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    source = write_script(tmp_path_factory.mktemp("script") / "hello.json", ["Hel", "lo"])
    return ModelSettings(source=source, backend="scripted")


def serve(model: ModelSettings, **parts) -> Iterator[httpx.Client]:
    settings = Settings(models={"m": model}, plugins=PluginsSettings(allow=()), **parts)
    with served(settings, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def narrow(model: ModelSettings) -> Iterator[httpx.Client]:
    """A server with small limits."""
    limits = LimitsSettings(
        max_body_bytes=5000, max_header_bytes=2000, max_message_bytes=300, max_json_depth=5, max_messages=3
    )
    yield from serve(model, limits=limits)


def test_limits_are_settings(narrow: httpx.Client) -> None:
    def refused(body, status: int, param: str | None = None, **headers) -> None:
        response = narrow.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == status, response.text
        assert response.json()["error"]["param"] == param

    long = {"role": "user", "content": [{"type": "text", "text": "x" * 280}]}
    refused(chat(user="x" * 5000), 413)
    refused(chat(messages=[chat()["messages"][0], long]), 400, "messages[1]")
    refused(chat(messages=[{"role": "user", "content": "x"}] * 4), 400, "messages")
    refused(chat(logit_bias={"1": [[[[[[1]]]]]]}), 400)
    refused(chat(nobody_knows_me=[[[[[[1]]]]]]), 400)
    refused(chat(), 431, filler="x" * 2000)
    assert narrow.post("/v1/chat/completions", json=chat(), headers={"filler": "x" * 1500}).status_code == 200
    fits = [{"role": "user", "content": "x" * 250}] * 3
    assert narrow.post("/v1/chat/completions", json=chat(messages=fits)).status_code == 200


def test_a_body_that_says_it_is_too_long_is_not_waited_for(narrow: httpx.Client) -> None:
    address = (narrow.base_url.host, narrow.base_url.port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(head + b"content-length: 9999999999\r\n\r\n{")
        received = connection.recv(65536)

    assert received.startswith(b"HTTP/1.1 413 ")
    assert narrow.post("/v1/chat/completions", json=chat()).status_code == 200


@pytest.mark.parametrize("chunks", [1, 50])
def test_a_long_head_ends_the_connection(narrow: httpx.Client, chunks: int) -> None:
    """However it comes, and what follows it is not served."""
    host, port = narrow.base_url.host, narrow.base_url.port
    body = json.dumps(chat()).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nfiller: " + b"x" * 3000
    head += b"\r\ncontent-type: application/json\r\ncontent-length: " + str(len(body)).encode() + b"\r\n\r\n"
    data = (head + body) * 2
    with socket.create_connection((host, port), timeout=60) as connection:
        size = len(data) // chunks + 1
        received = b""
        try:
            for start in range(0, len(data), size):
                connection.sendall(data[start : start + size])
            while more := connection.recv(65536):
                received += more
        except ConnectionError:  # it closed while we still wrote
            pass

    if received or chunks == 1:
        assert received.startswith(b"HTTP/1.1 431 ") and received.count(b"HTTP/1.1") == 1
    assert narrow.post("/v1/chat/completions", json=chat()).status_code == 200


@pytest.fixture
def image_server() -> Iterator[tuple[str, list]]:
    """A listener that counts who connects."""
    connections: list = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        stop = threading.Event()

        def accept() -> None:
            while not stop.is_set():
                try:
                    connection, address = listener.accept()
                except TimeoutError:
                    continue
                connections.append(address)
                connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/image.png", connections
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize("stream", [False, True])
def test_images_are_refused_and_never_fetched(narrow: httpx.Client, image_server, role: str, stream: bool) -> None:
    url, connections = image_server
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "file", "file": {"file_id": url}},
    ]
    for part in parts:
        content = [{"type": "text", "text": "What is this?"}, part]
        messages = [{"role": role, "content": content, "tool_call_id": "c"}]
        response = narrow.post("/v1/chat/completions", json=chat(messages=messages, stream=stream))

        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "messages[0].content[1]" and error["code"] == "unsupported_parameter"
    assert narrow.post("/v1/chat/completions", json=chat()).status_code == 200
    assert connections == []


SECRET = "my grandmother's recipe"


@pytest.mark.parametrize(
    ("server_allows", "request_allows", "logged"),
    [(True, True, True), (True, False, False), (True, None, False), (False, True, False), (False, None, False)],
)
def test_prompts_are_logged_only_when_both_say_so(
    model: ModelSettings, caplog: pytest.LogCaptureFixture, server_allows: bool, request_allows, logged: bool
) -> None:
    with caplog.at_level(logging.DEBUG):
        for client in serve(model, server=ServerSettings(log_prompts=server_allows)):
            for path, prompt in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "stream": True}),
                ("/v1/completions", {"prompt": [SECRET, SECRET]}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "temperature": "hot"}),
                ("/v1/nothing", {"prompt": SECRET}),
            ):
                response = client.post(path, json={**prompt, "log_prompt": request_allows})
                ignored = response.headers.get("x-enginehouse-ignored")
                if response.status_code == 200:
                    assert ignored == ("log_prompt" if request_allows and not server_allows else None)

    with_secret = [record for record in caplog.records if SECRET in record.getMessage()]
    assert {record.name for record in with_secret} == ({"enginehouse.prompts"} if logged else set())
    assert len(with_secret) == (4 if logged else 0)
