"""Requests that come before the one ahead of them is answered: in order, a few at a time, in little memory."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from attrs import define, field

from enginehouse.settings.config import ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.server_thread import server_thread
from enginehouse_testkit.waiting import wait_until

GET = b"GET / HTTP/1.1\r\nHost:localhost\r\n\r\n"
MIB = 1024 * 1024


def chat(**fields) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def post(body: bytes, framing: bytes | None = None) -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + (framing or b"content-length: %d" % len(body)) + b"\r\n\r\n" + body


def in_chunks(body: bytes, size: int, last: bytes = b"0\r\n\r\n") -> bytes:
    parts = [body[begin : begin + size] for begin in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + last


def read_answers(connection: socket.socket, number: int) -> list[tuple[int, bytes]]:
    """Status and body of so many whole answers."""
    received, answers = b"", []
    while len(answers) < number:
        head, found, rest = received.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n") if found else []
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if found and len(rest) >= length:
            answers.append((int(head[9:12]), rest[:length]))
            received = rest[length:]
            continue
        more = connection.recv(65536)
        assert more, (answers, received)
        received += more
    assert received == b""
    return answers


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.URL]:
    folder = tmp_path_factory.mktemp("scripts")
    scripts = {"fast": ["Hel", "lo"], "slow": ["a", {"delay_s": 0.5}, "b"], "held": ["a", {"delay_s": 600.0}, "b"]}
    settings = Settings(
        models={
            name: ModelSettings(source=write_script(folder / f"{name}.json", script), backend="scripted")
            for name, script in scripts.items()
        },
        server=ServerSettings(head_timeout_s=3.0),
        plugins=PluginsSettings(allow=()),
    )
    with server_thread(settings) as running:
        while httpx.get(f"{running.url}/health", timeout=60).status_code != 200:
            time.sleep(0.02)
        yield httpx.URL(running.url)


def connect(url: httpx.URL) -> socket.socket:
    return socket.create_connection((url.host, url.port), timeout=20)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 10**6])
def test_every_request_is_answered_in_order_however_it_is_cut(url: httpx.URL, size: int) -> None:
    body = chat(model="fast", user="\r\n\r\n")
    requests = [
        (GET, 404),
        (post(body), 200),
        (post(in_chunks(body, 5), b"transfer-encoding: chunked"), 200),
        (post(in_chunks(body, 5), b"transfer-encoding: gzip, chunked"), 415),
        (post(in_chunks(b'{"x":\r\n\r\n1}', 2), b"transfer-encoding: chunked"), 400),
        (
            post(in_chunks(body, 9, b"0\r\nX-Trailer: a\r\nhost: evil.example\r\n\r\n"), b"transfer-encoding: chunked"),
            200,
        ),
        (b"\r\n\r\n" + GET, 404),
    ]
    sent = b"".join(request for request, _ in requests)
    with connect(url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        for begin in range(0, len(sent), size):
            connection.sendall(sent[begin : begin + size])
        answers = read_answers(connection, len(requests))

    assert [status for status, _ in answers] == [status for _, status in requests]


def test_more_requests_than_are_kept_are_all_answered(url: httpx.URL) -> None:
    number = 5000
    with connect(url) as connection:
        sender = threading.Thread(target=connection.sendall, args=(GET * number,))
        sender.start()
        answers = read_answers(connection, number)
        sender.join()

    assert {status for status, _ in answers} == {404}


def test_a_client_that_leaves_with_requests_waiting_is_noticed(url: httpx.URL) -> None:
    with connect(url) as connection:
        connection.sendall(post(chat(model="held")) + GET * 10)
        wait_until(lambda: 'enginehouse_open_requests{model="held"} 1.0' in metrics(url), "the request runs")
    wait_until(lambda: 'enginehouse_disconnects_total{model="held"} 1.0' in metrics(url), "it is counted")


def metrics(url: httpx.URL) -> str:
    return httpx.get(url.join("/metrics"), timeout=60).text


def test_what_follows_a_request_does_not_break_its_answer(url: httpx.URL) -> None:
    """Not HTTP, but the answer before it is under way."""
    with connect(url) as connection:
        connection.sendall(post(chat(model="slow", stream=True)) + b"\0\0garbage\r\n\r\n")
        received = b""
        while more := connection.recv(65536):
            received += more

    stream, _, rest = received.partition(b"data: [DONE]")
    assert stream.count(b"HTTP/1.1 ") == 1 and b"HTTP/1.1 400 " in rest


@pytest.mark.parametrize(
    "endless",
    [b"x" * 1000, b"x: y\r\n" * 200],
    ids=["field", "fields"],
)
def test_fields_after_the_last_chunk_are_bounded(url: httpx.URL, endless: bytes) -> None:
    with connect(url) as connection:
        connection.sendall(post(b"2\r\n{}\r\n0\r\nx: ", b"transfer-encoding: chunked"))
        connection.sendall(endless * (MIB // len(endless)))
        connection.settimeout(3)

        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")


# -- a client that never reads ------------------------------------------------------------------------


@define(eq=False)
class Watch:
    """What others see of a server meanwhile."""

    server: ServerProcess
    until: float
    gaps_s: list[float] = field(factory=list)
    healths_s: list[float] = field(factory=list)
    late_s: list[float] = field(factory=list)
    """How much longer than asked for this thread slept: the share of the machine in the other times."""
    rss_bytes: list[int] = field(factory=list)

    def read_stream(self) -> None:
        body = json.loads(chat(stream=True, max_tokens=100_000))
        with httpx.stream("POST", f"{self.server.url}/v1/chat/completions", json=body, timeout=30) as response:
            last = time.monotonic()
            for _ in response.iter_raw():
                now = time.monotonic()
                self.gaps_s.append(now - last)
                last = now
                if now > self.until:
                    break

    def look(self) -> None:
        with httpx.Client(base_url=str(self.server.url), timeout=30) as client:
            while time.monotonic() < self.until:
                self.rss_bytes.append(rss(self.server))
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                answered = time.monotonic()
                self.healths_s.append(answered - began)
                time.sleep(0.1)
                self.late_s.append(time.monotonic() - answered - 0.1)


def rss(server: ServerProcess) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def send_without_reading(server: ServerProcess, request: bytes, number: int, until: float) -> None:
    """Send the same request again and again on so many connections, as fast as the server takes it."""
    url, data = httpx.URL(str(server.url)), memoryview(request * 1000)
    with selectors.DefaultSelector() as selector:
        for _ in range(number):
            connection = socket.create_connection((url.host, url.port), timeout=20)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_WRITE, [0])
        while time.monotonic() < until:
            for key, _ in selector.select(timeout=0.1):
                connection, position = key.fileobj, key.data
                position[0] = (position[0] + connection.send(data[position[0] :])) % len(data)
        for key in list(selector.get_map().values()):
            key.fileobj.close()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
@pytest.mark.parametrize(
    ("num_connections", "seconds", "share"),
    [
        pytest.param(2, 3.0, None, id="short"),
        pytest.param(1, 30.0, 0.98, id="one", marks=pytest.mark.slow),
        pytest.param(20, 30.0, 0.98, id="twenty", marks=pytest.mark.slow),
    ],
)
def test_requests_whose_answers_are_not_read_cost_little(
    tmp_path: Path, num_connections: int, seconds: float, share: float | None
) -> None:
    """Times hold for that share of what is measured, in the long cases, beside the delays of the machine itself."""
    source = write_script(tmp_path / "script.json", [" tick", {"delay_s": 0.01}], loop=True)
    config = tmp_path / "enginehouse.toml"
    config.write_text(f'[models.m]\nbackend = "scripted"\nsource = "{source}"\n', encoding="utf-8")
    with started_server("--config", config) as server:
        before = rss(server)
        watch = Watch(server, time.monotonic() + seconds)
        threads = [threading.Thread(target=watch.read_stream), threading.Thread(target=watch.look)]
        flood = (server, GET, num_connections, watch.until)
        threads.append(threading.Thread(target=send_without_reading, args=flood))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert max(watch.rss_bytes) - before < 64 * MIB
    assert watch.gaps_s and watch.healths_s
    if share is not None:
        late_s = quantile(watch.late_s, share)
        assert quantile(watch.gaps_s, share) < 0.2 + late_s
        assert quantile(watch.healths_s, share) < 0.1 + late_s


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]
