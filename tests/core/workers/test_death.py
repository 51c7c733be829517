"""Processes die here: workers are killed, abort, hang and break; servers are killed and leave no worker behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attrs import evolve

from enginehouse.contract.errors import EngineDead, ModelLoadError, WorkerDied
from enginehouse.contract.types import (
    DecodedImage,
    EngineRequest,
    EngineSettings,
    SamplingParams,
    Segment,
    StopParams,
    TextDelta,
)
from enginehouse.settings.config import PluginsSettings
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.ipc import frame, socket_pair
from enginehouse.workers.launch import worker_command
from enginehouse.workers.messages import Load, encode
from enginehouse.workers.process import ChildProcess, count_memory_kills, exit_status

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need POSIX")

_ids = itertools.count()


def load_message(backend: str = "fake", **options: Any) -> Load:
    return Load(backend, "fake", None, options, "models.m", EngineSettings(slots=2), PluginsSettings())


@contextlib.asynccontextmanager
async def open_engine(
    isolation: str = "process", backend: str = "fake", step_timeout_s: float = 0.0, **options: Any
) -> AsyncIterator[WorkerEngine]:
    engine = await WorkerEngine.open(
        load_message(backend, **options),
        isolation=isolation,
        python=None,
        on_progress=lambda share, text: None,
        step_timeout_s=step_timeout_s,
    )
    try:
        yield engine
    finally:
        await engine.close()


def make_request(max_tokens: int | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=f"r{next(_ids)}",
        segments=(Segment("tell me a story"),),
        sampling=SamplingParams(temperature=0),
        stopping=StopParams(max_tokens=max_tokens, ignore_eos=True),
    )


async def drain(engine: WorkerEngine, request: EngineRequest) -> int:
    """How many text events came."""
    generation = await engine.submit(request)
    return sum([isinstance(event, TextDelta) async for batch in generation for event in batch])


def pid_of(engine: WorkerEngine) -> int:
    assert engine.pid is not None
    return engine.pid


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if sys.platform == "linux":
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return True
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_gone(pid: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_alive(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.01)
    return True


# -- the worker dies -------------------------------------------------------------------------------


async def test_killed_worker_ends_every_request():
    """Running, queued and not yet accepted requests and calls all end with EngineDead that says why."""
    async with open_engine(step_delay_s=0.01) as engine:
        generation = await engine.submit(make_request())
        batches = aiter(generation)
        await anext(batches)
        others = [asyncio.create_task(drain(engine, make_request())) for _ in range(6)]
        await asyncio.sleep(0.05)
        os.kill(pid_of(engine), signal.SIGSTOP)  # it answers nothing of what comes now
        others += [asyncio.create_task(drain(engine, make_request()))]
        calls = [asyncio.create_task(engine.stats())]
        await asyncio.sleep(0)
        os.kill(pid_of(engine), signal.SIGKILL)
        async with asyncio.timeout(60):
            results = await asyncio.gather(*others, *calls, return_exceptions=True)
            with pytest.raises(EngineDead, match="SIGKILL"):
                _ = [batch async for batch in batches]

        assert [type(result) for result in results] == [WorkerDied] * 8
        assert "SIGKILL" in (await engine.died).message
        with pytest.raises(EngineDead, match="SIGKILL"):
            await engine.submit(make_request())
        with pytest.raises(EngineDead, match="SIGKILL"):
            await engine.tokenize([Segment("x")], False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_polite_signals_do_not_end_a_worker_because_the_server_decides(number):
    async with open_engine(step_delay_s=0.005) as engine:
        task = asyncio.create_task(drain(engine, make_request(30)))
        await asyncio.sleep(0.05)
        os.kill(pid_of(engine), number)

        assert await task > 10, "the answer comes to its end"
        assert (await engine.stats()).num_running == 0


def test_uvloop_serves_and_notices_death_too():
    uvloop = pytest.importorskip("uvloop")

    async def serve_and_die() -> None:
        async with open_engine(step_delay_s=0.005) as engine:
            assert await drain(engine, make_request(5))
            generation = await engine.submit(make_request())
            os.kill(pid_of(engine), signal.SIGKILL)
            async with asyncio.timeout(60):
                with pytest.raises(EngineDead, match="SIGKILL"):
                    _ = [batch async for batch in generation]
        async with open_engine("thread") as engine:
            assert await drain(engine, make_request(5))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_and_die())


async def test_aborting_library_is_reported_by_its_signal(capfd):
    async with open_engine(faults={"abort_at_step": 3}) as engine:
        with pytest.raises(EngineDead, match="SIGABRT"):
            await drain(engine, make_request())

    assert "Fatal Python error: Aborted" in capfd.readouterr().err


async def test_worker_that_dies_while_loading_fails_the_load():
    others = await _workers()
    task = asyncio.create_task(
        WorkerEngine.open(
            load_message(open_delay_s=600.0), isolation="process", python=None, on_progress=lambda share, text: None
        )
    )
    async with asyncio.timeout(60):
        while not (started := await _workers() - others):
            pass
    (pid,) = started
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        with pytest.raises(EngineDead, match="SIGKILL"):
            await task


async def _workers() -> set[int]:
    """The worker processes of this test process, those of servers that live as long as the session among them."""
    found = await asyncio.to_thread(children_of, os.getpid())
    return {pid for pid in found if is_alive(pid) and b"enginehouse.workers" in _command_line(pid)}


def children_of(pid: int) -> list[int]:
    command = ["ps", "-o", "pid=", "--ppid", str(pid)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    return [int(child) for child in listed.stdout.split()]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_hanging_forward_does_not_keep_the_worker_from_being_closed():
    async with open_engine(faults={"hang_at_step": 2}) as engine:
        pid = pid_of(engine)
        task = asyncio.create_task(drain(engine, make_request()))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await engine.close()

        assert time.monotonic() - began < 60
        assert not is_alive(pid)
        with pytest.raises(EngineDead, match="shutting down"):
            await task


async def test_interpreter_that_does_not_exist_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match="could not be started"):
        await WorkerEngine.open(
            load_message(), isolation="process", python=str(tmp_path / "python"), on_progress=lambda share, text: None
        )


async def test_program_that_is_no_worker_is_reported():
    with pytest.raises(ModelLoadError, match=r"models\.m\.python: /bin/false did not become a worker.*code 1"):
        await WorkerEngine.open(
            load_message(), isolation="process", python="/bin/false", on_progress=lambda share, text: None
        )


@pytest.mark.parametrize(
    ("returncode", "text"),
    [(0, "code 0"), (3, "code 3"), (-6, "SIGABRT"), (-9, "SIGKILL (out of memory"), (-250, "signal 250")],
)
def test_exit_is_described(returncode, text):
    assert text in exit_status(returncode).text


@pytest.mark.parametrize(
    ("returncode", "num_memory_kills", "is_own", "is_from_outside"),
    [
        (-signal.SIGKILL, 0, False, True),
        (-signal.SIGKILL, 0, True, False),
        (-signal.SIGKILL, 1, False, False),
        (-signal.SIGKILL, None, False, False),
        (-signal.SIGABRT, 0, False, False),
        (1, 0, False, False),
    ],
)
def test_only_a_kill_with_memory_to_spare_comes_from_outside(returncode, num_memory_kills, is_own, is_from_outside):
    status = exit_status(returncode, num_memory_kills, is_own=is_own)

    assert status.is_from_outside is is_from_outside
    assert ("not out of memory" in status.text) is (returncode == -signal.SIGKILL and num_memory_kills == 0)


async def test_kill_from_outside_is_told_from_a_crash():
    async with open_engine(step_delay_s=0.01) as killed, open_engine(faults={"abort_at_step": 2}) as crashed:
        os.kill(pid_of(killed), signal.SIGKILL)
        with pytest.raises(EngineDead, match="SIGABRT"):
            await drain(crashed, make_request())
        await killed.died

        assert killed.is_killed_from_outside == (count_memory_kills() is not None)
        assert not crashed.is_killed_from_outside


async def test_worker_that_hangs_is_noticed_though_its_client_has_left(tmp_path):
    """Clients give up sooner than the watchdog does, and the next one would find the same."""
    is_hanging = tmp_path / "latch"
    async with open_engine(step_timeout_s=0.8, faults={"hang_at_step": 2, "latch": str(is_hanging)}) as engine:
        generation = await engine.submit(make_request())
        async with asyncio.timeout(60):
            while not is_hanging.exists():  # noqa: ASYNC110 - made in the worker
                await asyncio.sleep(0.002)
            generation.cancel()
            died = await engine.died

        assert "a step took longer than 0.8 s" in died.message
        assert not engine.is_killed_from_outside, "the server has killed it"


async def test_worker_that_hangs_while_it_is_sent_media_is_noticed():
    side = 2048
    picture = Segment("", True, DecodedImage("", side, side, bytes(3 * side * side)))
    async with open_engine(step_timeout_s=0.8) as engine:
        os.kill(pid_of(engine), signal.SIGSTOP)
        sent = engine.tokenize([picture], False), engine.submit(evolve(make_request(), segments=(picture,)))
        async with asyncio.timeout(60):
            results = await asyncio.gather(*sent, return_exceptions=True)

        assert [type(result) for result in results] == [WorkerDied] * 2
        assert "tokenizing took longer than 0.8 s" in (await engine.died).message


async def test_load_that_does_not_get_on_is_refused_and_its_worker_killed():
    others = await _workers()
    reports: list[tuple[float, str]] = []
    load = msgspec.structs.replace(load_message(open_delay_s=600.0), plugins=PluginsSettings(allow=()))
    with pytest.raises(ModelLoadError) as refused:
        await WorkerEngine.open(
            load,
            isolation="process",
            python=None,
            on_progress=lambda *report: reports.append(report),
            load_timeout_s=2.0,
        )

    assert "made no progress for 2 s; the last report was 'imagining weights' at 0%" in refused.value.message
    assert "raise models.m.load_timeout_s" in refused.value.message
    assert reports == [(0.0, "imagining weights")]
    async with asyncio.timeout(60):
        while await _workers() - others:
            pass


# -- plugins of our own, installed for the worker --------------------------------------------------

HOSTILE = """
import ctypes, os, subprocess, sys, time
import enginehouse
from attrs import frozen
from enginehouse_testkit.fake_runner import FakeBackend, FakeOptions, FakeRunner

