"""Disk tier of the prefix cache: flushes sequences while the engine is idle, and loads them if that is faster.

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

from enginehouse.contract.backend import Runner, StateKeeper
from enginehouse.contract.checkpoints import NUM_SAVED_CHECKPOINTS
from enginehouse.contract.errors import CacheFull, EnginehouseError
from enginehouse.engine.disk.state_folder import MIN_SAVED_TOKENS, SavedState, StateFolder
from enginehouse.engine.prefix_cache import PrefixCache, Truncation, free
from enginehouse.plugins import guard_of, guarded

_NEWEST_SHARE = 0.3


@define
class SecondsPerToken:
    """Exponential moving average of seconds per token; None before the first measurement."""

    value: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a measurement."""
        new = seconds / num_tokens
        self.value = new if self.value is None else self.value + _NEWEST_SHARE * (new - self.value)

    def estimate(self, num_tokens: int) -> float | None:
        """Return the estimated seconds for ``num_tokens`` tokens."""
        return None if self.value is None else num_tokens * self.value


@define
class DiskCosts:
    """Costs of saving, loading and computing tokens."""

    saving: SecondsPerToken = field(factory=SecondsPerToken)
    loading: SecondsPerToken = field(factory=SecondsPerToken)
    computing: SecondsPerToken = field(factory=SecondsPerToken)

    def pays(self, num_loaded: int, num_saved: int) -> bool:
        """Return True if loading is estimated to be at most as slow as computing, or an estimate is missing.

        Args:
            num_loaded: tokens to load.
            num_saved: tokens that then need not be computed.
        """
        loading, computing = self.loading.estimate(num_loaded), self.computing.estimate(num_saved)
        return loading is None or computing is None or loading <= computing


_MAX_STALL_S = 0.05
"""Maximum time that saving may add to a step, unless no estimate exists yet."""

_REST_S = 1.0
"""Idle time after which the engine saves sequences that are only in memory."""

_CLOSE_S = 5.0
_MAX_PENDING_BYTES = 256 * 2**20
_MIN_MEASURED_TOKENS = 32

_log = logging.getLogger(__name__)


@define(eq=False)
class StateRead:
    """A state that is being read from the disk.

    Attributes:
        num_held: tokens that were in memory already.
        is_landed: True if it is in memory, or is of no use.
    """

    state: SavedState
    data: Future[tuple[memoryview | None, float]]
    num_held: int
    is_landed: bool = False


