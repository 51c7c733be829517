"""The worker's threads as they end: in the right order, and never without a word."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from enginehouse.contract.backend import ForwardOutput, Span
from enginehouse.contract.errors import EngineDead, ModelLoadError
from enginehouse.contract.types import EngineRequest, EngineSettings, SamplingParams, Segment, StopParams
from enginehouse.engine.loop import StepEngine
from enginehouse.settings.config import PluginsSettings
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.host import WorkerHost
from enginehouse.workers.ipc import Link
from enginehouse.workers.messages import Close, Load, LoadFailed, Ready, decode_from_worker, encode, failure_of
from enginehouse_testkit.fake_runner import FakeRunner
from enginehouse_testkit.fake_tokenizer import FakeTokenizer
from enginehouse_testkit.waiting import until


def make_load(options: dict[str, Any]) -> Load:
    return Load("fake", "fake", None, options, "models.m", EngineSettings(slots=2), PluginsSettings(allow=()))


@contextlib.asynccontextmanager
async def open_thread(**options: Any) -> AsyncIterator[WorkerEngine]:
    engine = await WorkerEngine.open(
        make_load(options), isolation="thread", python=None, on_progress=lambda share, text: None
    )
    try:
        yield engine
    finally:
        await engine.close()


def make_request(request_id: str, text: str = "tell me", max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        segments=(Segment(text),),
        sampling=SamplingParams(temperature=0),
        stopping=StopParams(max_tokens=max_tokens, ignore_eos=True),
    )


class Gate:
    """Holds up the tokenizer at each prompt that says "slow"; notes whether the model was closed meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.is_reached, self.is_model_closed = (threading.Event() for _ in range(3))
        encode_, close = FakeTokenizer.encode, FakeRunner.close
        self.found_closed: list[bool] = []

        def slow_encode(tokenizer: FakeTokenizer, text: str, special: bool) -> list[int]:
            if "slow" in text:
                self.is_reached.set()
                assert self.is_open.wait(60)
                self.found_closed.append(self.is_model_closed.is_set())
            return encode_(tokenizer, text, special)

        def noted_close(runner: FakeRunner) -> None:
            self.is_model_closed.set()
            close(runner)

        monkeypatch.setattr(FakeTokenizer, "encode", slow_encode)
        monkeypatch.setattr(FakeRunner, "close", noted_close)


async def test_model_is_not_closed_while_its_tokenizer_is_at_work(monkeypatch):
    gate = Gate(monkeypatch)
    async with open_thread() as engine:
        asked = asyncio.create_task(engine.submit(make_request("r", "slow")))
        await asyncio.to_thread(gate.is_reached.wait, 60)
        closing = asyncio.create_task(engine.close())
        with pytest.raises(EngineDead):
            await asked
        await asyncio.sleep(0.1)
        gate.is_open.set()
        await closing
        await until(gate.is_model_closed.is_set)

        assert gate.found_closed == [False]


async def test_engine_that_breaks_is_heard_of_though_the_tokenizer_is_busy(monkeypatch):
    gate = Gate(monkeypatch)

    def broken(engine: StepEngine) -> list[Any]:
        raise ZeroDivisionError("a bug")

    async with open_thread() as engine:
        slow = asyncio.create_task(engine.submit(make_request("slow", "slow")))
        await asyncio.to_thread(gate.is_reached.wait, 60)
        monkeypatch.setattr(StepEngine, "step", broken)
        monkeypatch.setattr(StepEngine, "has_work", lambda engine: True)
        call = asyncio.create_task(engine.stats())
        async with asyncio.timeout(60):
            with pytest.raises(EngineDead, match="ZeroDivisionError: a bug"):
                await slow
        await asyncio.gather(call, return_exceptions=True)

        gate.is_open.set()