@frozen(kw_only=True)
class Options:
    deed: str
    context: int | None = None
    slots: int = 8

class Runner(FakeRunner):
    deed = ""
    def forward(self, spans):
        if self.deed == "hold the GIL":
            ctypes.PyDLL(None).sleep(3600)
        if self.deed == "exit":
            os._exit(7)
        if self.deed == "leave":
            raise SystemExit(5)
        if self.deed == "print":
            print("printed by a library", flush=True)
        return super().forward(spans)
    def open_sequence(self):
        if self.deed == "break the scheduler":
            self.capabilities = None
        return super().open_sequence()

class Backend(FakeBackend):
    name = "hostile"
    options = Options
    def open(self, source, options, progress):
        if options.deed == "fail oddly":
            raise KeyError("weights")
        if options.deed == "panic":  # libraries in Rust raise what is none of Python's exceptions
            raise type("PanicException", (BaseException,), {})("slice out of range")
        if options.deed == "start a process":
            os.set_inheritable(int(sys.argv[-1]), True)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
        runner = Runner(FakeOptions(context=options.context, slots=options.slots))
        runner.deed = options.deed
        return runner

@enginehouse.hookimpl
def register_backends(register):
    register(Backend())
"""


@pytest.fixture
def hostile_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with a backend ``hostile`` that misbehaves as its option ``deed`` says."""
    (tmp_path / "hostile.py").write_text(HOSTILE)
    metadata = tmp_path / "hostile-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[enginehouse]\nhostile = hostile\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("hostile_plugin")
