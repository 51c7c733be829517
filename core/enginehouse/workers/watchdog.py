"""Notices a worker that has stopped: a forward pass that never returns, a tokenizer that never ends.

The engine thread answers between two steps, the intake threads between two prompts. While they have work and say
nothing by themselves, each is asked a small question now and then; one that owes its answer for too long hangs. When
nobody waits any more, each is asked once more: clients give up sooner, and the next one would find the same. The worker
itself does nothing for all this, so it may hang as thoroughly as it likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Watchdog"]

# Looks per limit. The limit is counted in looks, not in seconds: a server that was stopped or busy for long looks
# once when it goes on, and then reads what the worker has sent meanwhile.
_LOOKS = 4


class Watchdog:
    """Watches one thread of a worker. Lives on the event loop and costs nothing while there is no work.

    Args:
        limit_s: how long an answer may take; 0 never finds anything wrong.
        has_work: whether the thread should be doing something.
        ask: sends the question.
        on_hang: called once, when the thread hangs.
    """

    def __init__(
        self, limit_s: float, has_work: Callable[[], bool], ask: Callable[[], None], on_hang: Callable[[], None]
    ) -> None:
        self._interval_s = limit_s / _LOOKS
        self._has_work = has_work
        self._ask = ask
        self._on_hang = on_hang
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_alive = False
        self._was_at_rest = False  # at the last look
        self._num_looks = 0  # since the question that is not answered yet

    def begin(self) -> None:
        """There is work now; harmless when that is known."""
        self._was_at_rest = False
        if self._timer is None and self._interval_s > 0:
            self._is_alive = True
            self._num_looks = 0
            self._timer = self._loop.call_later(self._interval_s, self._look)

    def heard(self) -> None:
        """The thread has said something."""
        self._is_alive = True

    def end(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        is_at_rest = not self._has_work()
        if self._is_alive and is_at_rest and self._was_at_rest:
            return  # it has said something since there is nothing to do
        self._was_at_rest = is_at_rest
        if self._is_alive:
            self._is_alive, self._num_looks = False, 0
        elif self._num_looks == 0:
            self._num_looks = 1
            self._ask()
        elif self._num_looks > _LOOKS:
            self._on_hang()
            return
        else:
            self._num_looks += 1
        self._timer = self._loop.call_later(self._interval_s, self._look)
