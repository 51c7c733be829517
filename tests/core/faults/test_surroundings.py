"""The machine around a server: a full disk, logs that cannot be written, and configuration that makes no sense."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from enginehouse.serving.restarts import RestartPolicy
from enginehouse_testkit.server import ServerProcess, started_server
from enginehouse_testkit.waiting import wait_until

from .rig import Rig, fake, port_of, rig

pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits of files need POSIX")

CONFIG = """
[server]
details = true
[models.m]
source = "fake"
backend = "fake"
step_delay_s = 0.015
"""


@contextlib.contextmanager
def server_on_a_full_disk(folder: Path) -> Iterator[tuple[Rig, psutil.Process]]:
    """``enginehouse serve`` that can write no byte into any file, its logs included."""
    (folder / "enginehouse.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "enginehouse", "serve", "--port", "0", "--config", "enginehouse.toml"]
    with (
        open("/dev/full", "wb") as full,
        subprocess.Popen(
            ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *command], cwd=folder, stdout=full, stderr=full
        ) as process,
    ):
        try:
            server = Rig(f"http://127.0.0.1:{port_of(process)}", frozenset())
            wait_until(lambda: process.poll() is not None or answers(server), "the server")
            assert process.poll() is None, f"it ended with code {process.returncode}"
            yield server, psutil.Process(process.pid)
        finally:
            process.kill()


def answers(server: Rig) -> bool:
    with contextlib.suppress(OSError, Exception):
        return server.health() == 200
    return False


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_stops_nothing(tmp_path, turn):
    """Neither the logs nor anything else can be written: requests are served, and a worker's death is a pause."""
    with server_on_a_full_disk(tmp_path) as (server, process):
        max_tokens = 40 + 4 * turn  # where the machine is busy, a chunk has several tokens
        expected = server.ask(max_tokens=max_tokens).wait()
        answer = server.ask(max_tokens=max_tokens)
        answer.wait_chunks(3 + turn)
        server.kill()
        assert expected.is_complete
        assert answer.wait().choices == expected.choices
        assert server.ask("x", max_tokens=-1).wait().status == 400
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def no_descriptors_left(process: psutil.Process) -> Iterator[None]:
    """The process can open nothing more, and keeps what it has."""
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (4, before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)


def state_of(server: ServerProcess) -> str:
    return str(httpx.get(f"{server.url}/v1/models/m", timeout=60).json()["state"])


@pytest.mark.skipif(sys.platform != "linux", reason="changes the limits of another process")
@pytest.mark.parametrize(("load", "isolation"), [("eager", "process"), ("lazy", "process"), ("lazy", "thread")])
def test_worker_is_started_when_there_are_descriptors_again(tmp_path: Path, load: str, isolation: str) -> None:
    """After more starts than a model that fails gets; first loads wait as well as restarts."""
    (tmp_path / "enginehouse.toml").write_text(CONFIG + f'load = "{load}"\nisolation = "{isolation}"\n')
    question = {"prompt": "a", "max_tokens": 2}
    with started_server("--config", tmp_path / "enginehouse.toml") as server, httpx.Client(timeout=60) as client:
        process, url = psutil.Process(server.process.pid), f"{server.url}/v1/completions"
        assert client.get(f"{server.url}/health").status_code == 200  # this connection is there from now on
        with no_descriptors_left(process):
            if load == "eager":
                next(one for one in process.children() if "enginehouse.workers" in one.cmdline()).kill()
            else:
                asked = threading.Thread(target=client.post, args=(url,), kwargs={"json": question})
                asked.start()
            most = RestartPolicy().max_failed_starts
            wait_until(lambda: server.output.count("could not be started") >= most, "more starts")
            assert "failed" not in server.output
        if load == "lazy":
            asked.join()
        wait_until(lambda: state_of(server) == "ready", "the worker")

        assert client.post(url, json=question).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the limits of another process")
def test_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    (tmp_path / "enginehouse.toml").write_text(CONFIG)
    command = [sys.executable, "-m", "enginehouse", "serve", "--port", "0", "--config", "enginehouse.toml"]
    script = 'ulimit -S -n 64; exec "$@"'
    with subprocess.Popen(
        ["sh", "-c", script, "sh", *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "listening on" in process.stderr.readline()
        soft, hard = psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE)
        process.terminate()
        process.stderr.read()

    assert soft == hard > 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models.m\n", "enginehouse.toml"),
        ('[models.m]\nsource = "fake"\nbackend = "fake"\nslotz = 2\n', "models.m.slotz"),
        ('[models.m]\nsource = "fake"\nbackend = "fake"\nslots = "two"\n', "models.m.slots"),
        ('[models.m]\nsource = "fake"\nbackend = "fake"\nstep_timeout_s = -1\n', "models.m.step_timeout_s"),
        ('[models.m]\nsource = "fake"\nbackend = "fake"\nreplay = "often"\n', "models.m.replay"),
        ('[models.m]\nsource = "fake"\nbackend = "fake"\nisolation = "thread"\npython = "/x"\n', "models.m.python"),
        ('[models.m]\nsource = "fake"\nbackend = "fake"\nfaults = {abort_at = 1}\n', "models.m"),
        ('[server]\nhost = "0.0.0.0"\n', "server.host"),
    ],
)
def test_wrong_configuration_ends_the_command_with_its_reason(tmp_path, text, said):
    (tmp_path / "enginehouse.toml").write_text(text)
    command = [sys.executable, "-m", "enginehouse", "serve", "--port", "0", "--config", "enginehouse.toml"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)

    assert ended.returncode not in (0, None)
    assert said in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr


def test_model_that_is_configured_wrong_stops_no_other_one(turn):
    models = {"fine": fake(), "m": fake(faults={"refuse_to_open": "there is not enough memory for its weights"})}
    with rig(models, ready=False) as server:
        wait_until(lambda: server.ask(model="fine").wait().status == 200, "the other model")

        def refused() -> bool:
            """The reason is known; before that, and while it is started again, the model is loading."""
            broken = server.ask(stream=bool(turn % 2)).wait()
            assert broken.status == 503 and broken.error is not None
            return "not enough memory for its weights" in broken.error["message"]

        wait_until(refused, "the reason")