@pytest.mark.parametrize(
    ("deed", "reason"),
    [("exit", "code 7"), ("break the scheduler", "the engine failed: AttributeError: 'NoneType' object")],
)
async def test_engine_that_breaks_ends_the_worker_with_the_reason(deed, reason):
    async with open_engine(backend="hostile", deed=deed) as engine:
        pid = pid_of(engine)
        async with asyncio.timeout(60):
            with pytest.raises(EngineDead, match=reason):
                await drain(engine, make_request())
            await engine.died

        assert wait_gone(pid, 60)


@pytest.mark.usefixtures("hostile_plugin")
async def test_engine_that_breaks_in_a_thread_ends_its_requests_too():
    async with open_engine("thread", "hostile", deed="break the scheduler") as engine:
        async with asyncio.timeout(60):
            with pytest.raises(EngineDead, match="AttributeError"):
                await drain(engine, make_request())


@pytest.mark.usefixtures("hostile_plugin")
async def test_backend_that_raises_anything_while_loading_fails_the_load_with_it():
    with pytest.raises(ModelLoadError, match=r"'hostile' failed in open\. KeyError: 'weights'"):
        async with open_engine(backend="hostile", deed="fail oddly"):
            pass


@pytest.mark.usefixtures("hostile_plugin")
@pytest.mark.parametrize("isolation", ["process", "thread"])
async def test_a_panic_of_a_library_while_loading_is_named(isolation):
    with pytest.raises(ModelLoadError, match=r"'hostile' failed in open\. PanicException: slice out of range"):
        async with open_engine(isolation, "hostile", deed="panic"):
            pass