class DiskTier:
    """Saves sequences of one runner into one folder. Used on the engine thread.

    Args:
        runner: runner of the sequences.
        folder: closed by :meth:`close`.
        clock: seconds, monotonic.
    """

    def __init__(
        self, runner: StateKeeper, folder: StateFolder, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.runner, self.folder = guarded(runner, Runner, guard_of(runner, "backend")), folder
        self.pace = DiskCosts()
        self.clock = clock
        self._truncation = Truncation(self.runner)
        self._cache: PrefixCache | None = None
        self._writer = ThreadPoolExecutor(1, "state writer")
        self._reader = ThreadPoolExecutor(1, "state reader")
        self._mutex = threading.Lock()
        self._num_pending_bytes = 0
        self._allowance_s = _MAX_STALL_S
        self._rests_since = clock()
        self._is_closed = False

    def watch(self, cache: PrefixCache) -> None:
        """Set the prefix cache whose sequences are saved."""
        self._cache = cache

    def after_step(self, num_tokens: int, seconds: float) -> None:
        """Record a finished step of ``num_tokens`` tokens, possibly 0, and reset the time allowed for saving."""
        if num_tokens >= _MIN_MEASURED_TOKENS:
            self.pace.computing.observe(num_tokens, seconds)
        self._allowance_s = _MAX_STALL_S
        self._rests_since = self.clock()

    def tends_in_s(self) -> float | None:
        """Return the seconds until the next idle flush (:meth:`tend`), or None if there is nothing to save."""
        if self._is_closed or self._cache is None or not self._cache.has_unsaved(MIN_SAVED_TOKENS):
            return None
        return max(0.0, self._rests_since + _REST_S - self.clock())

    def flush_when_idle(self) -> None:
        """Save one sequence, the most recently used first; called while the engine is idle."""
        self._allowance_s = math.inf
        if self._cache is None or not self._cache.save_next(MIN_SAVED_TOKENS):
            self._rests_since = self.clock()
        self._allowance_s = _MAX_STALL_S

    def save(self, token_ids: NDArray[np.int32], namespace: str, handle: int) -> bool:
        """Copy a sequence and queue it for writing; returns False if time or memory do not allow that now."""
        if len(token_ids) < MIN_SAVED_TOKENS or self.folder.holds(token_ids, namespace):
            return True
        if self._is_closed or self._num_pending_bytes > _MAX_PENDING_BYTES:
            return False
        if (self.pace.saving.estimate(len(token_ids)) or 0.0) > self._allowance_s:
            return False
        began = self.clock()
        try:
            cuts = self._cuts(handle, len(token_ids)) if self._truncation.keeper is not None else ()
            data = self.runner.save(handle)
        except EnginehouseError as error:  # its guard has logged the traceback
            _log.error("a sequence of %d tokens could not be saved: %s", len(token_ids), error)
            return True
        seconds = self.clock() - began
        self.pace.saving.observe(len(token_ids), seconds)
        self._allowance_s -= seconds
        with self._mutex:
            self._num_pending_bytes += data.nbytes
        self._writer.submit(self._write, token_ids.copy(), namespace, data, cuts)
        return True

    def _cuts(self, handle: int, num_tokens: int) -> tuple[int, ...]:
        """Return the lengths of the checkpoints that are saved with a sequence, ascending."""
        cuts: list[int] = []
        length = num_tokens
        while len(cuts) < NUM_SAVED_CHECKPOINTS and (length := self._truncation.kept(handle, num_tokens, length - 1)):
            cuts.append(length)
        return tuple(reversed(cuts))

    def read(self, state: SavedState, num_held: int) -> StateRead:
        """Start to read a file; ``num_held`` of its tokens are already in memory."""
        return StateRead(state, self._reader.submit(self._read, state), num_held)

    def discard(self, state: SavedState, reason: str) -> None:
        """Queue the removal of an unusable file."""
        self._writer.submit(self.folder.discard, state, reason)

    def flush(self) -> None:
        """Wait until all queued files are written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Save sequences that are only in memory, within a time limit, and wait for the writer."""
        if self._is_closed:
            return
        self._allowance_s = _CLOSE_S
        while self._cache is not None and self._cache.save_next(MIN_SAVED_TOKENS):
            pass
        self._is_closed = True
        self._reader.shutdown(wait=True)
        self._writer.shutdown(wait=True)
        self.folder.close()

    def _write(self, token_ids: NDArray[np.int32], namespace: str, data: memoryview, cuts: tuple[int, ...]) -> None:
        try:
            self.folder.write(token_ids, namespace, data, cuts)
        finally:
            with self._mutex:
                self._num_pending_bytes -= data.nbytes

    def _read(self, state: SavedState) -> tuple[memoryview | None, float]:
        began = self.clock()
        try:
            data = self.folder.read(state)
        except (OSError, ValueError, MemoryError):  # the prompt can be computed
            _log.exception("a saved sequence could not be read")
            data = None
        return data, self.clock() - began


class Recall:
    """Reads saved states in the background and loads them into the prefix cache.

    Args:
        tier: disk tier with the saved sequences.
        cache: prefix cache to load into.
    """

    def __init__(self, tier: DiskTier, cache: PrefixCache) -> None:
        self._tier, self._cache = tier, cache
        tier.watch(cache)
        self._reads: WeakValueDictionary[SavedState, StateRead] = WeakValueDictionary()

    def begin(self, token_ids: NDArray[np.int32], namespace: str, num_held: int) -> StateRead | None:
        """Start to read the most useful state; returns None if no state is worth loading.

        Args:
            token_ids: (num_tokens,) the longest reusable prefix of a prompt.
            namespace: namespace of the states.
            num_held: number of its tokens that are computed already.
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
        """Return True if the state is in the cache or cannot be loaded.

        Args:
            read: from :meth:`begin`.
            namespace: as for :meth:`begin`.
            num_handles: number of running sequences.
            waits: if True, block until the file is read; else only poll.
        """
        if not read.is_landed and (waits or read.data.done()):
            read.is_landed = True
            data, seconds = read.data.result()
            if data is not None:
                self._load(read.state, data, namespace, num_handles, seconds)
        return read.is_landed

    def _load(self, state: SavedState, data: memoryview, namespace: str, num_handles: int, read_s: float) -> None:
        """Load a state into the cache, evicting less recently used ones."""
        runner, num_tokens = self._tier.runner, state.num_tokens
        if runner.free_tokens() + self._cache.num_tokens < num_tokens:
            return  # running sequences occupy too much; evicting would not help
        while runner.free_tokens() < num_tokens or num_handles + len(self._cache) >= runner.capabilities.max_sequences:
            if not self._cache.evict():
                return
        began = self._tier.clock()
        try:
            handle = runner.load(data)
        except CacheFull:
            return
        except EnginehouseError as error:  # the content of a file must not end the request
            self._tier.discard(state, f"the model refuses it: {error}")
            return
        if runner.length(handle) != num_tokens:
            free(runner, handle)
            self._tier.discard(state, "its number of tokens differs from the one in its header")
            return
        self._tier.pace.loading.observe(num_tokens, read_s + self._tier.clock() - began)
        _log.debug("loaded a sequence of %d tokens from %s", num_tokens, state.path.name)
        self._cache.store(state.head.token_ids, handle, namespace, is_saved=True)
