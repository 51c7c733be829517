"""Threads and event loops of a plugin object: bounded, limited in time, and not waited for."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator

import pytest

from enginehouse.contract.errors import PluginFailed
from enginehouse.plugins.guard import Guard, PluginFailures
from enginehouse.plugins.plugin_loops import PluginLoops
from enginehouse.plugins.threads import PluginThreads
from enginehouse_testkit.waiting import until

PLACE = "push"


@pytest.fixture
def guard() -> Guard:
    return Guard("kit", "tool parser", "held", PluginFailures())


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Holds calls outside of Python until the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def spin() -> None:
    """Compute for ever."""
    while True:
        pass


async def until_free(threads: PluginThreads) -> None:
    """Return once a call is answered, which is refused while all threads are held."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(PluginFailed):
                return await threads.run(PLACE, lambda: None, 60.0)
            await asyncio.sleep(0.01)


async def test_loop_in_python_ends_when_its_call_is_abandoned(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    threads = PluginThreads(guard, num_threads=1)

    for _ in range(3):  # with one thread, each needs the end of the one before
        with pytest.raises(PluginFailed, match="tool parser 'held' of the plugin 'kit': push did not return within"):
            await threads.run(PLACE, spin, 0.2)
        await until_free(threads)
    assert "in spin" in caplog.text
    assert guard.failures.counts["kit", "tool parser"] >= 3


async def test_abandoned_calls_are_bounded(guard: Guard, gate: threading.Event) -> None:
    threads = PluginThreads(guard, num_threads=2)
    held = [threads.run(PLACE, gate.wait, 0.2) for _ in range(2)]
    assert all(isinstance(found, PluginFailed) for found in await asyncio.gather(*held, return_exceptions=True))

    with pytest.raises(PluginFailed, match="is busy: 2 calls took too long and have not returned yet"):
        await threads.run(PLACE, lambda: None, 60.0)

    gate.set()

    await until_free(threads)


async def test_cancelled_call_is_not_waited_for(guard: Guard, gate: threading.Event) -> None:
    threads = PluginThreads(guard)
    entered = threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait()

    call = asyncio.create_task(threads.run(PLACE, hold, 60.0))
    await until(entered.is_set)
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call
    assert not gate.is_set()


async def test_call_from_one_of_its_threads_is_direct(guard: Guard) -> None:
    """A plugin that calls another object of its own, which core guards, needs no second thread."""
    threads = PluginThreads(guard, num_threads=1)

    def outer() -> tuple[int, int]:
        return threading.get_ident(), threads.call(PLACE, threading.get_ident, 60.0)

    first, second = await threads.run(PLACE, outer, 60.0)

    assert first == second != threading.get_ident()


async def test_threads_and_loops_end_when_the_server_does_and_start_again() -> None:
    guard = Guard.of_plugin("kit", "tool parser", "ending", PluginFailures(), is_own=False)

    async def current() -> threading.Thread:
        return threading.current_thread()

    for _ in range(2):
        used = [await guard.run(PLACE, threading.current_thread), await guard.run_async("handle", current)]
        assert threading.current_thread() not in used

        guard.end_threads()
        await until(lambda used=used: not any(thread.is_alive() for thread in used))


async def test_error_of_a_call_is_raised_as_it_is(guard: Guard) -> None:
    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await PluginThreads(guard).run(PLACE, fail, 60.0)


QUITS = [KeyboardInterrupt, SystemExit, asyncio.CancelledError, StopIteration]


@pytest.mark.parametrize("quits", [*QUITS, GeneratorExit])
async def test_function_that_quits_fails_by_name(quits: type[BaseException]) -> None:
    """Neither the task of core that waits nor its event loop ends."""
    guard = Guard.of_plugin("kit", "router", "held", PluginFailures(), is_own=False)

    def route() -> None:
        raise quits

    with pytest.raises(PluginFailed, match="The router 'held' of the plugin 'kit' failed in route"):
        await guard.run("route", lambda: guard.call("route", route))
    guard.end_threads()


@pytest.mark.parametrize("quits", QUITS)
async def test_coroutine_that_quits_fails_by_name(quits: type[BaseException]) -> None:
    guard = Guard.of_plugin("kit", "surface", "held", PluginFailures(), is_own=False)

    async def handle() -> None:
        raise quits

    with pytest.raises(PluginFailed, match=r"The surface 'held' of the plugin 'kit'(:| failed in) handle"):
        await guard.run_async("handle", handle)
    guard.end_threads()


async def test_coroutine_that_blocks_delays_no_other_and_fails_by_name(guard: Guard, gate: threading.Event) -> None:
    loops = PluginLoops(guard)
    entered = threading.Event()

    async def hold() -> None:
        entered.set()
        gate.wait()

    async def answer() -> str:
        await asyncio.sleep(0)
        return "answered"

    held = asyncio.create_task(loops.run("handle", hold, 0.5))
    await until(entered.is_set)

    assert await loops.run("handle", answer, 60.0) == "answered"
    assert not held.done()
    with pytest.raises(PluginFailed, match="handle blocked an event loop of the plugin for"):
        await held


async def test_held_event_loops_are_bounded(guard: Guard, gate: threading.Event) -> None:
    loops = PluginLoops(guard, max_loops=2)

    async def hold() -> None:
        gate.wait()

    for _ in range(2):
        with pytest.raises(PluginFailed, match="blocked"):
            await loops.run("handle", hold, 0.2)
    with pytest.raises(PluginFailed, match="is busy: 2 of its event loops are held"):
        await loops.run("handle", hold, 0.2)


async def test_coroutine_may_await_longer_than_the_limit(guard: Guard) -> None:
    loops = PluginLoops(guard)

    async def wait() -> str:
        await asyncio.sleep(1.0)
        return "awaited"

    assert await loops.run("handle", wait, 0.2) == "awaited"


async def test_plugin_that_stops_its_event_loop_stops_no_call(guard: Guard) -> None:
    loops = PluginLoops(guard, max_loops=1)

    async def leave() -> None:
        sys.exit(3)

    async def stop() -> str:
        loop = asyncio.get_running_loop()
        task = loop.create_task(leave())
        loop.stop()
        await asyncio.wait([task])
        task.exception()  # otherwise it is logged when the task is collected, perhaps in a later test
        return "answered"

    for _ in range(2):
        assert await loops.run("handle", stop, 60.0) == "answered"


async def test_cancellation_reaches_a_coroutine(guard: Guard) -> None:
    loops = PluginLoops(guard)
    begun, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    call = asyncio.create_task(loops.run("handle", wait, 60.0))
    await until(begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    await until(cancelled.is_set)
