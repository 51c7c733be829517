"""What comes over the wire and is no proper request: half-sent, smuggled, compressed, ambiguous, meant for the log."""

from __future__ import annotations

import codecs
import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from enginehouse.settings.config import LimitsSettings, ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

from .harness import chat

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


BODY = json.dumps(chat()).encode()


def whole(head: bytes = HEAD, body: bytes = BODY) -> bytes:
    return head + b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server that waits a second for heads and bodies."""
    folder = tmp_path_factory.mktemp("scripts")
    words = write_script(folder / "hello.json", ["Hel", "lo"])
    slow = write_script(folder / "slow.json", [item for n in range(40) for item in (f" {n}", {"delay_s": 0.05})])
    settings = Settings(
        server=ServerSettings(head_timeout_s=1.0, body_timeout_s=1.0),
        limits=LimitsSettings(max_headers=50),
        models={
            "m": ModelSettings(source=words, backend="scripted"),
            "slow": ModelSettings(source=slow, backend="scripted"),
        },
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=60) as client:
        yield client


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    try:
        while more := connection.recv(65536):
            received += more
    except ConnectionError:
        pass
    return received


def exchange(client: httpx.Client, data: bytes) -> bytes:
    """What comes back, until the server closes or has said all that it will."""
    with connect(client) as connection:
        connection.sendall(data)
        received = b""
        try:
            while more := connection.recv(65536):
                received += more
                connection.settimeout(1.5)  # longer than the server waits for more
        except (ConnectionError, TimeoutError):
            pass
        return received


def check_alive(client: httpx.Client) -> None:
    assert client.post("/v1/chat/completions", json=chat(model="m")).status_code == 200


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"\r\n", b""),
        (b"P", b"HTTP/1.1 408 "),
        (HEAD, b"HTTP/1.1 408 "),
        (HEAD + b"content-length: 100\r\n\r\n", b"HTTP/1.1 408 "),
        (HEAD + b"content-length: 100\r\n\r\n{", b"HTTP/1.1 408 "),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{", b"HTTP/1.1 408 "),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n", b"HTTP/1.1 200 "),
        (b"POST /health HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n", b"HTTP/1.1 415 "),
        (whole(), b"HTTP/1.1 200 "),
        (whole() + b"GET /hea", b"HTTP/1.1 200 "),
    ],
    ids=["nothing", "line", "byte", "head", "no_body", "body", "chunk", "unread", "refused", "next", "half_next"],
)
def test_half_sent_requests_are_ended(impatient: httpx.Client, sent: bytes, answer: bytes) -> None:
    with connect(impatient) as connection:
        connection.sendall(sent)
        if sent.startswith(whole()):
            connection.settimeout(20)
            assert connection.recv(65536).startswith(answer)
            connection.sendall(b"GET /hea" if sent == whole() else b"lth")
            answer = b"HTTP/1.1 408 "
        began = time.monotonic()
        received = read_all(connection)

    assert received.startswith(answer) and (answer or received == b"")
    if b" 408 " in answer:
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert time.monotonic() - began < 60


def test_byte_by_byte_does_not_prolong(impatient: httpx.Client) -> None:
    """Slowloris: every byte comes soon after the last one, but the head never ends."""
    connections = [connect(impatient) for _ in range(20)]
    try:
        open_ones, deadline = list(connections), time.monotonic() + 60
        for sign in (HEAD + b"x: " + b"y" * 1000).decode():
            if not open_ones or time.monotonic() > deadline:
                break
            for connection in list(open_ones):
                try:
                    connection.sendall(sign.encode())
                except ConnectionError:
                    open_ones.remove(connection)
            check_alive(impatient)
            time.sleep(0.02)
        assert not open_ones
    finally:
        for connection in connections:
            connection.close()


def test_a_slow_answer_is_no_slow_request(impatient: httpx.Client) -> None:
    """Times are for what a client sends; an answer may take as long as it does, and the connection is used again."""
    with connect(impatient) as connection:
        for _ in range(2):
            connection.sendall(whole(body=json.dumps(chat(model="slow", max_tokens=60)).encode()))
            received = b""
            while not received.endswith(b"}") or received.count(b"{") != received.count(b"}"):
                more = connection.recv(65536)
                assert more, received
                received += more
            assert received.startswith(b"HTTP/1.1 200 ")


def test_a_pipelined_request_waits_for_the_first_answer(impatient: httpx.Client) -> None:
    first = whole(body=json.dumps(chat(model="slow", max_tokens=60)).encode())
    with connect(impatient) as connection:
        connection.sendall(first + whole(HEAD + b"connection: close\r\n"))
        received = read_all(connection)

    assert received.count(b"HTTP/1.1 200 ") == 2 and b" 408 " not in received


SMUGGLED = {
    "both": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\n",
    "both_turned": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\n",
    "two_lengths": b"content-length: 2\r\ncontent-length: 30\r\n\r\n{}",
    "list_of_lengths": b"content-length: 2, 30\r\n\r\n{}",
    "plus": b"content-length: +2\r\n\r\n{}",
    "minus": b"content-length: -2\r\n\r\n{}",
    "hexadecimal": b"content-length: 0x2\r\n\r\n{}",
    "huge": b"content-length: 99999999999999999999999\r\n\r\n{}",
    "space_before_colon": b"content-length : 2\r\n\r\n{}",
    "folded": b"content-length:\r\n 2\r\n\r\n{}",
    "unknown_coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked_not_last": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "bad_chunk": b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "huge_chunk": b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}",
    "nul_in_name": b"x\0y: z\r\ncontent-length: 2\r\n\r\n{}",
    "nul_in_value": b"x: y\0z\r\ncontent-length: 2\r\n\r\n{}",
    "two_hosts": b"host: evil.example\r\ncontent-length: 2\r\n\r\n{}",
    "bare_return": b"x: y\rz: w\r\ncontent-length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("rest", SMUGGLED.values(), ids=SMUGGLED)
def test_two_readings_of_one_request_are_none(impatient: httpx.Client, rest: bytes) -> None:
    """What a proxy in front could read in another way is refused, and nothing after it is served."""
    received = exchange(impatient, HEAD + rest + b"\r\nhost: localhost\r\n\r\n")

    answers = [line for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert len(answers) == 1, answers
    assert answers[0].startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 ", b"HTTP/1.1 431 ")), answers
    check_alive(impatient)


@pytest.mark.parametrize(
    "first",
    [
        b"GET /health HTTP/1.1 \r\n",
        b"GET  /health HTTP/1.1\r\n",
        b"GET /health HTTP/9.9\r\n",
        b"GET /health\r\n",
        b"GET\0/health HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\n",
        b"G" * 70_000,
        b"GET /" + b"%ff" * 5000 + b" HTTP/1.1\r\n",
        b"GET /%00%0d%0aset-cookie:%20a HTTP/1.1\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
    ],
)
def test_first_lines_of_every_kind(impatient: httpx.Client, first: bytes) -> None:
    received = exchange(impatient, first + b"host: localhost\r\n\r\n")

    assert received.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")) or received == b"", received[:200]
    assert b"set-cookie" not in received.lower() and b"Traceback" not in received
    check_alive(impatient)


def test_headers_are_counted(impatient: httpx.Client) -> None:
    fits, many = b"a: b\r\n" * 40, b"a: b\r\n" * 60

    assert exchange(impatient, whole(HEAD + fits)).startswith(b"HTTP/1.1 200 ")
    received = exchange(impatient, whole(HEAD + many))
    assert received.startswith(b"HTTP/1.1 431 ") and b"limits.max_headers" in received


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x-whatever"])
def test_compressed_bodies_are_refused(impatient: httpx.Client, coding: str) -> None:
    """A bomb of kilobytes would be gigabytes, so none is unpacked."""
    bomb = gzip.compress(b'{"messages": "' + b"x" * 10_000_000)
    headers = {"content-type": "application/json", "content-encoding": coding}
    response = impatient.post("/v1/chat/completions", content=bomb, headers=headers)

    assert response.status_code == 415 and "Content-Encoding" in response.json()["error"]["message"]
    plain = impatient.post("/v1/chat/completions", content=BODY, headers={**headers, "content-encoding": "identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize(
    ("address", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        ("/tokenize", {"content": "hi"}),
        ("/detokenize", {"tokens": [1]}),
        ("/apply-template", chat()),
        ("/v1/route", chat(model="m")),
        ("/admin/models/m", {"action": "load"}),
        ("/admin/reload", {}),
        ("/admin/requests/nothing/cancel", {}),
    ],
)
def test_a_byte_order_mark_changes_nothing(impatient: httpx.Client, address: str, body: dict) -> None:
    json_type = {"content-type": "application/json"}
    content = json.dumps(body).encode()
    plain = impatient.post(address, content=content, headers=json_type)
    marked = impatient.post(address, content=codecs.BOM_UTF8 + content, headers=json_type)

    assert marked.status_code == plain.status_code, marked.text
    assert plain.status_code == 200 or marked.json() == plain.json()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_refused(impatient: httpx.Client, encoding: str) -> None:
    content = json.dumps(chat()).encode(encoding)
    response = impatient.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})

    assert response.status_code == 400 and "UTF-8" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "text", ['"x":"y"', 'a\\"b":c', "\\", "\\\\", '{"a":1,"a":2}', ": : :", '"', '":"', "\n\t:", "\u2028:\x00"]
)
def test_names_inside_of_texts_are_texts(impatient: httpx.Client, text: str) -> None:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    for ascii_only in (True, False):
        content = json.dumps(chat(messages=messages, user=text), ensure_ascii=ascii_only, indent=1).encode()
        response = impatient.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("evil", ["a\r\nset-cookie: b", "a\nb", "a\0b", "\x1b[31mred", "ä", "\u2028", "x" * 5000, '",'])
def test_nothing_of_a_request_breaks_a_header_or_a_line(
    impatient: httpx.Client, caplog: pytest.LogCaptureFixture, evil: str
) -> None:
    """Names of unknown fields stand in a header, models and addresses in the log."""
    with caplog.at_level(logging.DEBUG, logger="enginehouse.access"):
        for body in (chat(**{evil: 1}), chat(model=evil), chat(user=evil, cache_salt=evil[:900])):
            response = impatient.post("/v1/chat/completions", json=body)
            assert response.status_code in (200, 400, 404)
            assert "set-cookie" not in response.headers
            assert all(value.isprintable() and value.isascii() for value in response.headers.values())
        path = "/v1/models/" + "".join(f"%{byte:02x}" for byte in evil.encode()[:300])
        assert impatient.get(path).status_code in (404, 400)
        time.sleep(0.1)

    lines = [record.getMessage() for record in caplog.records if record.name == "enginehouse.access"]
    assert lines
    assert all(line.isprintable() for line in lines), lines


def test_many_half_sent_requests_leave_nothing_behind(impatient: httpx.Client) -> None:
    num_threads = threading.active_count()
    for _ in range(3):
        connections = [connect(impatient) for _ in range(100)]
        for number, connection in enumerate(connections):
            connection.sendall(whole()[: 1 + number % len(whole())])
        check_alive(impatient)
        for connection in connections:
            connection.close()
    check_alive(impatient)
    assert threading.active_count() <= num_threads + 2


def nested(depth: int) -> dict:
    return {"a": nested(depth - 1)} if depth else {}


def tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("fields", "statuses"),
    [
        ({"tools": [tool(f"f{n}") for n in range(5000)]}, {400}),
        ({"tools": [tool("f" * 100_000)]}, {400}),
        ({"stop": ["x"] * 5000}, {400}),
        ({"stop": ["x" * 1_000_000]}, {200, 400}),
        ({"logit_bias": {str(n): 1 for n in range(200_000)}}, {400}),
        ({"logit_bias": {str(10**300): 1}}, {400}),
        ({"n": 10**9}, {400}),
        ({"max_tokens": 10**18}, {200, 400}),
        ({"max_tokens": 10**30}, {400}),
        ({"seed": 2**70}, {400}),
        ({"temperature": 1e308}, {400}),
        ({"top_k": 10**12}, {200, 400}),
        ({"chat_template_kwargs": nested(60)}, {200, 400}),
        ({"chat_template_kwargs": nested(500)}, {400}),
        ({"chat_template_kwargs": {str(n): "x" for n in range(60_000)}}, {200, 400}),
        ({"nobody_knows_me": [[]] * 600_000}, {400}),
        ({"nobody_knows_me": [{"a": 1}] * 600_000}, {400}),
        ({"nobody_knows_me": [1] * 3_000_000}, {400}),
        ({"nobody_knows_me": [[1]] * 200_000}, {200}),
        ({"user": "[{," * 1_000_000}, {200}),
        ({f"unknown_{n}": 1 for n in range(50_000)}, {200, 400}),
        ({"messages": [{"role": "user", "content": "x"}] * 4000}, {200, 400}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]}, {200, 400}),
        ({"model": "m" * 1_000_000}, {404}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_absurd_sizes_and_numbers_are_answered_in_time(impatient: httpx.Client, fields: dict, statuses: set) -> None:
    began = time.monotonic()
    response = impatient.post("/v1/chat/completions", json={**chat(), **fields})

    assert response.status_code in statuses, response.text[:500]
    assert len(response.content) < 1_100_000 and time.monotonic() - began < 60
    check_alive(impatient)
