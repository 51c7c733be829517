"""What is saved, and when: the engine thread's side of the disk tier.

Copying a sequence out of the runner is all that the engine thread does, and only for a bounded time per step; checksums
and files are other threads' work. Sequences are saved when they are evicted, when nobody has asked for anything for a
while, and at the end. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from attrs import define
from numpy.typing import NDArray

from enginehouse.contract.backend import StateKeeper
from enginehouse.engine.disk.pace import Pace
from enginehouse.engine.disk.state_folder import MIN_SAVED_TOKENS, SavedState, StateFolder
from enginehouse.engine.prefix_cache import PrefixCache

__all__ = ["DiskTier", "StateRead"]

_MAX_STALL_S = 0.05
"""Most time that saving may add to a step, unless nothing is known yet."""

_REST_S = 1.0
"""Without work for so long, the engine saves what it has in memory only."""

_CLOSE_S = 5.0
_MAX_PENDING_BYTES = 256 * 2**20
_MIN_MEASURED_TOKENS = 32
_log = logging.getLogger(__name__)


@define(eq=False)
class StateRead:
    """A state on its way from the disk.

    Attributes:
        num_held: tokens that were in memory anyway.
        is_landed: it is in memory, or has turned out to be of no use.
    """

    state: SavedState
    data: Future[tuple[memoryview | None, float]]
    num_held: int
    is_landed: bool = False


class DiskTier:
    """Saves sequences of one runner into one folder. Used on the engine thread.

    Args:
        runner: whose sequences are saved.
        folder: closed by :meth:`close`.
        clock: seconds, monotonic.
    """

    def __init__(
        self, runner: StateKeeper, folder: StateFolder, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.runner, self.folder = runner, folder
        self.pace = Pace()
        self.clock = clock
        self._cache: PrefixCache | None = None
        self._writer = ThreadPoolExecutor(1, "state writer")
        self._reader = ThreadPoolExecutor(1, "state reader")
        self._mutex = threading.Lock()
        self._num_pending_bytes = 0
        self._allowance_s = _MAX_STALL_S
        self._rests_since = clock()
        self._is_closed = False

    def watch(self, cache: PrefixCache) -> None:
        """Save what this cache holds."""
        self._cache = cache

    def after_step(self, num_tokens: int, seconds: float) -> None:
        """A step is over: it computed so many tokens, if any, and there is time for saving again."""
        if num_tokens >= _MIN_MEASURED_TOKENS:
            self.pace.computing.observe(num_tokens, seconds)
        self._allowance_s = _MAX_STALL_S
        self._rests_since = self.clock()

    def tends_in_s(self) -> float | None:
        """In how many seconds of rest :meth:`tend` will have something to do; None: it has nothing."""
        if self._is_closed or self._cache is None or not self._cache.has_unsaved(MIN_SAVED_TOKENS):
            return None
        return max(0.0, self._rests_since + _REST_S - self.clock())

    def tend(self) -> None:
        """Save one sequence, the last used first; called while nobody asks for anything."""
        self._allowance_s = math.inf
        if self._cache is None or not self._cache.save_next(MIN_SAVED_TOKENS):
            self._rests_since = self.clock()
        self._allowance_s = _MAX_STALL_S

    def save(self, token_ids: NDArray[np.int32], namespace: str, handle: int) -> bool:
        """Copy a sequence and hand it to the writer; False when there is no time or memory for that now."""
        if len(token_ids) < MIN_SAVED_TOKENS or self.folder.holds(token_ids, namespace):
            return True
        if self._is_closed or self._num_pending_bytes > _MAX_PENDING_BYTES:
            return False
        if (self.pace.saving.estimate(len(token_ids)) or 0.0) > self._allowance_s:
            return False
        began = self.clock()
        try:
            data = self.runner.save(handle)
        except Exception:  # noqa: BLE001 - plugin border: saving is worth no request
            _log.exception("a sequence of %d tokens could not be saved", len(token_ids))
            return True
        seconds = self.clock() - began
        self.pace.saving.observe(len(token_ids), seconds)
        self._allowance_s -= seconds
        with self._mutex:
            self._num_pending_bytes += data.nbytes
        self._writer.submit(self._write, token_ids.copy(), namespace, data)
        return True

    def read(self, state: SavedState, num_held: int) -> StateRead:
        """Begin to read a file, of whose tokens so many are in memory."""
        return StateRead(state, self._reader.submit(self._read, state), num_held)

    def discard(self, state: SavedState, reason: str) -> None:
        """Remove a file that is of no use, before long."""
        self._writer.submit(self.folder.discard, state, reason)

    def flush(self) -> None:
        """Wait until everything handed to the writer is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Save what is in memory only, as far as there is time, and wait for the writer."""
        if self._is_closed:
            return
        self._allowance_s = _CLOSE_S
        while self._cache is not None and self._cache.save_next(MIN_SAVED_TOKENS):
            pass
        self._is_closed = True
        self._reader.shutdown(wait=True)
        self._writer.shutdown(wait=True)
        self.folder.close()

    def _write(self, token_ids: NDArray[np.int32], namespace: str, data: memoryview) -> None:
        try:
            self.folder.write(token_ids, namespace, data)
        finally:
            with self._mutex:
                self._num_pending_bytes -= data.nbytes

    def _read(self, state: SavedState) -> tuple[memoryview | None, float]:
        began = self.clock()
        try:
            data = self.folder.read(state)
        except Exception:  # noqa: BLE001 - whatever it is, the prompt can be computed
            _log.exception("a saved sequence could not be read")
            data = None
        return data, self.clock() - began