@pytest.mark.usefixtures("hostile_plugin")
async def test_what_a_library_prints_goes_to_stderr(capfd):
    async with open_engine(backend="hostile", deed="print") as engine:
        assert await drain(engine, make_request(2))
    printed = capfd.readouterr()

    assert "printed by a library" in printed.err
    assert printed.out == ""


@pytest.mark.usefixtures("hostile_plugin")
async def test_death_is_noticed_although_a_process_that_the_worker_started_holds_the_link():
    async with open_engine(backend="hostile", deed="start a process") as engine:
        generation = await engine.submit(make_request())
        (left_behind,) = children_of(pid_of(engine))
        os.kill(pid_of(engine), signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(EngineDead, match="SIGKILL"):
                _ = [batch async for batch in generation]

        assert wait_gone(left_behind, 30)


# -- the server dies -------------------------------------------------------------------------------

SERVER = """
import asyncio, sys
from enginehouse.settings.config import PluginsSettings
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.messages import Load
from enginehouse.contract.types import EngineRequest, EngineSettings, Segment, StopParams

async def main(backend, options, is_loading):
    load = Load(backend, "fake", None, options, "models.m", EngineSettings(), PluginsSettings())
    def report(share, text):
        print("loading", flush=True)
    opening = asyncio.create_task(WorkerEngine.open(load, isolation="process", python=None, on_progress=report))
    if is_loading:
        await asyncio.sleep(60)
    engine = await opening
    stopping = StopParams(ignore_eos=True)
    generation = await engine.submit(EngineRequest(request_id="r", segments=(Segment("hello"),), stopping=stopping))
    print("serving", flush=True)
    async for _ in generation:
        pass

asyncio.run(main(sys.argv[1], eval(sys.argv[2]), sys.argv[3] == "loading"))
"""


@pytest.mark.usefixtures("hostile_plugin")
@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker through /proc")
@pytest.mark.parametrize(
    ("backend", "options", "moment"),
    [
        ("fake", {"step_delay_s": 0.01}, "serving"),
        ("fake", {"open_delay_s": 60.0}, "loading"),
        ("fake", {"faults": {"hang_at_step": 1}}, "serving"),
        ("hostile", {"deed": "hold the GIL"}, "serving"),
    ],
)
def test_killed_server_leaves_no_worker(backend, options, moment):
    """While streaming, loading, inside a forward pass that hangs, and inside one that even holds the GIL."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, backend, repr(options), moment],
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        for line in server.stdout:
            if line.strip() == moment:
                break
        time.sleep(0.1)
        (worker,) = children_of(server.pid)
        assert is_alive(worker)
        server.kill()
        server.wait()

        assert wait_gone(worker, 60)


@pytest.mark.parametrize("payload", [encode(load_message(open_delay_s=600.0)), b"this is no message"])
def test_worker_ends_with_the_link_alone(payload):
    """The server lives on here, so no death signal comes: the end of the link and foreign bytes suffice."""
    ours, theirs = socket_pair()
    command = [*worker_command(None), str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),), start_new_session=True) as worker:
        theirs.close()
        ours.sendall(frame(payload))
        if payload.startswith(b"this"):
            while ours.recv(1024):  # its hello
                pass  # until it hangs up
        else:
            assert ours.recv(1), "it is loading"
        ours.close()

        assert wait_gone(worker.pid, 60)


async def test_a_process_that_no_thread_can_watch_is_ended_and_told_as_a_shortage(monkeypatch) -> None:
    started = []

    def refuse(thread: threading.Thread) -> None:
        started.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="can't start new thread") as raised:
        ChildProcess([sys.executable, "-c", "import time; time.sleep(60)"])

    assert raised.value.errno == errno.EAGAIN and len(started) == 1
