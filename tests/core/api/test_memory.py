"""Clients that make the server keep bytes: unfinished heads and bodies, waiting requests, answers that nobody reads.

Each of these stays within ``limits.max_client_bytes``, others are served meanwhile, and in the end nothing is held.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from enginehouse.settings.auth import AuthSettings, KeySettings
from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served
from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.waiting import wait_until

KIB = 1024
MIB = 1024 * KIB
TOTAL = 8 * MIB
SHARE = 3 * MIB
PROMPT = {"prompt": "hi"}
ALICE, BOB = ({"authorization": f"Bearer key-of-{name}"} for name in ("alice", "bob"))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    """A server with two keys and small bounds; the client has none."""
    scripts = {"fast": ["a"], "slow": [{"delay_s": 20.0}, "a"], "long": ["x" * 10_000] * 100}
    keys = tuple(
        KeySettings(name=name, key=f"key-of-{name}", scopes=("infer", "metrics", "admin")) for name in ("alice", "bob")
    )
    settings = Settings(
        server=ServerSettings(head_timeout_s=20.0, body_timeout_s=20.0),
        limits=LimitsSettings(max_client_bytes=TOTAL, max_client_bytes_per_key=SHARE),
        auth=AuthSettings(keys=keys),
        models={
            name: ModelSettings(source=write_script(tmp_path / f"{name}.json", script), backend="scripted")
            for name, script in scripts.items()
        },
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=60) as client:
        yield client


@contextlib.contextmanager
def connections(url: httpx.URL, number: int) -> Iterator[list[socket.socket]]:
    opened = [socket.create_connection((url.host, url.port), timeout=60) for _ in range(number)]
    try:
        yield opened
    finally:
        for connection in opened:
            connection.close()


def send_all(opened: list[socket.socket], data: bytes, seconds: float, *, num_answers: int = 0) -> dict[int, bytes]:
    """Send to all at once, no more where an answer comes; returns what the answers began with, by connection.

    It ends after ``seconds``, but not before ``num_answers`` have come, if they come within a minute.
    """
    answers: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for number, connection in enumerate(opened):
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, (number, [memoryview(data)]))
        began = time.monotonic()
        while selector.get_map() and time.monotonic() < began + (seconds if len(answers) >= num_answers else 60):
            for key, events in selector.select(timeout=0.1):
                number, rest = key.data
                try:
                    if events & selectors.EVENT_READ:
                        answers[number] = key.fileobj.recv(4096)
                        selector.unregister(key.fileobj)
                        continue
                    rest[0] = rest[0][key.fileobj.send(rest[0][: 256 * KIB]) :]
                except BlockingIOError:
                    continue
                except ConnectionError:
                    answers.setdefault(number, b"")
                    selector.unregister(key.fileobj)
                    continue
                if not rest[0]:
                    selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
    return answers


def fill(client: httpx.Client, opened: list[socket.socket], data: bytes, kept: int) -> None:
    """Send by one connection after the other, each when ``kept`` bytes of the one before it are held."""
    for number, connection in enumerate(opened, 1):
        connection.settimeout(60)
        connection.sendall(data)
        deadline = time.monotonic() + 60
        while figures(client)[0] < number * kept:
            assert time.monotonic() < deadline, (number, figures(client))
            time.sleep(0.005)


def figures(client: httpx.Client) -> tuple[int, dict[str, int]]:
    """Bytes that clients hold, and what was refused for want of them, by limit."""
    text = client.get("/metrics", headers=BOB).text
    refused = re.findall(r'enginehouse_client_memory_refusals_total\{limit="(\w+)"\} (\S+)', text)
    held = re.search(r"^enginehouse_client_memory_bytes (\S+)", text, re.MULTILINE)
    assert held is not None
    return int(float(held[1])), {limit: int(float(number)) for limit, number in refused}


def check_served(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    response = client.post("/v1/completions", json=PROMPT | {"model": "fast"}, headers=BOB)
    assert response.status_code == 200, response.text


def wait_nothing_held(client: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while (held := figures(client)[0]) > 0:
        assert time.monotonic() < deadline, held
        time.sleep(0.05)


def post(body: bytes, length: int, headers: dict[str, str]) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"{head}content-length: {length}\r\n\r\n".encode() + body


def refusals(answers: dict[int, bytes]) -> set[bytes]:
    return {answer[9:12] for answer in answers.values() if answer}


def test_idle_heads(client: httpx.Client) -> None:
    with connections(client.base_url, 150) as opened:
        sent = b"GET /health HTTP/1.1\r\nx: " + b"y" * 60 * KIB
        fill(client, opened[:45], sent, 40 * KIB)
        answers = send_all(opened[45:], sent, 2.0, num_answers=55)
        held, refused = figures(client)
        check_served(client)

    assert SHARE // 2 < held <= SHARE, (held, refused, answers)
    assert refused["key"] > 50 and refusals(answers) <= {b"429"}
    assert any(
        b"retry-after: 1" in answer and b"limits.max_client_bytes_per_key" in answer for answer in answers.values()
    )
    wait_nothing_held(client)


def test_waiting_requests(client: httpx.Client) -> None:
    body = json.dumps(PROMPT | {"model": "slow"}).encode()
    with connections(client.base_url, 150) as opened:
        sent = post(body, len(body), ALICE) + b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1700
        fill(client, opened[:40], sent, 40 * KIB)
        answers = send_all(opened[40:], sent, 2.0, num_answers=55)
        held, refused = figures(client)
        check_served(client)

    assert SHARE // 2 < held <= 2 * SHARE, refused  # Alice's, and that of requests not recognised yet
    assert refused["key"] > 50 and refusals(answers) <= {b"429", b"401"}
    wait_nothing_held(client)


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_unfinished_bodies(client: httpx.Client, framing: str) -> None:
    """Each is within ``max_body_bytes``; together they are not within the key's share."""
    part = b"[" + b" " * (700 * KIB)
    sent = post(part, MIB, ALICE)
    if framing == "chunks":
        sent = post(b"%x\r\n%b\r\n" % (len(part), part), 0, ALICE).replace(
            b"content-length: 0", b"transfer-encoding: chunked"
        )
    with connections(client.base_url, 30) as opened:
        fill(client, opened[:3], sent, len(part))
        answers = send_all(opened[3:], sent, 3.0, num_answers=22)
        held, refused = figures(client)
        check_served(client)

    assert SHARE // 2 < held <= SHARE, (held, refused, answers)
    assert refused["key"] >= 20 and refusals(answers) == {b"429"}
    assert all(b"retry-after: 1" in answer for answer in answers.values() if answer)
    wait_nothing_held(client)


