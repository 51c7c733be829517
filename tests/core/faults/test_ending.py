"""How a server ends: by one signal, by two, in whatever it is doing; and what it is started with."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.waiting import wait_until

from .rig import port_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and descriptors need POSIX")

NUMBERS = {"<&-": 0, ">&-": 1, "2>&-": 2}
LIMIT_S = 30.0  # after the second signal, on a busy machine; the first one alone lets requests run for shutdown_s, 60
SERVE = [sys.executable, "-m", "enginehouse", "serve", "--port", "0"]


def configuration(folder: Path, *, shutdown_s: int = 60, **options: object) -> Path:
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    path = folder / "enginehouse.toml"
    path.write_text(f'[server]\nshutdown_s = {shutdown_s}\n[models.m]\nsource = "fake"\nbackend = "fake"\n{lines}')
    return path


class Stream:
    """A long streamed answer, read on a thread until its end."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._connection = socket.create_connection((host, int(port)))
        body = json.dumps({"prompt": "Once", "max_tokens": 4000, "stream": True, "logit_bias": {"0": -100}})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        self._connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        self.data = b""
        self.is_over = False
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: self.data.count(b"data: ") > 3, "the stream begins")

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._connection:
            while received := self._connection.recv(65536):
                self.data += received
        self.is_over = True

    def check_told(self) -> None:
        wait_until(lambda: self.is_over, "the stream ends")
        assert b"server_stopping" in self.data, self.data[-500:]


@contextlib.contextmanager
def streaming(folder: Path, **options: object) -> Iterator[tuple[ServerProcess, list[Stream], list[psutil.Process]]]:
    config = configuration(folder, step_delay_s=0.05, end_logit=-1000.0, context=8192, **options)
    with started_server("--config", config) as server:
        streams = [Stream(server.url or "") for _ in range(3)]
        yield server, streams, psutil.Process(server.process.pid).children(recursive=True)


@pytest.mark.parametrize(
    ("signals", "pause_s"),  # the system makes one of two equal signals that wait
    [
        ((signal.SIGINT, signal.SIGINT), 0.05),
        ((signal.SIGINT, signal.SIGINT), 0.7),
        ((signal.SIGTERM, signal.SIGTERM), 0.05),
        pytest.param((signal.SIGTERM, signal.SIGTERM), 0.7, marks=pytest.mark.slow),
        pytest.param((signal.SIGINT, signal.SIGTERM), 0.05, marks=pytest.mark.slow),
        ((signal.SIGINT, signal.SIGTERM), 0.7),
        pytest.param((signal.SIGTERM, signal.SIGINT, signal.SIGINT), 0.05, marks=pytest.mark.slow),
        ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), 0.7),
    ],
)
def test_the_second_signal_ends_what_the_first_lets_finish(tmp_path: Path, signals, pause_s: float) -> None:
    with streaming(tmp_path) as (server, streams, children):
        server.process.send_signal(signals[0])
        time.sleep(pause_s)
        assert server.process.poll() is None
        assert not any(stream.is_over for stream in streams)
        began = time.monotonic()
        for number in signals[1:]:
            server.process.send_signal(number)
        exit_code = server.process.wait(60)
        took_s = time.monotonic() - began

        assert took_s < LIMIT_S, f"it took {took_s:.1f} s"
        assert exit_code == 0
        for stream in streams:
            stream.check_told()
        assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []
        assert "Traceback" not in server.output


@pytest.mark.slow
def test_the_server_and_its_workers_end_within_two_seconds(tmp_path: Path) -> None:
    """The fastest of three counts, as a busy machine delays any of them."""
    times_s: list[float] = []
    for _ in range(3):
        with streaming(tmp_path) as (server, _, children):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert server.process.wait(60) == 0
            assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []
            times_s.append(time.monotonic() - began)

    assert min(times_s) < 2, times_s


