"""Blocking work on threads, while the event loop runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from enginehouse.serving.background import run_in_daemon_thread


async def test_results_of_a_daemon_thread_come_back() -> None:
    assert await run_in_daemon_thread("adding", lambda: (threading.current_thread().name, 1 + 1)) == ("adding", 2)


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("no")])
async def test_errors_of_a_daemon_thread_are_raised(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await asyncio.wait_for(run_in_daemon_thread("failing", fail), 60)
    assert caught.value is error


async def test_an_iterator_that_ends_too_early_is_an_error_and_no_wait_for_ever() -> None:
    """``next()`` of nothing is a usual mistake, and StopIteration the one exception that no future takes."""
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await asyncio.wait_for(run_in_daemon_thread("looking", lambda: next(iter(()))), 60)
    assert isinstance(caught.value.__cause__, StopIteration)