async def test_runner_whose_abort_fails_is_named_and_its_worker_goes_on(monkeypatch, caplog):
    """The request is cancelled after the pass."""

    def broken(runner: FakeRunner) -> None:
        raise RuntimeError("no abort today")

    is_computing = threading.Event()
    forward = FakeRunner.forward

    def noticed(runner: FakeRunner, spans: Sequence[Span]) -> ForwardOutput:
        is_computing.set()
        return forward(runner, spans)

    monkeypatch.setattr(FakeRunner, "abort", broken)
    monkeypatch.setattr(FakeRunner, "forward", noticed)
    async with open_thread(step_delay_s=0.5) as engine:
        generation = await engine.submit(make_request("r", max_tokens=200))
        await until(is_computing.is_set)
        generation.cancel()
        async with asyncio.timeout(60):
            await generation.left
            assert (await engine.stats()).num_running == 0

        assert "the backend 'fake' of the plugin 'fake' failed in abort" in caplog.text
        assert "no abort today" in caplog.text


async def test_engine_that_cannot_be_made_closes_what_was_opened(monkeypatch):
    closed = threading.Event()
    monkeypatch.setattr(FakeRunner, "close", lambda runner: closed.set())

    def broken(engine: StepEngine, *arguments: Any, **fields: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(StepEngine, "__init__", broken)
    with pytest.raises(ModelLoadError, match="ZeroDivisionError: a bug"):
        async with open_thread():
            pass

    assert closed.is_set()


def test_errors_with_halves_of_characters_can_be_told():
    """Names of files may hold bytes that are no text."""
    error = ModelLoadError("there is no file m\udcff.gguf")
    message = decode_from_worker(encode(LoadFailed(failure_of(error))))

    assert isinstance(message, LoadFailed)
    assert message.failure.to_error().message == "there is no file m\\udcff.gguf"


@pytest.mark.parametrize("is_process", [True, False])
def test_only_the_objects_of_a_process_are_exempt_from_garbage_collection(is_process):
    ours, theirs = socket.socketpair()
    server = Link(ours)
    host = WorkerHost(Link(theirs), on_server_gone=(lambda: None) if is_process else None)
    thread = threading.Thread(target=host.run, daemon=True)
    before = gc.get_freeze_count()
    thread.start()
    try:
        server.send(encode(make_load({})))
        while not isinstance(decode_from_worker(server.receive()), Ready):
            pass

        assert (gc.get_freeze_count() > before) == is_process
    finally:
        gc.unfreeze()
        server.send(encode(Close()))
        thread.join(60)
        server.close()


def test_a_server_does_not_import_the_engine_of_its_workers() -> None:
    """Its modules cost time and memory, and a server runs the engine itself only with ``isolation = "thread"``."""
    code = "import sys, enginehouse.api.http.app, enginehouse.api.http.server; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-P", "-c", code], text=True).split()

    assert {"enginehouse.workers.host", "enginehouse.engine.loop"} & set(loaded) == set()


async def test_a_cancellation_is_told_to_the_engine_before_it_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine notes an id until its cancellation is read; the other way round it would keep it for ever."""
    calls: list[str] = []
    cancel, interrupt = StepEngine.cancel, StepEngine.interrupt

    def slow_interrupt(self: StepEngine, request_id: str) -> None:
        time.sleep(0.1)  # long enough for the engine thread to read what is queued
        calls.append("interrupt")
        interrupt(self, request_id)

    def noted_cancel(self: StepEngine, request_id: str) -> None:
        calls.append("cancel")
        cancel(self, request_id)

    monkeypatch.setattr(StepEngine, "interrupt", slow_interrupt)
    monkeypatch.setattr(StepEngine, "cancel", noted_cancel)
    async with open_thread(step_delay_s=0.005) as engine:
        generation = await engine.submit(make_request("leaves", max_tokens=1000))
        async for _ in generation:
            generation.cancel()
            break
        await until(lambda: len(calls) > 1)

    assert calls[:2] == ["interrupt", "cancel"]
