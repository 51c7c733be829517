"""Clients of HTTP/1.0, clients that offer another protocol, and HEAD: each is answered as its protocol says."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from enginehouse.api.http.app import build_app
from enginehouse.settings.config import ModelSettings, PluginsSettings, ServerSettings, Settings
from enginehouse_testkit.application import make_state
from enginehouse_testkit.script import write_script
from enginehouse_testkit.served import served

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
ADDRESSES = sorted(
    route.path_format for route in build_app(make_state(Settings(plugins=PluginsSettings(allow=())))).app.routes
)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    source = write_script(tmp_path_factory.mktemp("scripts") / "hello.json", ["Hel", "lo"])
    settings = Settings(
        server=ServerSettings(head_timeout_s=2.0),
        models={"m": ModelSettings(source=source, backend="scripted")},
        plugins=PluginsSettings(allow=()),
    )
    with served(settings, timeout=60) as client:
        yield client


def post(extra: bytes = b"", body: bytes = b"", framing: bytes = b"", version: bytes = b"1.1", **fields) -> bytes:
    body = body or json.dumps(CHAT | fields).encode()
    framing = framing or b"content-length: %d\r\n" % len(body)
    head = b"POST /v1/chat/completions HTTP/%b\r\nhost: localhost\r\ncontent-type: application/json\r\n" % version
    return head + extra + framing + b"\r\n" + body


def chunked(body: bytes, trailers: bytes = b"") -> bytes:
    return b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (3, body[:3], len(body) - 3, body[3:], trailers)


def exchange(client: httpx.Client, *sent: bytes) -> bytes:
    """What comes back until the server closes, or has said nothing for a second."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=60) as connection:
        for data in sent:
            connection.sendall(data)
            time.sleep(0.02)
        received = b""
        try:
            while more := connection.recv(65536):
                received += more
                connection.settimeout(1.0)
        except (ConnectionError, TimeoutError):
            pass
        return received


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


# -- another protocol is offered ----------------------------------------------------------------------

OFFERS = {
    "h2c": H2C,
    "websocket": b"upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-version: 13\r\n",
    "unknown": b"connection: keep-alive, upgrade\r\nupgrade: teapot/1, gopher\r\n",
    "connection_alone": b"connection: upgrade\r\n",
    "upgrade_alone": b"upgrade: h2c\r\n",
    "expect": H2C + b"expect: 100-continue\r\n",
}
BODY = json.dumps(CHAT).encode()
CHUNKS = b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
def test_an_upgrade_that_is_not_taken_is_ignored(client: httpx.Client, offer: bytes, is_chunked: bool) -> None:
    """Its body is read, and so are the requests after it, however they are cut."""
    framing, body = (CHUNKS, chunked(BODY, b"x: y\r\n")) if is_chunked else (b"", BODY)
    request = post(offer, body, framing)
    sent = request + GET + request + LAST
    for size in (len(sent), 7):
        received = exchange(client, *(sent[begin : begin + size] for begin in range(0, len(sent), size)))

        assert [status for status in statuses(received) if status != 100] == [200, 200, 200, 200]
        assert received.count(b'"content":"Hello"') == 2
        assert statuses(received).count(100) == (2 if b"100-continue" in offer else 0)


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
def test_an_upgrade_without_a_body_is_ignored(client: httpx.Client, offer: bytes) -> None:
    request = GET.replace(b"host", offer + b"host", 1)

    assert [status for status in statuses(exchange(client, request + LAST)) if status != 100] == [200, 200]


def test_the_body_of_an_upgrade_is_bounded_like_any_other(client: httpx.Client) -> None:
    assert statuses(exchange(client, post(H2C, framing=b"content-length: 99999999\r\n"))) == [413]
    broken = post(H2C, b"zz\r\n{}\r\n0\r\n\r\n", CHUNKS) + GET
    assert statuses(exchange(client, broken)) == [400]


@pytest.mark.parametrize("target", [b"127.0.0.1:22", b"/health", b"evil.example:443"])
def test_this_server_is_not_a_proxy(client: httpx.Client, target: bytes) -> None:
    received = exchange(client, b"CONNECT %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % target + GET)

    assert statuses(received) == [400] and received.endswith(b"}")


# -- HTTP/1.0 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [b"", b"connection: keep-alive\r\n", b"host: localhost\r\n"])
def test_http_1_0_needs_no_host(client: httpx.Client, extra: bytes) -> None:
    received = exchange(client, b"GET /health HTTP/1.0\r\n" + extra + b"\r\n")

    assert statuses(received) == [200] and b"keep-alive" not in received
    assert json.loads(received.partition(b"\r\n\r\n")[2])["status"] == "ok"


def test_http_1_0_with_a_foreign_host_is_refused(client: httpx.Client) -> None:
    assert statuses(exchange(client, b"GET /health HTTP/1.0\r\nhost: evil.example\r\n\r\n")) == [403]


def test_http_1_1_needs_a_host(client: httpx.Client) -> None:
    assert statuses(exchange(client, b"GET /health HTTP/1.1\r\n\r\n")) == [400]


@pytest.mark.parametrize("extra", [b"", b"connection: keep-alive\r\n", b"expect: 100-continue\r\n"])
@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_chunked_to_http_1_0(client: httpx.Client, stream: bool, extra: bytes) -> None:
    """A stream ends with its connection."""
    received = exchange(client, post(extra, version=b"1.0", stream=stream) + GET)
    head, _, body = received.partition(b"\r\n\r\n")

    assert statuses(received) == [200] and b"transfer-encoding" not in head and b"keep-alive" not in head
    if stream:
        assert b"content-length" not in head
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == "Hello"


# -- HEAD ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("address", [*ADDRESSES, "/nothing", "/v1/models/nothing"])
def test_head_says_what_get_would(client: httpx.Client, address: str, version: bytes) -> None:
    """Also errors and streams, without a body; the connection serves the next request.

    Without keys ``/admin`` takes requests in HTTP/1.0 for those of a proxy.
    """
    path = re.sub(r"\{\w+\}", "m", address).encode()
    head = b"%b %b HTTP/%b\r\nhost: localhost\r\n\r\n"
    received = exchange(client, head % (b"HEAD", path, version) + (LAST if version == b"1.1" else b""))
    own, _, next_one = received.partition(b"\r\n\r\n")
    with client.stream("GET", path.decode()) as got:
        pass

    if version == b"1.0" and path.startswith(b"/admin") and got.status_code != 405:
        assert int(own[9:12]) == 403
        return
    assert int(own[9:12]) == got.status_code
    fields = {name: value for name, _, value in (line.partition(b": ") for line in own.split(b"\r\n")[1:])}
    for name in ("content-type", "content-length", "allow", "cache-control"):
        if name != "content-length" or not path.startswith((b"/metrics", b"/admin")):  # figures change meanwhile
            assert fields.get(name.encode(), b"").decode() == got.headers.get(name, ""), name
    assert next_one.startswith(b"HTTP/1.1 200") if version == b"1.1" else next_one == b""
    if got.status_code == 405:
        assert "HEAD" not in got.headers["allow"]
