"""Brings saved sequences back into the prefix cache for prompts that begin like them.

From then on they are kept prefixes like all others. Called by the scheduler on the engine thread while sequences enter;
knows nothing of requests.
"""

from __future__ import annotations

import logging
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.errors import CacheFull
from enginehouse.engine.disk.state_folder import MIN_SAVED_TOKENS, SavedState
from enginehouse.engine.disk.tier import DiskTier, StateRead
from enginehouse.engine.prefix_cache import PrefixCache

__all__ = ["Recall"]

_log = logging.getLogger(__name__)


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
