"""A full disk: what the server writes while it runs are lines of its log, and it serves without them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from enginehouse.api.http.keys.file import add_key
from enginehouse.cli import main
from enginehouse.contract.errors import ConfigError

from .rig import port_of

FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server whose log goes to a full disk, and its address."""
    config = tmp_path / "enginehouse.toml"
    config.write_text(f'[models.m]\nsource = "{tmp_path.as_posix()}"\nbackend = "fake"\n\n[plugins]\nallow = []\n')
    command = [sys.executable, "-m", "enginehouse", "serve", "--port", "0", "--config", str(config)]
    with FULL.open("wb") as full, subprocess.Popen(command, stdout=full, stderr=full) as running:
        try:
            yield running, f"http://127.0.0.1:{port_of(running)}"
        finally:
            running.kill()


def test_requests_are_served_though_no_line_can_be_logged(
    process: tuple[subprocess.Popen[bytes], str], turn: int
) -> None:
    running, url = process
    deadline = time.monotonic() + 60
    while True:
        assert running.poll() is None and time.monotonic() < deadline
        try:
            if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    for stream in (False, True, False):
        answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": stream}, timeout=60)
        assert answer.status_code == 200
        assert not stream or answer.text.endswith("data: [DONE]\n\n")
    assert httpx.post(f"{url}/v1/chat/completions", json={"messages": 5}, timeout=60).status_code == 400
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 0


def test_a_key_file_keeps_its_keys_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new line that cannot be written costs none of the old ones."""
    path = tmp_path / "keys.txt"
    path.write_text("# keys\n", encoding="utf-8")
    line = (
        CliRunner().invoke(main, ["keys", "hash", "alice", "--stdin"], input="a-key-of-more-than-20-characters").stdout
    )
    written = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        add_key(path, line.strip())
    assert path.read_bytes() == written
    assert {file.name for file in tmp_path.iterdir()} <= {"keys.txt", "keys.txt.lock"}