def test_the_second_signal_is_not_held_up_by_clients_that_do_not_read(tmp_path: Path) -> None:
    with streaming(tmp_path) as (server, _, children):
        with socket.create_connection(("127.0.0.1", int((server.url or "").rpartition(":")[2]))) as deaf:
            deaf.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")  # nothing more comes
            server.process.terminate()
            time.sleep(0.5)
            server.process.terminate()
            assert server.process.wait(LIMIT_S) == 0
        assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_two_signals_while_the_model_loads(tmp_path: Path, isolation: str, delay_s: float) -> None:
    """The thread's model cannot be interrupted, so the process ends without it."""
    config = configuration(tmp_path, open_delay_s=600.0, isolation=isolation)
    with subprocess.Popen([*SERVE, "--config", config], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "listening on" in process.stderr.readline()
        time.sleep(delay_s)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        exit_code = process.wait(60)
        took_s = time.monotonic() - began

    assert took_s < LIMIT_S, f"it took {took_s:.1f} s"
    assert exit_code == 0
    assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []


def test_two_signals_while_a_reload_hangs(tmp_path: Path) -> None:
    with streaming(tmp_path) as (server, streams, children):
        config = tmp_path / "enginehouse.toml"
        config.unlink()
        os.mkfifo(config)  # reading it waits for somebody who writes
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0
        for stream in streams:
            stream.check_told()
        assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the handlers of another process")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("delay_s", [0.0, 0.2, 0.7])
@pytest.mark.parametrize("is_process_1", [True, False])
def test_a_signal_ends_a_start(tmp_path: Path, number: int, delay_s: float, is_process_1: bool) -> None:
    """Process 1 of a container loses signals for which it has no handler, and is then killed much later."""
    used_s = 0.0

    def has_handler() -> bool:
        """Whether it is there; if not, note the processor time used until then."""
        nonlocal used_s
        now_s = sum(server.cpu_times()[:2])
        if not handles(server.pid, signal.SIGTERM):
            used_s = now_s
            return False
        return True

    command = [*SERVE, "--config", str(configuration(tmp_path, open_delay_s=30.0))]
    if is_process_1:
        command = [*unshare(), *command]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        server = psutil.Process(process.pid)
        if is_process_1:
            wait_until(server.children, "process 1")
            (server,) = server.children()
        try:
            wait_until(has_handler, "the handler")
            time.sleep(delay_s)
            server.send_signal(number)
            exit_code = process.wait(60)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                server.kill()
        assert process.stderr is not None
        output = process.stderr.read()

    assert exit_code == 0, output
    assert "Traceback" not in output
    assert used_s < 0.3, "the handler comes late: importing the server takes longer than that"


def handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for that signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) & (1 << (number - 1)))
    return False


def unshare() -> list[str]:
    """Prefix of a command that becomes process 1 of a PID namespace."""
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("unshare is not possible here")
    return command


@pytest.mark.parametrize(
    "closed",
    [
        pytest.param(signs, marks=() if len(signs) == 3 else pytest.mark.slow, id=" ".join(signs))
        for n in (1, 2, 3)
        for signs in itertools.combinations(NUMBERS, n)
    ],
)
def test_closed_standard_streams_are_the_null_device(tmp_path: Path, closed: tuple[str, ...]) -> None:
    config = configuration(tmp_path)
    script = f'exec "$@" {" ".join(closed)}'
    command = ["sh", "-c", script, "sh", *SERVE, "--config", str(config)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            port = port_of(process)
            wait_until(lambda: process.poll() is not None or answers(port), "the server")
            assert process.poll() is None, f"it ended with code {process.returncode}"
            for _ in range(3):
                assert b'"text"' in answer_of(port)
            worker = worker_of(process.pid)
            if sys.platform == "linux":
                targets = {os.readlink(f"/proc/{process.pid}/fd/{NUMBERS[sign]}") for sign in closed}
                errors = os.readlink(f"/proc/{worker.pid}/fd/2")
                assert targets == {os.devnull} and (errors == os.devnull) == ("2>&-" in closed)
            worker.kill()
            wait_until(lambda: not worker.is_running() and answers(port), "the next worker")
            assert b'"text"' in answer_of(port)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def worker_of(pid: int) -> psutil.Process:
    (worker,) = (one for one in psutil.Process(pid).children() if "enginehouse.workers" in one.cmdline())
    return worker


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return b" 200 " in ask(port, "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[:20]
    return False


def answer_of(port: int) -> bytes:
    body = '{"prompt": "Once", "max_tokens": 4}'
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return ask(port, f"{head}Content-Length: {len(body)}\r\n\r\n{body}")


def ask(port: int, text: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(text.encode())
        return connection.makefile("rb").read()


_TELLS_OF_ITS_COLLECTOR = """
import atexit, gc
from enginehouse.__main__ import main
atexit.register(lambda: print(f"collects: {gc.isenabled()}, leaves out: {gc.get_freeze_count()}"))
main()
"""


def test_server_collects_garbage_but_not_among_its_modules(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _TELLS_OF_ITS_COLLECTOR, *SERVE[3:], "--config", str(configuration(tmp_path))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        server = ServerProcess(process)
        reader = threading.Thread(target=server.read)
        reader.start()
        wait_until(server.is_ready, "the server is ready")

        assert server.stop() == 0
        reader.join()
    found = re.search(r"collects: True, leaves out: (\d+)", server.output)
    assert found is not None, server.output
    assert int(found[1]) > 100_000
