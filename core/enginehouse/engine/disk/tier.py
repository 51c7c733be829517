"""Disk tier of the prefix cache: flushes kept sequences while the engine is idle, and loads them when they pay.

Called by the scheduler and the loop, on the engine thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from enginehouse.contract.backend import StateKeeper
from enginehouse.contract.errors import CacheFull
from enginehouse.engine.disk.state_folder import MIN_SAVED_TOKENS, SavedState, StateFolder
from enginehouse.engine.prefix_cache import PrefixCache

__all__ = ["DiskTier", "Pace", "Recall", "SecondsPerToken", "StateRead"]

_NEWEST_SHARE = 0.3


@define
class SecondsPerToken:
    """An average in which newer measurements count more; None before the first."""

    value: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take one measurement in."""
        new = seconds / num_tokens
        self.value = new if self.value is None else self.value + _NEWEST_SHARE * (new - self.value)

    def estimate(self, num_tokens: int) -> float | None:
        """Seconds that so many tokens will take."""
        return None if self.value is None else num_tokens * self.value


@define
class Pace:
    """The three that decide whether the disk is worth it."""

    saving: SecondsPerToken = field(factory=SecondsPerToken)
    loading: SecondsPerToken = field(factory=SecondsPerToken)
    computing: SecondsPerToken = field(factory=SecondsPerToken)

    def pays(self, num_loaded: int, num_saved: int) -> bool:
        """Whether loading so many tokens is quicker than computing so many; True while one of them is unknown."""
        loading, computing = self.loading.estimate(num_loaded), self.computing.estimate(num_saved)
        return loading is None or computing is None or loading <= computing


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


class Recall:
    """Reads ahead, and loads.

    Args:
        tier: where sequences are saved.
        cache: where they come back to.
    """

    def __init__(self, tier: DiskTier, cache: PrefixCache) -> None:
        self._tier, self._cache = tier, cache
        tier.watch(cache)
        self._reads: WeakValueDictionary[SavedState, StateRead] = WeakValueDictionary()

    def begin(self, token_ids: NDArray[np.int32], namespace: str, num_held: int) -> StateRead | None:
        """Begin to read the state that helps most; None when none helps.

        Args:
            token_ids: (num_tokens,) what a prompt could reuse at most.
            namespace: whose states may be used.
            num_held: tokens of it that need not be computed anyway.
        """
        found = self._tier.folder.find(token_ids, namespace)
        if found is None:
            return None
        state, length = found
        if length - num_held < MIN_SAVED_TOKENS or not self._tier.pace.pays(state.num_tokens, length - num_held):
            return None
        read = self._reads.get(state)
        if read is None:
            read = self._reads[state] = self._tier.read(state, num_held)
        return read

    def is_over(self, read: StateRead, namespace: str, num_handles: int, *, waits: bool) -> bool:
        """Whether the state is in the cache by now, or will never be.

        Args:
            read: from :meth:`begin`.
            namespace: as there.
            num_handles: sequences that run.
            waits: wait for the disk; else look only.
        """
        if not read.is_landed and (waits or read.data.done()):
            read.is_landed = True
            data, seconds = read.data.result()
            if data is not None:
                self._load(read.state, data, namespace, num_handles, seconds)
        return read.is_landed

    def _load(self, state: SavedState, data: memoryview, namespace: str, num_handles: int, read_s: float) -> None:
        """Put a state into the cache; less used ones make room."""
        runner, num_tokens = self._tier.runner, state.num_tokens
        if runner.free_tokens() + self._cache.num_tokens < num_tokens:
            return  # what runs holds too much, so evicting would be in vain
        while runner.free_tokens() < num_tokens or num_handles + len(self._cache) >= runner.capabilities.max_sequences:
            if not self._cache.evict():
                return
        began = self._tier.clock()
        try:
            handle = runner.load(data)
        except CacheFull:
            return
        except Exception as error:  # noqa: BLE001 - plugin border: what a file holds must not end the request
            self._tier.discard(state, f"the model refuses it: {error}")
            return
        if runner.length(handle) != num_tokens:
            runner.free_sequence(handle)
            self._tier.discard(state, "it holds another number of tokens than it says")
            return
        self._tier.pace.loading.observe(num_tokens, read_s + self._tier.clock() - began)
        _log.debug("loaded a sequence of %d tokens from %s", num_tokens, state.path.name)
        self._cache.store(state.head.token_ids, handle, namespace, is_saved=True)
