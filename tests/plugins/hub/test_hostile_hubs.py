"""Hubs that answer to do harm: lists, redirects and errors without an end, seconds without a measure."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from attrs import define

from enginehouse.contract.errors import DownloadError
from enginehouse_hub.client import HubClient
from enginehouse_hub.reference import HubReference
from enginehouse_hub.refusals import HubUnreachable

pytestmark = pytest.mark.timeout(60)

REFERENCE = HubReference(model_id="a/b")
MAX_BYTES = 24 * 2**20
"""What is read of a list, and what sockets hold besides."""


@define
class Hub:
    """Answers the first connection with ``begin`` and then with ``again`` for ever, the others with an error."""

    begin: bytes
    again: bytes
    listener: socket.socket
    num_bytes: int = 0

    def run(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.recv(65536)
            connection.settimeout(5)
            try:
                connection.sendall(self.begin)
                while self.again:
                    connection.sendall(self.again)
                    self.num_bytes += len(self.again)
            except OSError:
                pass


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[tuple[Hub, HubClient]]:
    begin, again = request.param
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        hub = Hub(begin.replace(b"{port}", str(port).encode()), again, listener)
        thread = threading.Thread(target=hub.run)
        thread.start()
        yield hub, HubClient(f"http://127.0.0.1:{port}", timeout_s=2.0)
        thread.join(60)


BIG = b"x" * 65536
ENDLESS = {
    "list": (b"HTTP/1.1 200 OK\r\n\r\n", BIG),
    "list_of_lists": (b'HTTP/1.1 200 OK\r\n\r\n{"a": [', b"[],[]," * 10_000),
    "error": (b"HTTP/1.1 404 No\r\n\r\n", BIG),
    "redirect": (b"HTTP/1.1 302 Go\r\nlocation: http://127.0.0.1:1/x\r\n\r\n", BIG),
    "header": (b"HTTP/1.1 200 OK\r\na: ", BIG),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000),
    "deep": (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 200_000, b""),
    "long_reason": (b"HTTP/1.1 503 " + b"x" * 60_000 + b"\r\n\r\n", b""),
}


@pytest.mark.parametrize("hub", ENDLESS.values(), ids=ENDLESS, indirect=True)
def test_what_has_no_end_is_an_error_soon(hub: tuple[Hub, HubClient]) -> None:
    began = time.monotonic()

    with pytest.raises(DownloadError):
        hub[1].list_files(REFERENCE)

    assert time.monotonic() - began < 60
    assert hub[0].num_bytes < MAX_BYTES


@pytest.mark.parametrize(
    ("hub", "seconds"),
    [
        ((b"HTTP/1.1 429 Busy\r\nretry-after: " + said + b"\r\ncontent-length: 0\r\n\r\n", b""), seconds)
        for said, seconds in [(b"9" * 400, 3600.0), (b"inf", 3600.0), (b"nan", 0.0), (b"-5", 0.0), (b"2.5", 2.5)]
    ],
    indirect=["hub"],
)
def test_seconds_to_wait_are_bounded(hub: tuple[Hub, HubClient], seconds: float) -> None:
    with pytest.raises(HubUnreachable) as caught:
        hub[1].list_files(REFERENCE)

    assert caught.value.retry_after_s == seconds