def test_a_body_that_never_fits_is_refused_as_too_large(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json=PROMPT | {"user": "x" * SHARE}, headers=ALICE)

    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    wait_nothing_held(client)


def test_queued_requests_hold_their_bodies(client: httpx.Client) -> None:
    body = json.dumps(PROMPT | {"model": "slow", "user": "x" * (MIB - 200)}).encode()
    with connections(client.base_url, 4) as opened:
        fill(client, opened[:3], post(body, len(body), ALICE), len(body))
        assert select.select(opened[:3], (), (), 0)[0] == []
        answers = send_all(opened[3:], post(body, len(body), ALICE), 20)
        check_served(client)

        assert refusals(answers) == {b"429"}
        # What ``check_served`` asked for is held until a moment after its answer.
        wait_until(lambda: figures(client) == (3 * len(body), {"key": 1}), lambda: figures(client))
    wait_nothing_held(client)


@pytest.mark.parametrize("stream", [True, False])
def test_answers_that_are_not_read(client: httpx.Client, stream: bool) -> None:
    """A megabyte each, of which the system takes a part."""
    body = json.dumps(PROMPT | {"model": "long", "stream": stream}).encode()
    request = post(body, len(body), ALICE)
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(40):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((client.base_url.host, client.base_url.port))
            connection.sendall(request * 3)
            opened.append(connection)
        deadline, held = time.monotonic() + 60, [0]
        while held[-1] < 64 * KIB or len(held) < 20:
            assert time.monotonic() < deadline, held
            held.append(figures(client)[0])
            check_served(client)

    assert max(held) <= SHARE
    wait_nothing_held(client)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_what_waits_behind_an_unread_answer_counts(tmp_path: Path, num_prompts: int) -> None:
    """The engine goes on while the client does not read; its events are many times what the connection buffers."""
    settings = Settings(
        models={"m": ModelSettings(source="fake", backend="fake", isolation="thread", context=4096)},
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=60) as client:
        fields = {"stream": True, "ignore_eos": True, "max_tokens": 3000 // num_prompts, "n": 4, "logprobs": 5}
        body = json.dumps({"prompt": ["hi"] * num_prompts, **fields}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((client.base_url.host, client.base_url.port))
            connection.sendall(post(body, len(body), {}))
            deadline = time.monotonic() + 60
            while (held := figures(client)[0]) < 2 * MIB:
                assert time.monotonic() < deadline, held
                time.sleep(0.1)
        wait_nothing_held(client)


def test_the_rows_of_a_pooling_request_count() -> None:
    """A short request has many bytes of them: equal texts are computed once. Numbers count with their text."""
    settings = Settings(
        limits=LimitsSettings(max_client_bytes=2 * MIB),
        models={"m": ModelSettings(source="fake-pooler", backend="fake-pooler", options={"dimensions": 4096})},
        plugins=PluginsSettings(allow=("pooling",)),
    )
    with served(settings, timeout=60) as client:
        few, many = (client.post("/v1/embeddings", json={"input": ["a"] * number}) for number in (16, 32))
        short = client.post("/v1/embeddings", json={"input": ["a"] * 32, "encoding_format": "base64"})

        assert few.status_code == 200 and len(few.json()["data"]) == 16
        assert short.status_code == 200
        assert many.status_code == 503 and many.json()["error"]["code"] == "server_overloaded"
        assert "limits.max_client_bytes" in many.text and many.headers["retry-after"] == "1"
        assert figures(client)[1] == {"server": 1}

        def computed() -> float:
            found = re.search(r"^enginehouse_pooled_texts_total\S* (\S+)", client.get("/metrics").text, re.MULTILINE)
            return float(found[1]) if found is not None else 0.0

        # The worker reports about once a second; the third request was refused before it was computed.
        wait_until(lambda: computed() == 2, lambda: f"two texts; there are {computed()}")
        wait_nothing_held(client)


def test_an_answer_that_is_never_read_is_given_up(tmp_path: Path) -> None:
    """Also where the connection is to close when it has been read."""
    settings = Settings(
        server=ServerSettings(body_timeout_s=0.5),
        models={
            "m": ModelSettings(source=write_script(tmp_path / "a.json", ["x" * 10_000] * 1000), backend="scripted")
        },
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=60) as client:
        body = json.dumps(PROMPT).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((client.base_url.host, client.base_url.port))
            connection.sendall(post(body, len(body), {"connection": "close"}))
            wait_until(lambda: 'enginehouse_requests_total{endpoint="/completions"' in client.get("/metrics").text)
            wait_nothing_held(client)
            connection.settimeout(60)
            num_received = 0
            while more := connection.recv(65536):
                num_received += len(more)

    assert num_received < 10 * 1000 * 1000  # what the system had taken


def test_without_keys_one_caller_may_hold_everything(tmp_path: Path) -> None:
    settings = Settings(
        limits=LimitsSettings(max_client_bytes=2 * MIB),
        models={"m": ModelSettings(source=write_script(tmp_path / "a.json", ["a"]), backend="scripted")},
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=60) as client:
        with connections(client.base_url, 4) as opened:
            fill(client, opened[:3], post(b"[" * 500 * KIB, 600 * KIB, {}), 500 * KIB)
            assert select.select(opened[:3], (), (), 0)[0] == []
            assert refusals(send_all(opened[3:], post(b"[" * 500 * KIB, 600 * KIB, {}), 20)) == {b"503"}
            assert client.get("/health").status_code == 200
            refused = client.post("/v1/completions", json=PROMPT | {"user": "x" * MIB})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_overloaded"
            assert refused.headers["retry-after"] == "1"
        deadline = time.monotonic() + 60
        while client.post("/v1/completions", json=PROMPT | {"user": "x" * MIB}).status_code != 200:
            assert time.monotonic() < deadline


# -- the whole of it, with the defaults ---------------------------------------------------------------


def rss(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith("VmRSS:"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_a_thousand_unfinished_bodies_fit_a_small_machine(tmp_path: Path) -> None:
    """Each says that it has 16 MiB and sends most of it."""
    source = write_script(tmp_path / "script.json", ["a"])
    config = tmp_path / "enginehouse.toml"
    config.write_text(f'[models.m]\nbackend = "scripted"\nsource = "{source}"\n', encoding="utf-8")
    part = b'{"user":"' + b"x" * (15 * MIB)
    with started_server("--config", config) as server:
        url, before = httpx.URL(str(server.url)), rss(server)
        with connections(url, 1000) as opened:
            answers = send_all(opened, post(part, 16 * MIB, {}), 20.0)
            most = rss(server)
            assert httpx.get(url.join("/health"), timeout=60).status_code == 200

    assert len(answers) > 900 and refusals(answers) == {b"503"}
    assert most - before < 512 * MIB
